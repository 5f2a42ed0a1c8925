"""The compact core: devices, sharding, steps, data, checkpoints and reports of any algorithm."""

from core.contract import Loss, at_least_float32
from core.errors import UserError
from core.mesh import HostOptions, MeshOptions, join_hosts, make_mesh, simulate_devices
from core.padding import unpad
from core.trainer import Trainer, TrainOptions

__all__ = [
    "HostOptions",
    "Loss",
    "MeshOptions",
    "Trainer",
    "TrainOptions",
    "UserError",
    "at_least_float32",
    "join_hosts",
    "make_mesh",
    "simulate_devices",
    "unpad",
]
