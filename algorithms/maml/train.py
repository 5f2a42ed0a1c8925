"""Meta-trains initial weights, by default to tell apart letters after one look at each.

python -m algorithms.maml.train
"""

import dataclasses
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import optax
import tyro

from core import Trainer, UserError
from core.errors import NotFinite, at_least
from core.optimizer import AdamWOptions
from core.run import Run, RunOptions, launch

from . import maml
from .data import Tasks, benchmark_tasks, glyph_tasks, image_tasks, nearest, sinusoid
from .model import ModelConfig, build
from .pictures import draw_sines, draw_tasks

POINTS = 100  # at which a sine is tested
TESTED_SHOTS, TESTED = (5, 10), (0, 1, 10)  # points and steps, as in figure 2


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """Those of all scripts; every task is new, so there is only one pass."""

    epochs: tyro.conf.SuppressFixed[int] = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Learn initial weights from which a few steps learn a new task (MAML)."""

    dataset: Literal["glyphs", "sinusoid", "omniglot", "mini-imagenet"] = "glyphs"
    """glyphs and sinusoid are always there; omniglot and mini-imagenet come through learn2learn."""
    images: str = ""
    """Folder of pictures to take instead, one subfolder for each class."""
    image_size: int = 28
    """Pixels along each side that these are scaled to."""
    color: bool = False
    """Read these in three channels instead of one."""
    full: bool = False
    """The settings of the published protocol instead of those of a short run."""
    ways: int = 5
    """Classes of a task."""
    shots: int = 1
    """Examples of each class to learn from; of a sine, points."""
    queries: int = 1
    """Examples of each class to answer."""
    inner_rate: float = 0.4
    """Learning rate of the steps on a task."""
    inner_steps: int = 1
    """Steps on a task in training."""
    test_steps: int = 3
    """Steps on a task in the test."""
    first_order: bool = False
    """Leave out the derivatives through the gradients of these steps."""
    remat: bool = False
    """Compute these steps again in the backward pass: memory hardly grows with them."""
    frequency_spread: float = 0.0
    """How far the angular frequency of a sine may be from 1."""
    valid_tasks: int = 128
    """Tasks of new classes to evaluate on now and then."""
    test_tasks: int = 600
    """Tasks of yet other classes to test on at the end."""
    model: ModelConfig = ModelConfig()
    optimizer: AdamWOptions = AdamWOptions(3e-3)
    run: Annotated[Options, tyro.conf.arg(name="")] = Options(
        steps=200, batch_size=32, microbatches="auto", eval_every=100
    )

    def __post_init__(self) -> None:
        for name in ("ways", "shots", "queries", "image_size", "valid_tasks", "test_tasks"):
            at_least(self, name, 1)
        for name in ("inner_rate", "inner_steps", "test_steps", "frequency_spread"):
            at_least(self, name, 0)
        at_least(self.run, "steps", 1)

    def defaults(self) -> "Config":
        """The settings of this data set and protocol."""
        given = {name: getattr(self, name) for name in ("dataset", "images", "full")}
        config = Config(**given)
        if not self.images:
            config = changed(config, SETTINGS[self.dataset])
        if self.full:
            config = changed(config, PUBLISHED[self.dataset])
            if self.dataset == "omniglot" and self.ways >= 20:
                config = changed(config, TWENTY_WAYS)
        return config


SETTINGS: dict[str, dict[str, Any]] = {
    "glyphs": {},
    "omniglot": {},
    "mini-imagenet": {
        "inner_rate": 0.01,
        "inner_steps": 5,
        "test_steps": 10,
        "queries": 5,
        "model": ModelConfig(filters=32, pool=True),
        "batch_size": 4,
    },
    "sinusoid": {
        "ways": 1,
        "shots": 10,
        "queries": 10,
        "inner_rate": 0.01,
        "test_steps": 10,
        "batch_size": 25,
        "steps": 5000,
        "eval_every": 1000,
        "microbatches": 1,
        "optimizer": AdamWOptions(1e-2),
    },
}
# Finn et al. 2017, appendix A.1, and their code.
CONSTANT = AdamWOptions(1e-3, schedule="constant")
LONG = {"steps": 60_000, "eval_every": 1000, "optimizer": CONSTANT}
PUBLISHED: dict[str, dict[str, Any]] = {
    "glyphs": LONG,
    "omniglot": LONG,
    "mini-imagenet": LONG | {"queries": 15},
    "sinusoid": LONG | {"steps": 70_000},
}
TWENTY_WAYS = {"inner_rate": 0.1, "inner_steps": 5, "test_steps": 5, "batch_size": 16}


def changed(config: Config, settings: dict[str, Any]) -> Config:
    """A config with other settings, its own and those of the run."""
    own = {field.name for field in dataclasses.fields(Config)}
    run = {name: value for name, value in settings.items() if name not in own}
    settings = {name: value for name, value in settings.items() if name in own}
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **run), **settings)


def main(config: Config) -> None:
    draw, record = make_draw(config)
    run = Run("maml", config, record)

    def tasks(split: str, number: int) -> Tasks:
        return Tasks(draw[split], number, config.run.seed, split)

    train = tasks("train", config.run.steps * config.run.batch_size)
    valid = tasks("valid", config.valid_tasks)
    trainer = make_trainer(config, train, run, config.inner_steps, folder=run.folder)
    result = fit(config, trainer, train, valid)
    if config.dataset == "sinusoid" and not config.images:
        plain = make_trainer(config, train, run, 0, folder=run.folder / "pretrained")
        fit(config, plain, train, valid)
        params = {"maml": trainer.state.params, "pretrained": plain.state.params}
        result["test"] = test_sines(config, params, run)
    else:
        result["test"] = test_images(config, trainer, tasks("test", config.test_tasks), run)
    run.finish(result)


def make_draw(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Functions that draw a task of each split, and what to record of the data."""
    sizes = {"ways": config.ways, "shots": config.shots, "queries": config.queries}
    if config.images:
        return image_tasks(config.images, config.image_size, config.color, **sizes)
    if config.dataset == "glyphs":
        return glyph_tasks(**sizes)
    if config.dataset == "sinusoid":
        return dict.fromkeys(("train", "valid", "test"), make_sines(config, config.shots)), {}
    return benchmark_tasks(config.dataset, **sizes), {}


