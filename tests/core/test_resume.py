"""A run that was killed goes on as if nothing had happened, on any devices."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from core import Loss, Trainer, TrainOptions, UserError, checksums, make_mesh
from core.checkpoint import FOLDER, steps
from core.data import order
from core.report import ReportOptions, read_rows
from core.trainer import FREE
from tests import toy
from tests.core.resume_worker import KINDS, STEPS, Source, fit, trainer

ROOT = Path(__file__).parents[2]


def rows(folder):
    """The metrics of a run, without what depends on the clock."""
    timed = ("time", "examples_per_second")
    return [
        {key: value for key, value in row.items() if key not in timed}
        for row in read_rows(folder / "metrics.jsonl")
    ]


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]


def worker(folder, kind, moment):
    command = [sys.executable, "-m", "tests.core.resume_worker", str(folder), kind, moment]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Kind -> (state, result, folder) of a run that nothing interrupts."""
    known = {}

    def get(kind):
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            one = trainer(folder, kind)
            result = fit(one, kind)
            known[kind] = jax.device_get(one.state), result, folder
        return known[kind]

    return get


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run that was killed in step 6, after its checkpoint of step 5."""
    folder = tmp_path_factory.mktemp("killed")
    process = worker(folder, "plain", "step 6")
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    assert steps(folder / FOLDER) == [3, 5], "3 is the end of an epoch, and the best so far"
    return folder


@pytest.fixture
def half_done(killed, tmp_path):
    return shutil.copytree(killed, tmp_path / "run")


def ends_as_if_never_killed(folder, kind, uninterrupted):
    state, result, whole = uninterrupted(kind)
    one = trainer(folder, kind)
    again = fit(one, kind)
    assert bits(one.state) == bits(state)
    assert rows(folder) == rows(whole)
    assert again | {"seconds": 0} == result | {"seconds": 0}
    assert sorted(os.listdir(folder / FOLDER)) == sorted(os.listdir(whole / FOLDER))


def test_ten_steps_are_five_a_kill_and_five(half_done, uninterrupted, capsys):
    ends_as_if_never_killed(half_done, "plain", uninterrupted)
    assert f"The run in {half_done} goes on after: step 5." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("microbatches", "finalising 2"),  # the checkpoint of step 3, that of step 2 being there
        ("source", "evaluation 2"),  # the evaluation after step 8, in the middle of epoch 2
    ],
)
def test_a_run_that_was_killed_ends_as_if_not(tmp_path, uninterrupted, kind, moment):
    process = worker(tmp_path, kind, moment)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    assert steps(tmp_path / FOLDER)
    ends_as_if_never_killed(tmp_path, kind, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_killed_at_any_moment_ends_as_if_not(tmp_path, uninterrupted, seed):
    kind = list(KINDS)[seed % len(KINDS)]
    process = worker(tmp_path, kind, f"after {random.Random(seed).uniform(1, STEPS + 1):.3f}")
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    ends_as_if_never_killed(tmp_path, kind, uninterrupted)


@pytest.mark.parametrize("sizes", [(8, 1), (2, 4), (1, 3), (2, 1), (1, 1)])
def test_another_mesh_goes_on_with_the_same_losses(half_done, uninterrupted, sizes):
    one = trainer(half_done, "plain", sizes)
    fit(one, "plain")
    again, whole = rows(half_done), rows(uninterrupted("plain")[2])
    assert again[:6] == whole[:6], "what was before is as it was"
    assert [row.keys() for row in again] == [row.keys() for row in whole]
    for mine, other in zip(again, whole, strict=True):
        for key in mine.keys() - {"split"}:
            np.testing.assert_allclose(mine[key], other[key], rtol=2e-5, err_msg=key)
    hidden = one.state.params["layers"].sharding
    assert hidden.mesh.shape["data"] * hidden.mesh.shape["fsdp"] == np.prod(sizes)
    split = 60 % sizes[1] == 0 and sizes[1] > 1
    assert hidden.spec == (P(None, "fsdp") if split else P())
    moment = one.state.opt_state.inner_state[0].mu["layers"]
    assert moment.sharding.spec == hidden.spec


def test_overrides_may_change(half_done, uninterrupted):
    overrides = {"layers": P(None, None, "tensor"), "in": P("tensor", "fsdp")}
    one = trainer(half_done, "plain", (2, 2, 2), overrides=overrides)
    fit(one, "plain")
    assert one.state.params["layers"].sharding.spec == P(None, None, "tensor")
    for mine, other in zip(rows(half_done), rows(uninterrupted("plain")[2]), strict=True):
        np.testing.assert_allclose(mine["loss"], other["loss"], rtol=2e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 8}, "16           8"),
        ({"seed": 1}, "seed     0            1"),
        ({"steps": 12}, "total steps  10           12"),
    ],
)
def test_settings_that_change_the_numbers_are_refused(half_done, change, says):
    before = (half_done / "metrics.jsonl").read_bytes()
    one, valid = trainer(half_done, "plain", **change), toy.examples(9, seed=5)
    with pytest.raises(UserError, match="cannot go on with other settings") as refused:
        one.fit(toy.examples(40), valid)
    assert says in str(refused.value)
    assert np.isfinite(one.evaluate(valid)["loss"]), "the trainer has its weights"
    assert (half_done / "metrics.jsonl").read_bytes() == before


def test_other_data_is_refused(half_done):
    with pytest.raises(UserError, match="training examples  40           14"):
        trainer(half_done, "plain").fit(toy.examples(14), toy.examples(9, seed=5))


def test_settings_that_change_no_number_may_change(half_done):
    one = trainer(half_done, "plain", save_every=1, keep=1, on_nonfinite="skip")
    assert fit(one, "plain")["steps"] == 10


class Killed(BaseException):
    """As good as a signal, where nothing is written meanwhile."""


def small(folder, optimizer=None, **options):
    return Trainer(
        lambda examples: {"value": np.asarray(examples, np.float32)},
        lambda params, batch, key: Loss(params["one"] * batch["value"]),
        None,
        {"one": np.ones(())},
        optimizer or optax.sgd(0.001),
        make_mesh(devices=jax.devices()[:1]),
        [1.0],
        options=TrainOptions(report=ReportOptions(quiet=True), **options),
        folder=folder,
    )


class Recorded(list):
    def __init__(self, items):
        super().__init__(items)
        self.read = []

    def __getitem__(self, row):
        self.read.append(row)
        return super().__getitem__(row)


def test_the_very_examples_come_that_would_have_come(tmp_path):
    def one():
        return small(tmp_path, batch_size=4, epochs=3, save_every=10)

    first, inner, done = one(), None, 0

    def dies(state, batch):
        nonlocal done
        done += 1
        if done == 12:
            while not steps(tmp_path / FOLDER):
                time.sleep(0.01)
            raise Killed
        return inner(state, batch)

    inner, first.step_jit = first.step_jit, dies
    with pytest.raises(Killed):
        first.fit(range(28))
    examples = Recorded(range(28))
    one().fit(examples)
    # Epochs have 7 steps: step 10 is the third of epoch 1.
    assert examples.read == [*order(0, 1, 28)[12:], *order(0, 2, 28)]
    assert [row["step"] for row in rows(tmp_path)] == [10, 20, 21]


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.adafactor(0.1),
        optax.chain(optax.masked(optax.adam(0.1), {"one": False}), optax.scale(-1.0)),
    ],
    ids=["typed key", "clipped", "multi-steps", "adafactor", "masked"],
)
def test_the_state_of_any_optimizer_goes_on(tmp_path, optimizer):
    def one(folder):
        return small(folder, optimizer, batch_size=1, steps=6, save_every=3, keep=9)

    whole = one(tmp_path / "a")
    whole.fit(range(6))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / FOLDER / "6")
    again = one(tmp_path / "b")
    again.fit(range(6))
    for mine, other in zip(*map(jax.tree.leaves, (again.state, whole.state)), strict=True):
        assert mine.dtype == other.dtype and bool((mine == other).all())


def test_a_source_is_asked_and_saved_at_the_border_of_epochs(tmp_path):
    source = Source()
    one = trainer(tmp_path, "source", steps=20, keep=99)
    one.fit(source)
    assert source.seen[0] == len(steps(tmp_path / FOLDER)), "each epoch ends with a checkpoint"
    assert 20 in steps(tmp_path / FOLDER), "and the run, in the middle of one"


def test_what_a_source_cannot_keep_is_said_before_training(tmp_path):
    source = Source()
    source.state = lambda: {"random": [source.random]}
    one = trainer(tmp_path, "source")
    with pytest.raises(UserError, match=r"state\(\)\['random'\]\[0\] is a Generator, which a"):
        one.fit(source)


def test_a_save_every_so_many_steps_waits_for_the_end_of_a_source_s_epoch(tmp_path):
    one = small(tmp_path, batch_size=1, steps=20, save_every=5, keep=99)
    one.fit(lambda epoch, params: [1.0] * 3)
    assert steps(tmp_path / FOLDER) == [6, 12, 15, 20]


def test_the_seconds_of_a_run_go_on_from_its_checkpoint(tmp_path):
    def one():
        return small(tmp_path, batch_size=1, steps=20, save_every=10, keep=99)

    one().fit([1.0])
    shutil.rmtree(tmp_path / FOLDER / "20")
    saved = tmp_path / FOLDER / "10" / "run" / "metadata"
    content = json.loads(saved.read_text())
    content["run"]["at"]["seconds"] = 1000.0
    saved.write_text(json.dumps(content))
    checksums.write(tmp_path / FOLDER / "10")
    assert 1000 < one().fit([1.0])["seconds"] < 1100


def test_options_that_change_no_number_are_known():
    names = {field.name for field in dataclasses.fields(TrainOptions)}
    fixed = {"steps", "epochs", "batch_size", "microbatches", "clip_norm", "compute_dtype"}
    fixed |= {"eval_every", "seed"}
    assert TrainOptions().settings().keys() == fixed
    assert names - fixed == FREE
