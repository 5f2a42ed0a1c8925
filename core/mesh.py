"""Devices and hosts to one named mesh with the axes ('data', 'fsdp', 'tensor').

There is always a mesh; one device is a mesh of one. The example axis of a batch is split over
`data` and `fsdp` together, parameters over `fsdp` and `tensor`.
"""

import dataclasses
import math
import socket
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from core.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    data: int = -1
    """Devices along the data axis, which split the batch; -1 takes what the other axes leave."""
    fsdp: int = 1
    """Devices along the fsdp axis, which split batch, parameters and optimizer state."""
    tensor: int = 1
    """Devices along the tensor axis, which split the matrices of the model."""


@dataclasses.dataclass(frozen=True)
class HostOptions:
    address: str = "auto"
    """Address host:port of process 0; "auto" takes what the cluster says (SLURM, Open MPI,
    Kubernetes, Cloud TPU), "none" is a single process."""
    count: int = 0
    """Number of processes, needed with an explicit address."""
    index: int = -1
    """Index of this process, from 0, needed with an explicit address."""


def join_hosts(options: HostOptions) -> None:
    """Joins the run of several processes that this one belongs to, if there is one.

    Must come before anything touches a device.
    """
    if options.address in ("auto", "none") and (options.count, options.index) != (0, -1):
        raise UserError(
            f"--hosts.count {options.count} and --hosts.index {options.index} need an explicit "
            f'--hosts.address; with "{options.address}" leave them out.'
        )
    if options.address == "none":
        return
    if options.address == "auto":
        try:
            jax.distributed.initialize()
        except ValueError as error:
            # What JAX says where it finds no cluster: this is then a single process.
            if "coordinator_address should be defined" not in str(error):
                raise
        return
    host, _, port = options.address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(
            f"--hosts.address {options.address!r} is not an address: give host:port of process 0, "
            'such as 10.0.0.1:8476, or "auto" or "none".'
        )
    if not 0 <= options.index < options.count:
        raise UserError(
            f"--hosts.count {options.count} and --hosts.index {options.index} do not fit: with an "
            "explicit --hosts.address, give the number of processes and the index of this one, "
            "from 0 to the number less one."
        )
    _check_reachable(host, int(port), own=options.index == 0)
    jax.distributed.initialize(options.address, options.count, options.index)


def _check_reachable(host: str, port: int, own: bool) -> None:
    """Raises a `UserError` where JAX would end the process without a word."""
    try:
        address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"--hosts.address {host}:{port} leads nowhere ({error}).") from error
    if own:
        with socket.socket(address[0], socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("", port))
            except OSError as error:
                raise UserError(
                    f"--hosts.address {host}:{port}: the port cannot be opened here, on process 0 "
                    f"({error.strerror}). Give a free one."
                ) from error


def simulate_devices(count: int) -> None:
    """Makes this process see `count` CPU devices. Must come before anything touches a device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def make_mesh(
    options: MeshOptions | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The mesh over all devices of all processes, or over the given ones.

    Axes are of the type Auto, on purpose: models are written without a word of sharding and the
    compiler places the collectives. (`jax.make_mesh` alone would make them Explicit.)

    Raises:
      UserError: the sizes do not multiply to the number of devices; the message says which would.
    """
    options = options or MeshOptions()
    devices = jax.devices() if devices is None else list(devices)
    given = {axis: getattr(options, axis) for axis in AXES}
    sizes = _fit(given, len(devices))
    return jax.make_mesh(
        [sizes[axis] for axis in AXES], AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def is_cpu(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == "cpu")


def row_shards(mesh: Mesh) -> int:
    """Number of parts that the example axis of a batch is split into."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def from_first(text: str) -> str:
    """The text that process 0 gave, on every process."""
    if jax.process_count() == 1:
        return text
    mine = np.frombuffer(text.encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.asarray(len(mine))))
    if not length:
        return ""
    padded = np.resize(mine, length) if len(mine) else np.zeros(length, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)).decode()


def all_processes(flag: bool) -> bool:
    """Whether the flag is true on every process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.all(multihost_utils.process_allgather(np.asarray(flag))))


def _fit(given: dict[str, int], count: int) -> dict[str, int]:
    text = " x ".join(f"{axis} {size}" for axis, size in given.items())
    open_axes = [axis for axis, size in given.items() if size == -1]
    if len(open_axes) > 1 or any(size < 1 and size != -1 for size in given.values()):
        raise UserError(
            f"The mesh {text} is not possible: each size is at least 1, and at most one of them is "
            "-1 (what the others leave)."
        )
    fixed = math.prod(size for size in given.values() if size != -1)
    if count % fixed == 0 and (open_axes or fixed == count):
        return given | {axis: count // fixed for axis in open_axes}
    ways = [f"--mesh.{axis} {fits}" for axis in AXES if (fits := _would_fit(given, axis, count))]
    raise UserError(
        f"The mesh {text} does not fit {count} device{'s' * (count != 1)}. "
        + (f"With the other sizes as they are, {' or '.join(ways)} would. " if ways else "")
        + f"The sizes must multiply to {count}; one of them may be -1."
    )


def _would_fit(given: dict[str, int], axis: str, count: int) -> str:
    """The sizes of one axis with which the others, as given, fit the number of devices."""
    others = [size for name, size in given.items() if name != axis]
    rest = math.prod(size for size in others if size != -1)
    if count % rest:
        return ""
    if -1 not in others:
        return str(count // rest)
    return ", ".join(str(n) for n in range(1, count // rest + 1) if count // rest % n == 0)