def make_sines(config: Config, shots: int, **more: Any) -> Any:
    spread = config.frequency_spread
    more = {"queries": config.queries, "frequency": (1 - spread, 1 + spread)} | more
    return partial(sinusoid, shots=shots, **more)


def make_trainer(config: Config, tasks: Tasks, run: Run, steps: int, **more: Any) -> Trainer:
    """A trainer of the query loss after so many steps on each task."""
    example = tasks[0]
    model, init = build(config.model, example["query_x"].shape[1:], config.ways)
    images = example["query_x"].ndim > 2
    bound = {"model": model, "objective": maml.classification if images else maml.regression}
    return Trainer(
        maml.collate,
        partial(maml.loss, learner=make_learner(config, steps), **bound),
        partial(maml.predict, learner=make_learner(config, config.test_steps), **bound),
        init,
        config.optimizer.build(config.run.steps),
        run.mesh,
        [example],
        options=config.run,
        overrides=run.overrides,
        unit="tasks",
        show=("loss", "accuracy") if images else ("loss",),
        **more,
    )


def make_learner(config: Config, steps: int) -> Any:
    return partial(
        maml.adapt,
        optimizer=optax.sgd(config.inner_rate),
        steps=steps,
        first_order=config.first_order,
        remat=config.remat,
    )


def fit(config: Config, trainer: Trainer, train: Tasks, valid: Tasks) -> dict[str, Any]:
    try:
        return trainer.fit(train, valid)
    except NotFinite as error:
        error.add_note(
            f"The steps on a task may be too large: --inner-rate is {config.inner_rate:g}, "
            f"--inner-steps {config.inner_steps}."
        )
        raise


