import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import core
from core import HostOptions, MeshOptions, UserError, join_hosts, make_mesh
from core.mesh import is_cpu, row_shards


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ((), (8, 1, 1)),
        ((-1, 2, 2), (2, 2, 2)),
        ((2, -1, 1), (2, 4, 1)),
        ((1, 2, -1), (1, 2, 4)),
        ((2, 4, -1), (2, 4, 1)),
        ((2, 2, 2), (2, 2, 2)),
        ((1, 1, 8), (1, 1, 8)),
    ],
)
def test_sizes_are_taken_or_inferred(asked, sizes):
    mesh = make_mesh(MeshOptions(*asked))
    assert tuple(mesh.shape.items()) == tuple(zip(("data", "fsdp", "tensor"), sizes, strict=True))
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
    assert row_shards(mesh) == sizes[0] * sizes[1]
    assert is_cpu(mesh)


def test_axes_are_auto_so_that_models_need_no_word_of_sharding():
    assert make_mesh().axis_types == (AxisType.Auto,) * 3


@pytest.mark.parametrize("number", [1, 3])
def test_a_mesh_of_some_devices_is_of_those(number):
    devices = jax.devices()[2 : 2 + number]
    mesh = make_mesh(devices=tuple(devices))
    assert mesh.devices.shape == (number, 1, 1)
    assert list(mesh.devices.flat) == devices


@pytest.mark.parametrize(
    ("asked", "number", "says"),
    [
        (
            (3, 1, 1),
            8,
            "The mesh data 3 x fsdp 1 x tensor 1 does not fit 8 devices. With the other sizes as "
            "they are, --mesh.data 8 would. The sizes must multiply to 8; one of them may be -1.",
        ),
        (
            (2, 2, 1),
            8,
            "With the other sizes as they are, --mesh.data 4 or --mesh.fsdp 4 or --mesh.tensor 2 "
            "would. ",
        ),
        ((-1, 3, 1), 8, "as they are, --mesh.fsdp 1, 2, 4, 8 would. The"),
        ((-1, 2, 3), 8, "as they are, --mesh.tensor 1, 2, 4 would. The"),
        ((-1, 16, 1), 8, "--mesh.fsdp 1, 2, 4, 8 would"),
        ((-1, 3, 3), 8, "does not fit 8 devices. The sizes must multiply to 8;"),
        ((2, 1, 1), 1, "does not fit 1 device. With the other sizes as they are, --mesh.data 1 "),
        ((-1, 1, 52), 6, "--mesh.tensor 1, 2, 3, 6 would"),
        ((-1, -1, 1), 8, "The mesh data -1 x fsdp -1 x tensor 1 is not possible: each size is at "),
        ((-1, 0, 1), 8, "fsdp 0 x tensor 1 is not possible: each size is at least 1, and at most"),
        ((8, 1, -2), 8, "tensor -2 is not possible"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_would(asked, number, says):
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        make_mesh(MeshOptions(*asked), jax.devices()[:number])
    for axis, sizes in re.findall(r"--mesh\.(\w+) ([\d, ]+\d) ", str(caught.value)):
        for size in sizes.split(", "):
            fits = dict(zip(("data", "fsdp", "tensor"), asked, strict=True)) | {axis: int(size)}
            make_mesh(MeshOptions(**fits), jax.devices()[:number])


# Hosts


@pytest.fixture
def joined(monkeypatch):
    """The arguments of every call that would join processes."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    return calls


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        (HostOptions(), [()]),
        (HostOptions("none"), []),
        (HostOptions("10.0.0.1:8476", 2, 0), [("10.0.0.1:8476", 2, 0)]),
        (HostOptions("[::1]:1", 3, 2), [("[::1]:1", 3, 2)]),
    ],
)
def test_hosts_are_joined_as_the_options_say(joined, options, calls):
    join_hosts(options)
    assert joined == calls


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "10.0.0.1:", ":8476", "host:port", "", "a:0", "a:65536"]
)
def test_an_address_without_host_or_port_is_refused(joined, address):
    says = f"--hosts.address {address!r} is not an address: give host:port of process 0"
    with pytest.raises(UserError, match=re.escape(says)):
        join_hosts(HostOptions(address, 2, 0))
    assert not joined


def test_a_port_that_is_taken_and_a_host_that_is_not_are_said(joined):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f":{port}: the port cannot be opened here"):
            join_hosts(HostOptions(f"127.0.0.1:{port}", 1, 0))
        join_hosts(HostOptions(f"127.0.0.1:{port}", 2, 1))  # another process's to open
    assert len(joined) == 1
    with pytest.raises(UserError, match="nohost.invalid:80 leads nowhere"):
        join_hosts(HostOptions("nohost.invalid:80", 2, 1))


@pytest.mark.parametrize(("count", "index"), [(2, 2), (2, -1), (0, 0), (0, -1), (-1, 0)])
def test_count_and_index_that_do_not_fit_are_refused(joined, count, index):
    says = f"--hosts.count {count} and --hosts.index {index} do not fit: with an explicit"
    with pytest.raises(UserError, match=says):
        join_hosts(HostOptions("a:1", count, index))
    assert not joined


@pytest.mark.parametrize("address", ["auto", "none"])
@pytest.mark.parametrize(("count", "index"), [(2, 0), (0, 0), (2, -1)])
def test_count_and_index_without_an_address_are_not_ignored(joined, address, count, index):
    says = f'--hosts.count {count} and --hosts.index {index} need an .*; with "{address}" leave'
    with pytest.raises(UserError, match=says):
        join_hosts(HostOptions(address, count, index))
    assert not joined


@pytest.mark.parametrize("error", [ValueError("another"), RuntimeError("must be called before")])
def test_failure_to_join_a_cluster_is_not_taken_for_its_absence(monkeypatch, error):
    def initialize():
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(type(error), match=str(error)):
        join_hosts(HostOptions())


def test_without_a_cluster_there_is_one_process_with_the_devices_it_simulates():
    script = (
        "from core import HostOptions, join_hosts, make_mesh, simulate_devices\n"
        "simulate_devices(3); join_hosts(HostOptions())\n"
        "import jax; print(jax.process_count(), make_mesh().devices.shape)"
    )
    python = [sys.executable, "-W", "error", "-c", script]
    out = subprocess.run(python, cwd=Path(core.__file__).parents[1], capture_output=True, text=True)
    assert (out.stdout, out.returncode) == ("1 (3, 1, 1)\n", 0), out.stderr


def test_devices_keep_their_order_so_that_neighbours_share_the_tensor_axis():
    ids = np.vectorize(lambda device: device.id)(make_mesh(MeshOptions(2, 2, 2)).devices)
    assert (ids == np.arange(8).reshape(2, 2, 2)).all()
