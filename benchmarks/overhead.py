"""What `Trainer.fit` costs on top of a hand-written `jax.jit` loop.

    python -m benchmarks.overhead            (or `make bench`)

Both train the same model on the same batches in the same order, in turns within one run, so that
a busy machine slows both; the figures are medians over the rounds. The trainer logs to a folder and
to the console as in any run; what comes once a run (start, last evaluation and save) is left out.

Aims: at least 0.99 of the steps per second on the demo's language model, at most 200 microseconds
per step more on a tiny network.
"""

import contextlib
import dataclasses
import io
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from algorithms.lm import lm, train
from algorithms.lm.model import build
from algorithms.lm.tokenizer import DEFAULT_VOCAB
from core import Loss, Trainer, TrainOptions, make_mesh
from core.data import order


@dataclasses.dataclass(frozen=True)
class Config:
    """Steps per second of Trainer.fit over those of a raw jit loop."""

    rounds: int = 30
    """Turns of each loop."""
    lm_steps: int = 12
    """Steps in a turn of the demo's language model; 0 leaves it out."""
    mlp_steps: int = 1000
    """Steps in a turn of the tiny network; 0 leaves it out."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What both loops train."""

    collate: Callable[[Any], dict[str, np.ndarray]]
    loss: Callable[..., Loss]
    init: Callable[[jax.Array], Any]
    optimizer: optax.GradientTransformation
    examples: Any
    batch_size: int
    clip_norm: float


class Clock:
    """Times the steps between the end of a turn's first step and the end of its last."""

    def __init__(self, step: Callable[..., Any], steps: int):
        self.step, self.steps, self.calls = step, steps, 0

    def __call__(self, *args: Any) -> Any:
        out = self.step(*args)
        self.calls += 1
        if self.calls in (1, self.steps):
            jax.block_until_ready(out)
            now = time.perf_counter()
            if self.calls == self.steps:
                self.seconds, self.calls = (now - self.began) / (self.steps - 1), 0
            self.began = now
        return out


def fitted(problem: Problem, steps: int, folder: Path) -> Callable[[], float]:
    """A function that runs a turn of `Trainer.fit` and returns its seconds per step."""
    trainer = Trainer(
        problem.collate,
        problem.loss,
        None,
        problem.init,
        problem.optimizer,
        make_mesh(),
        [problem.examples[0]],
        options=TrainOptions(
            steps=steps, batch_size=problem.batch_size, clip_norm=problem.clip_norm
        ),
        folder=folder,
    )
    trainer.step_jit = clock = Clock(trainer.step_jit, steps)

    def turn() -> float:
        trainer.folder = Path(tempfile.mkdtemp(dir=folder))
        with contextlib.redirect_stderr(io.StringIO()):
            trainer.fit(problem.examples)
        return clock.seconds

    return turn


def by_hand(problem: Problem, steps: int) -> Callable[[], float]:
    """The same with the loop that one would write for this model alone."""

    def mean_loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        out = problem.loss(params, batch, key)
        weights = jnp.ones_like(out.values) if out.weights is None else out.weights
        return jnp.sum(out.values * weights) / jnp.sum(weights)

    clip = optax.clip_by_global_norm(problem.clip_norm) if problem.clip_norm else optax.identity()
    optimizer = optax.chain(clip, problem.optimizer)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, batch: Any, number: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), number)
        loss, grads = jax.value_and_grad(mean_loss)(params, batch, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.jit(problem.init)(jax.random.key(0))
    state = [params, jax.jit(optimizer.init)(params)]
    clock = Clock(step, steps)

    def turn() -> float:
        size, number = problem.batch_size, 0
        rows, epoch = order(0, 0, len(problem.examples)), 0
        while number < steps:
            if len(rows) < size:
                epoch += 1
                rows = order(0, epoch, len(problem.examples))
            batch = problem.collate([problem.examples[row] for row in rows[:size].tolist()])
            rows = rows[size:]
            state[0], state[1], _ = clock(*state, batch, np.int32(number))
            number += 1
        return clock.seconds

    return turn


def language_model() -> Problem:
    """The demo's model and options on random blocks, of which only the speed counts."""
    config = train.Config()
    model, init = build(config.model, DEFAULT_VOCAB)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, DEFAULT_VOCAB, (1024, config.block + 1))
    return Problem(
        partial(lm.collate, block=config.block),
        partial(lm.loss, model=model),
        init,
        config.optimizer.build(1000),
        [{"tokens": row, "bytes": np.ones(config.block)} for row in tokens],
        config.run.batch_size,
        config.run.clip_norm,
    )


def tiny_network() -> Problem:
    def loss(params: Any, batch: Any, key: Any) -> Loss:
        hidden = jnp.tanh(batch["x"] @ params["in"])
        return Loss(jnp.sum((hidden @ params["out"] - batch["y"]) ** 2, axis=-1))

    def collate(examples: Any) -> dict[str, np.ndarray]:
        return {name: np.stack([example[name] for example in examples]) for name in ("x", "y")}

    def init(key: jax.Array) -> Any:
        return {
            "in": jax.random.normal(key, (16, 32)) / 4,
            "out": jax.random.normal(key, (32, 4)) / 6,
        }

    rng = np.random.default_rng(0)
    examples = [
        {"x": rng.normal(size=16).astype(np.float32), "y": rng.normal(size=4).astype(np.float32)}
        for _ in range(4096)
    ]
    return Problem(collate, loss, init, optax.adam(1e-3), examples, 16, 0.0)


def compare(problem: Problem, steps: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        turns = fitted(problem, steps, Path(folder)), by_hand(problem, steps)
        for turn in turns:
            turn()  # compiles
        times = np.empty((rounds, 2))  # ours, raw
        for number in range(rounds):
            for which in (0, 1) if number % 2 else (1, 0):  # whoever is first finds a cooler cache
                times[number, which] = turns[which]()
    ours, raw = times.T
    return {
        "speed over the raw loop": float(np.median(raw / ours)),
        "microseconds more per step": 1e6 * float(np.median(ours - raw)),
        "raw milliseconds per step": 1e3 * float(np.median(raw)),
    }


def main(config: Config) -> None:
    problems = {"language model": (language_model(), config.lm_steps)}
    problems["tiny network"] = (tiny_network(), config.mlp_steps)
    for name, (problem, steps) in problems.items():
        if steps:
            print(json.dumps({name: compare(problem, steps, config.rounds)}), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config))