def answers(config: Config, trainer: Trainer, tasks: Tasks, steps: int) -> np.ndarray:
    """The answers to all tasks [tasks, queries, ...].

    Raises:
      UserError: some are not finite.
    """
    found = np.stack(trainer.predict(tasks))
    if not np.isfinite(found).all():
        bad = int(np.sum(~np.isfinite(found).all(tuple(range(1, found.ndim)))))
        raise UserError(
            f"In {bad} of {len(found)} tasks the answers after {steps} steps are not finite: "
            f"--inner-rate {config.inner_rate:g} is too large for so many. Give a lower one, or "
            "fewer --test-steps."
        )
    return found


def test_images(config: Config, trainer: Trainer, tasks: Tasks, run: Run) -> dict[str, Any]:
    """Accuracy over test tasks, beside that of the nearest pixels on the same tasks."""
    logits = answers(config, trainer, tasks, config.test_steps)
    targets = np.stack([task["query_y"] for task in tasks])
    figures = {
        "accuracy": interval(np.mean(logits.argmax(2) == targets, 1)),
        "nearest": interval([nearest(task) for task in tasks]),
    }
    run.save("tasks.png", partial(draw_tasks, [tasks[i] for i in range(min(4, len(tasks)))]))
    ours, floor = (f"{100 * mean:.2f} ± {100 * half:.2f} %" for mean, half in figures.values())
    run.say(
        f"{config.ways} ways, {config.shots} shots, {len(tasks)} test tasks of new classes: "
        f"accuracy {ours} (95 % interval), nearest pixels {floor}"
    )
    return figures | {"tasks": len(tasks), "steps": config.test_steps}


def test_sines(config: Config, params: dict[str, Any], run: Run) -> dict[str, Any]:
    """Mean squared errors over test tasks after each number of steps; draws one of the tasks."""
    figures: dict[str, Any] = {}
    drawn: dict[str, Any] = {}
    predictors = {steps: make_predictor(config, params["maml"], run, steps) for steps in TESTED}
    for shots in TESTED_SHOTS:
        draw = make_sines(config, shots, queries=POINTS, grid=True)
        tasks = Tasks(draw, config.test_tasks, config.run.seed, "test")
        targets = np.stack([task["query_y"] for task in tasks])
        shown = int(np.ptp(targets[:10], axis=1).argmax())  # a flat one would show little
        for name, weights in params.items():
            curves = {}
            for steps, predictor in predictors.items():
                predictor.state = dataclasses.replace(predictor.state, params=weights)
                found = answers(config, predictor, tasks, steps)
                errors = np.mean(np.square(found - targets), (1, 2))
                figures[f"{name}, {shots} shots, {steps} steps"] = interval(errors)
                curves[steps] = found[shown]
            drawn[f"{name}, {shots} points"] = tasks[shown], curves
    run.save("sines.png", partial(draw_sines, drawn))
    for name, (mean, half) in figures.items():
        run.say(f"mean squared error, {name}: {mean:.3f} ± {half:.3f}")
    return figures | {"tasks": config.test_tasks}


def make_predictor(config: Config, params: Any, run: Run, steps: int) -> Trainer:
    """A trainer that answers about sines after so many steps."""
    model, _ = build(config.model, (1,), 1)
    learner = make_learner(config, steps)
    return Trainer(
        maml.collate,
        None,
        partial(maml.predict, model=model, objective=maml.regression, learner=learner),
        params,
        None,
        run.mesh,
        [make_sines(config, config.shots)(np.random.default_rng(0))],
        options=config.run,
        overrides=run.overrides,
    )


def interval(values: Any) -> tuple[float, float]:
    """The mean of values, one per task, and half the width of its 95 % confidence interval."""
    deviation = np.std(values, ddof=1) if len(values) > 1 else np.nan
    return float(np.mean(values)), float(1.96 * deviation / np.sqrt(len(values)))


if __name__ == "__main__":
    launch(Config, main)
