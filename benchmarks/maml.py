"""Meta-steps per second, against learn2learn in PyTorch on the same network and tasks.

    python -m benchmarks.maml        (needs learn2learn and torch: see requirements/)

Four convolutions of 64 filters, 5 ways, 1 shot, 1 query, 32 tasks to a meta-step of Adam, float32.
Both run on one core and take turns; what counts is the time of that core, so that what else the
machine does weighs little. Medians of the ratios are shown; the aim is 3 times. Then the memory
that a compiled step needs besides its arguments, by the number of inner steps.
"""

import dataclasses
import os
import time
import warnings
from functools import partial
from statistics import median

import jax
import numpy as np
import optax
import tyro

from algorithms.maml import maml
from algorithms.maml.model import ModelConfig, build
from core import Trainer, TrainOptions, make_mesh

WAYS, TASKS, RATE, OUTER, AIM = 5, 32, 0.4, 1e-3, 3.0


@dataclasses.dataclass(frozen=True)
class Config:
    """MAML's speed beside learn2learn's."""

    rounds: int = 5
    """Turns of each."""
    meta_steps: int = 4
    """Meta-steps of a turn."""
    inner_steps: tuple[int, ...] = (1, 5)
    """Numbers of inner steps to compare."""


def some_tasks():
    rng, labels = np.random.default_rng(0), np.arange(WAYS, dtype=np.int32)
    x = rng.random((2, TASKS, WAYS, 28, 28, 1)).astype(np.float32)
    return [
        {"support_x": s, "support_y": labels, "query_x": q, "query_y": labels}
        for s, q in zip(*x, strict=True)
    ]


class Ours:
    def __init__(self, tasks, steps, remat=False):
        model, init = build(ModelConfig(), (28, 28, 1), WAYS)
        learner = partial(maml.adapt, optimizer=optax.sgd(RATE), steps=steps, remat=remat)
        bound = {"model": model, "objective": maml.classification, "learner": learner}
        self.trainer = Trainer(
            maml.collate,
            partial(maml.loss, **bound),
            partial(maml.predict, **bound),
            init,
            optax.adam(OUTER),
            make_mesh(),
            tasks[:1],
            options=TrainOptions(batch_size=TASKS, microbatches="auto"),
        )
        self.batch = self.trainer.layout.batch(maml.collate(tasks), TASKS)
        step = self.trainer.step_jit.lower(self.trainer.state, self.batch)
        self.compiled = step.compile()

    def meta_step(self):
        self.trainer.state, metrics = self.compiled(self.trainer.state, self.batch)
        return float(metrics["loss"])

    def memory(self):
        return self.compiled.memory_analysis().temp_size_in_bytes


class Theirs:
    def __init__(self, tasks, steps):
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import learn2learn as l2l

        torch.set_num_threads(1)
        self.torch, self.steps = torch, steps
        self.maml = l2l.algorithms.MAML(l2l.vision.models.OmniglotCNN(WAYS), lr=RATE)
        self.optimizer = torch.optim.Adam(self.maml.parameters(), lr=OUTER)
        self.tasks = [
            {
                name: torch.tensor(x.transpose(0, 3, 1, 2) if x.ndim == 4 else x.astype(np.int64))
                for name, x in task.items()
            }
            for task in tasks
        ]

    def meta_step(self):
        error, total = self.torch.nn.functional.cross_entropy, 0.0
        self.optimizer.zero_grad()
        for task in self.tasks:
            learner = self.maml.clone()
            for _ in range(self.steps):
                learner.adapt(error(learner(task["support_x"]), task["support_y"]))
            loss = error(learner(task["query_x"]), task["query_y"]) / TASKS
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        return total


def seconds(side, meta_steps):
    """Of the core, for one meta-step."""
    began = time.process_time()
    for _ in range(meta_steps):
        side.meta_step()
    return (time.process_time() - began) / meta_steps


def main(config: Config) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX counts the cores
    tasks = some_tasks()
    for steps in config.inner_steps:
        ours, theirs = Ours(tasks, steps), Theirs(tasks, steps)
        for side in (ours, theirs):
            side.meta_step()
        turns = [
            (seconds(ours, config.meta_steps), seconds(theirs, config.meta_steps))
            for _ in range(config.rounds)
        ]
        ratios = [other / one for one, other in turns]
        one, other = (median(times) for times in zip(*turns, strict=True))
        print(
            f"{steps} inner steps: {1000 * one:.0f} ms a meta-step, learn2learn "
            f"{1000 * other:.0f} ms: {median(ratios):.2f} times as fast "
            f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}; the aim is {AIM:g})"
        )
    for remat in (False, True):
        sizes = [
            f"{steps}: {Ours(tasks, steps, remat).memory() / 2**20:.1f} MiB" for steps in (1, 5, 20)
        ]
        print(f"memory of a step by inner steps, {'with' if remat else 'no'} remat:", *sizes)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(tyro.cli(Config))
