"""Several processes of several devices give what one process gives, and read only their rows."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from core.checkpoint import FOLDER, Saved, steps
from tests.core import host_worker, resume_worker
from tests.core.test_resume import rows

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def four_devices_in_double_precision():
    """As the two processes have them together."""
    devices = jax.devices
    jax.config.update("jax_enable_x64", True)
    try:
        jax.devices = lambda: devices()[:4]
        yield
    finally:
        jax.devices = devices
        jax.config.update("jax_enable_x64", False)


class Killed(BaseException):
    pass


def half(folder):
    """A run that ends without a word in step 6, after its checkpoint of step 5."""
    one, count = resume_worker.trainer(folder, "plain"), 0
    inner = one.step_jit

    def step(state, batch):
        nonlocal count
        count += 1
        if count == 6:
            while not resume_worker.finished(folder):
                time.sleep(0.01)
            raise Killed
        return inner(state, batch)

    one.step_jit = step
    with contextlib.suppress(Killed):
        resume_worker.fit(one, "plain")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    with four_devices_in_double_precision():
        half(folder / "half")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.core.host_worker", address, "2"]
    workers = [
        subprocess.Popen(
            [*command, str(index), "2", str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        logs = [worker.communicate(timeout=180)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), "\n".join(logs)
    results = [json.loads((folder / f"process{i}.json").read_text()) for i in range(2)]
    return folder, logs, results


@pytest.fixture(scope="module")
def one_process():
    with four_devices_in_double_precision():
        return host_worker.run()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with four_devices_in_double_precision():
        return folder, host_worker.go_on(folder)


def bias(saved):
    """A parameter of a checkpoint."""
    here = SingleDeviceSharding(jax.devices()[0])
    with four_devices_in_double_precision():
        return np.asarray(saved.load(jax.tree.map(lambda _: here, saved.shapes()))["bias"])


@pytest.mark.parametrize("what", ["metrics", "valid", "outputs", "again", "bias"])
def test_processes_do_not_change_any_result(two_processes, one_process, what):
    def leaves(result):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result[what])])

    first, second = two_processes[2]
    np.testing.assert_array_equal(leaves(first), leaves(second))
    np.testing.assert_allclose(leaves(first), leaves(one_process), rtol=1e-11, atol=1e-12)


def test_each_process_reads_only_its_rows(two_processes):
    first, second = (result["read"] for result in two_processes[2])
    for number, mine, other in zip((45, 9, 3), first, second, strict=True):
        assert set(mine) | set(other) == set(range(number))
    # An epoch of 45 in steps of 16: 8 rows for each in a full step; of the last 13, in
    # microbatches of 8 and 5, process 1 gets 4 and 1, and repeats its own to fill its part.
    epoch = len(first[0]) // 2
    assert epoch == 8 * 3 and len(second[0]) == len(first[0])
    for of_epoch in (slice(0, epoch), slice(epoch, None)):
        mine, other = first[0][of_epoch], second[0][of_epoch]
        assert not set(mine) & set(other)
        assert (len(set(mine)), len(set(other))) == (24, 21)
    # Three rows to predict in a step of 16, which process 0 holds: process 1 reads one of them.
    assert set(first[2]) == {0, 1, 2} and set(second[2]) == {0}


def test_only_process_0_prints_and_all_save_together(two_processes):
    folder, (first, second), results = two_processes
    assert "step 6/6" in first and "step 6" not in second
    assert (folder / "run" / "curves.png").exists()
    saved = Saved(folder / "run", "last")
    assert saved.step == 6
    np.testing.assert_array_equal(bias(saved), results[0]["bias"])


def test_processes_tell_each_other(two_processes):
    for result in two_processes[2]:
        assert result["told"] == ["ä0" * 9, False]


def test_a_signal_to_one_process_stops_all_at_the_same_step(two_processes):
    folder, _, (first, second) = two_processes
    assert first["stopped"] == second["stopped"]
    step = int(first["stopped"].removeprefix("stopped at step "))
    assert 4 <= step <= 6, "soon"
    assert steps(folder / "stopped-for-one" / FOLDER)[-1] == step


def test_a_save_that_fails_on_one_process_stops_none(two_processes):
    folder, logs, (first, second) = two_processes
    assert first["full"] == second["full"] and first["full"][0] == 10
    said = [line for line in logs[0].splitlines() if "could not be written" in line]
    assert len(said) == 1 and said[0].startswith("the checkpoint of step 6 could not be written")
    assert said[0].endswith("now that of step 9 is tried.") and "could not" not in logs[1]
    assert steps(folder / "full" / FOLDER) == [9, 10]
    assert not list((folder / "full" / FOLDER).glob("*tmp*"))
    np.testing.assert_array_equal(bias(Saved(folder / "full", "last")), first["full"][1])


@pytest.mark.parametrize("which", ["two to two", "one to two", "two to one"])
def test_another_number_of_processes_goes_on(two_processes, uninterrupted, which):
    folder, _, results = two_processes
    name = {"two to two": "stopped", "one to two": "half", "two to one": "stopped-for-one"}[which]
    if which == "two to one":
        with four_devices_in_double_precision():
            results = [{which: host_worker.go_on(folder / name)}]
    whole, valid = uninterrupted
    for result in results:
        assert result[which] == pytest.approx(valid, rel=1e-11)
    mine, other = rows(folder / name), rows(whole)
    assert [(row["step"], row["split"]) for row in mine] == [
        (row["step"], row["split"]) for row in other
    ]
    losses = [[row["loss"] for row in one] for one in (mine, other)]
    np.testing.assert_allclose(*losses, rtol=1e-11)


def test_a_loss_that_is_not_finite_stops_all_with_the_same_words(two_processes):
    folder, _, (first, second) = two_processes
    assert first["bad"] == second["bad"]
    assert "the loss is not finite in row 7." in first["bad"]
    with np.load(folder / "bad" / "nonfinite" / "batch.npz") as batch:
        assert batch["x"].shape == (16, 16), "all rows of the step"
