"""A signal stops a run after its step, with its work saved."""

import os
import signal

import jax
import numpy as np
import optax
import pytest

from core import Loss, Trainer, TrainOptions, make_mesh
from core.checkpoint import Saved
from core.report import ReportOptions, read_rows
from core.signals import Stopped, StopSignals


def trainer(folder, collate):
    return Trainer(
        collate,
        lambda params, batch, key: Loss(params["one"] * batch["value"]),
        None,
        {"one": np.ones(())},
        optax.sgd(0.001),
        make_mesh(devices=jax.devices()[:1]),
        [1.0],
        options=TrainOptions(batch_size=1, steps=100, report=ReportOptions(quiet=True)),
        folder=folder,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_says_where(tmp_path, number):
    before = signal.getsignal(number)
    one = trainer(tmp_path, lambda examples: {"value": np.asarray(examples, np.float32)})
    step, inner = 0, one.step_jit

    def interrupted(state, batch):
        nonlocal step
        step += 1
        if step == 25:
            os.kill(os.getpid(), number)
        return inner(state, batch)

    one.step_jit = interrupted
    with pytest.raises(Stopped, match=f"stopped at step 25 by {number.name}"):
        one.fit([1.0] * 100)
    assert Saved(tmp_path, "last").step == 25
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [10, 20]
    assert (tmp_path / "curves.png").exists()
    assert signal.getsignal(number) is before


def test_the_second_signal_acts_at_once():
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)  # an echo of the first
        stop.ECHO_SECONDS = 0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
