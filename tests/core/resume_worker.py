"""A run of ten steps that kills itself at a given moment, to be gone on with by another process.

python -m tests.core.resume_worker FOLDER KIND MOMENT
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from threading import Timer

import jax
import numpy as np
import optax

from core import MeshOptions, Trainer, TrainOptions, checksums, make_mesh
from core.checkpoint import FOLDER, steps
from core.report import ReportOptions
from tests import toy

STEPS = 10


class Source:
    """Draws the examples of each epoch: how many and which depends on all that came before."""

    def __init__(self):
        self.random, self.seen = np.random.default_rng(3), np.zeros(2, np.int64)

    def __call__(self, epoch, params):
        self.seen += [1, epoch]
        bias = float(np.abs(params["bias"]).sum())
        number = 30 + int(self.random.integers(20)) + int(1e6 * bias) % 3
        return toy.examples(number, seed=int(self.random.integers(1000)))

    def state(self):
        # A generator's state has integers of 128 bits.
        return {"random": self.random.bit_generator.state, "seen": [self.seen, None]}

    def restore(self, state):
        self.random.bit_generator.state = state["random"]
        self.seen = state["seen"][0]


KINDS = {
    "plain": {"save_every": 5},
    "microbatches": {"microbatches": 2, "clip_norm": 0.1, "eval_every": 3, "save_every": 2},
    "source": {"save_every": 1, "eval_every": 4},
}


def trainer(folder, kind, sizes=(2, 2), overrides=None, **more):
    given = {"steps": STEPS, "batch_size": 16, "keep": 2} | KINDS[kind] | more
    options = TrainOptions(**given, report=ReportOptions(log_every=1, quiet=True))
    mesh = make_mesh(MeshOptions(*sizes), jax.devices()[: int(np.prod(sizes))])
    schedule = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.02, 0, STEPS))
    return Trainer(
        toy.collate,
        toy.loss,
        toy.predict,
        partial(toy.init, width=16, hidden=60),
        schedule,
        mesh,
        toy.examples(2),
        options=options,
        overrides=overrides,
        folder=folder,
    )


def fit(one, kind):
    train = Source() if kind == "source" else toy.examples(40)
    return one.fit(train, toy.examples(9, seed=5), best=("abs", "min"))


def finished(folder):
    """Whether there is a checkpoint, and no other under way."""
    return steps(folder / FOLDER) and not list((folder / FOLDER).glob("*tmp*"))


def dies_at(one, moment):
    """Makes a trainer kill its process at its Nth "step N", "evaluation N" or "finalising N", or
    "after N.S": S seconds after its step N began, whatever it is at."""
    what, number = moment.split()
    count = 0

    def counted(original):
        def call(*args):
            nonlocal count
            count += 1
            if what == "after" and count == int(float(number)):
                delay = float(number) % 1
                Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif count == float(number):
                while what != "finalising" and not finished(one.folder):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        return call

    if what in ("step", "after"):
        one.step_jit = counted(one.step_jit)
    elif what == "evaluation":
        one.evaluate = counted(one.evaluate)
    else:
        checksums.write = counted(checksums.write)


def main():
    import tests.conftest  # noqa: F401

    folder, kind, moment = sys.argv[1:]
    one = trainer(Path(folder), kind)
    dies_at(one, moment)
    fit(one, kind)
    time.sleep(1)  # "after" may come when all is done


if __name__ == "__main__":
    main()
