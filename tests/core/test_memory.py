"""A long run with evaluations and saves takes no more memory than a short one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import optax
import pytest

from core import Trainer, TrainOptions, make_mesh
from core.report import ReportOptions
from tests import toy
from tests.core.resume_worker import finished

# What is freed goes back to the system: glibc else keeps more or less of it, as it comes.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
MALLOC["MALLOC_TRIM_THRESHOLD_"] = MALLOC["MALLOC_MMAP_THRESHOLD_"]
ROOT = Path(__file__).parents[2]
STEPS = (200, 1000)


def anonymous():
    """Resident memory of this process that no file backs, in kB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


def train(folder):
    """Prints the memory after each of STEPS; the state has 5 MB, and is saved each 10 steps."""
    one = Trainer(
        toy.collate,
        toy.loss,
        toy.predict,
        lambda key: toy.init(key, hidden=320),
        optax.adam(1e-3),
        make_mesh(),
        toy.examples(2),
        options=TrainOptions(
            steps=STEPS[-1], eval_every=20, save_every=10, keep=2, report=ReportOptions(quiet=True)
        ),
        folder=folder,
    )
    count, inner = 0, one.step_jit

    def step(state, batch):
        nonlocal count
        count += 1
        if count in STEPS:
            while not finished(Path(folder)):  # what is under way is held in memory
                time.sleep(0.01)
            print(anonymous(), flush=True)
        return inner(state, batch)

    one.step_jit = step
    one.fit(toy.examples(100), toy.examples(40), best=("loss", "min"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells it there")
def test_memory_does_not_grow(tmp_path):
    code = f"from tests.core.test_memory import train; train({str(tmp_path)!r})"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | MALLOC,
        stdout=subprocess.PIPE,
        text=True,
    )
    early, late = map(int, run.stdout.split())
    assert run.returncode == 0 and late < 1.05 * early, f"{early} kB, then {late} kB"
