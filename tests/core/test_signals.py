"""A signal stops a run after its step, with its work saved."""

import os
import signal

import jax
import numpy as np
import optax
import pytest
from orbax.checkpoint import AsyncCheckpointer

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


def collate(examples):
    return {"value": np.asarray(examples, np.float32)}


def interrupt(one, number, step=25):
    """Makes a trainer get a signal in a step."""
    count, inner = 0, one.step_jit

    def interrupted(state, batch):
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), number)
        return inner(state, batch)

    one.step_jit = interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_says_where(tmp_path, number):
    before = signal.getsignal(number)
    one = trainer(tmp_path, collate)
    interrupt(one, number)
    with pytest.raises(Stopped, match="^stopped at step 25$"):
        one.fit([1.0] * 100)
    assert Saved(tmp_path, "last").step == 25
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [10, 20]
    assert (tmp_path / "curves.png").exists()
    assert signal.getsignal(number) is before


def test_what_was_stopped_goes_on_to_the_same_end(tmp_path):
    whole, stopped = (trainer(tmp_path / name, collate) for name in ("whole", "stopped"))
    whole.fit([1.0] * 100)
    interrupt(stopped, signal.SIGTERM)
    with pytest.raises(Stopped):
        stopped.fit([1.0] * 100)
    again = trainer(tmp_path / "stopped", collate)
    again.fit([1.0] * 100)
    assert float(again.state.params["one"]) == float(whole.state.params["one"])
    assert int(again.state.step) == 100
    steps = [row["step"] for row in read_rows(tmp_path / "stopped" / "metrics.jsonl")]
    assert steps == list(range(10, 101, 10))


def test_a_source_ends_its_epoch_before(tmp_path, capfd):
    one = trainer(tmp_path, collate)
    interrupt(one, signal.SIGTERM)
    with pytest.raises(Stopped, match="^stopped at step 28$"):
        one.fit(lambda epoch, params: [1.0] * 7)
    assert "stopping after this epoch" in capfd.readouterr().err
    assert Saved(tmp_path, "last").step == 28


def test_a_signal_in_the_last_step_lets_the_run_end(tmp_path):
    one = trainer(tmp_path, collate)
    interrupt(one, signal.SIGTERM, step=100)
    assert one.fit([1.0] * 100)["steps"] == 100


@pytest.mark.parametrize("where", ["save", "wait"])
def test_a_second_signal_in_the_midst_of_saving_spoils_nothing(tmp_path, monkeypatch, where):
    one = trainer(tmp_path, collate)
    interrupt(one, signal.SIGINT)
    original = getattr(AsyncCheckpointer, {"save": "save", "wait": "wait_until_finished"}[where])

    def save(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if int(one.state.step) == 25:
            StopSignals.ECHO_SECONDS = 0
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(StopSignals, "ECHO_SECONDS", 1)
    monkeypatch.setattr(AsyncCheckpointer, original.__name__, save)
    with pytest.raises(KeyboardInterrupt):
        one.fit([1.0] * 100)
    monkeypatch.undo()
    again = trainer(tmp_path, collate)
    assert again.fit([1.0] * 100)["steps"] == 100
    whole = trainer(None, collate)
    whole.fit([1.0] * 100)
    assert float(again.state.params["one"]) == float(whole.state.params["one"])


def test_the_second_signal_acts_at_once():
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)  # an echo of the first
        stop.ECHO_SECONDS = 0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
