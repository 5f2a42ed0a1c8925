"""Several processes of several devices give what one process gives, and read only their rows."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from core.checkpoint import Saved
from tests.core import host_worker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
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
    devices = jax.devices
    jax.config.update("jax_enable_x64", True)
    try:
        jax.devices = lambda: devices()[:4]
        return host_worker.run()
    finally:
        jax.devices = devices
        jax.config.update("jax_enable_x64", False)


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
    assert "step 6/6" in first and "step" not in second
    assert (folder / "run" / "curves.png").exists()
    saved = Saved(folder / "run", "last")
    assert saved.step == 6
    jax.config.update("jax_enable_x64", True)
    try:
        here = SingleDeviceSharding(jax.devices()[0])
        bias = saved.load(jax.tree.map(lambda _: here, saved.shapes()))["bias"]
        np.testing.assert_array_equal(bias, results[0]["bias"])
    finally:
        jax.config.update("jax_enable_x64", False)
