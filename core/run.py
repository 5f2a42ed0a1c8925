"""What every script shares: options, devices and hosts, the folder of the run, errors.

A script is `launch(Config, main)`: a frozen dataclass of options, with `RunOptions` as its `run`,
and a function of it. `main` makes a `Run`, which owns the folder with

    config.json     the options, versions and what else it takes to repeat the run
    metrics.jsonl   one row per logged step and evaluation
    curves.png      the same as a picture
    checkpoints/    the latest and the best weights
    summary.json    how it ended
"""

import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import numpy as np
import tyro
from jax.experimental import multihost_utils

from core.errors import UserError, at_least
from core.mesh import HostOptions, MeshOptions, join_hosts, make_mesh, simulate_devices
from core.rules import parse_overrides
from core.signals import Stopped
from core.trainer import TrainOptions

PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")

C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class DeviceOptions:
    mesh: MeshOptions = MeshOptions()
    hosts: HostOptions = HostOptions()
    simulate_devices: int = 0
    """Devices to simulate on the CPU; 0 uses the real ones."""
    overrides: tuple[str, ...] = ()
    """Shardings that win over the inferred ones, as REGEX=AXIS,AXIS,... with an axis or - for each
    dimension of the parameters whose path the expression matches."""
    debug: bool = False
    """Show the whole traceback of an error."""

    def __post_init__(self) -> None:
        at_least(self, "simulate_devices", 0)


@dataclasses.dataclass(frozen=True)
class RunOptions(DeviceOptions, TrainOptions):
    folder: str = ""
    """Folder of the run; empty makes a new one below runs/."""

    def __post_init__(self) -> None:
        DeviceOptions.__post_init__(self)
        TrainOptions.__post_init__(self)


# As the field `run` of a script's config: its options stand among the script's own, without a
# prefix (--seed, --mesh.data). `Devices` is for scripts that train nothing.
Shared = Annotated[RunOptions, tyro.conf.arg(name="")]
Devices = Annotated[DeviceOptions, tyro.conf.arg(name="")]


class Run:
    """A run's folder, mesh and record.

    Args:
      name: of the algorithm; a new folder is runs/NAME-DATE-TIME.
      config: the script's dataclass, with its `RunOptions` as `run`.
      record: what else to write into config.json, such as the digest of the data.

    Raises:
      UserError: the folder holds a run already, or cannot be written.
    """

    def __init__(self, name: str, config: Any, record: Mapping[str, Any] | None = None):
        self.options: RunOptions = config.run
        self.mesh = make_mesh(self.options.mesh)
        self.overrides = parse_overrides(self.options.overrides)
        self.folder = _agreed_folder(name, self.options.folder)
        self.write(
            "config.json",
            {
                "algorithm": name,
                "config": dataclasses.asdict(config),
                "python": platform.python_version(),
                "versions": {package: metadata.version(package) for package in PACKAGES},
                "commit": _commit(),
                "devices": [device.device_kind for device in self.mesh.devices.flat],
                **(record or {}),
            },
        )

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON file into the folder, on process 0."""
        if jax.process_index() != 0:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / f"{name}.part"
            part.write_text(json.dumps(_plain(content), indent=2, allow_nan=False) + "\n")
            part.replace(self.folder / name)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def save(self, name: str, writer: Callable[[Path], Any]) -> None:
        """Lets a function write a file or folder of this name into the folder, on process 0."""
        if jax.process_index() == 0:
            writer(self.folder / name)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, and says where everything is."""
        self.write("summary.json", summary)
        self.say(f"The run is in {self.folder}")

    def say(self, text: str) -> None:
        """Prints, on process 0."""
        if jax.process_index() == 0:
            print(text, flush=True)


def launch(config_type: type[C], main: Callable[[C], Any]) -> None:
    """Reads the command line into a config and runs `main` with it.

    A `UserError` prints as one paragraph and exits with 2; everything else is a bug and shows its
    traceback.
    """
    debug = "--debug" in sys.argv
    try:
        config = tyro.cli(config_type)
        options: DeviceOptions = config.run  # type: ignore[attr-defined]
        if options.simulate_devices:
            simulate_devices(options.simulate_devices)
        join_hosts(options.hosts)
        main(config)
    except Stopped as stopped:
        print(f"{stopped}; what it learnt is saved", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        if debug:
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except UserError as error:
        if debug:
            raise
        # JAX adds a note about its own frames, under a rule.
        notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("---")]
        print(" ".join(["error:", str(error), *notes]), file=sys.stderr)
        sys.exit(2)


def read_config(folder: str | Path, default: C) -> C:
    """The config of a run, as the dataclass that its script reads.

    Args:
      folder: of the run.
      default: an instance of that dataclass, for the types and for options since added.

    Raises:
      UserError: no run is there, or it has a value that is no longer in range.
    """
    path = Path(folder) / "config.json"
    try:
        values = dict(json.loads(path.read_text())["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is not the folder of a run: {path} cannot be read.") from error
    config: C = _filled(default, values)
    return config


def _filled(default: Any, value: Any) -> Any:
    """A value from JSON in the type of the default; a dataclass field by field, nested too."""
    if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
        names = {field.name for field in dataclasses.fields(default) if field.init}
        new = {name: _filled(getattr(default, name), value[name]) for name in names & set(value)}
        return dataclasses.replace(default, **new)  # type: ignore[type-var]
    if isinstance(value, list) and not isinstance(default, list):
        return tuple(_filled(None, item) for item in value)
    return float(value) if isinstance(default, float) and isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """A value as JSON has it: arrays as lists, and figures that are not finite as strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _agreed_folder(name: str, asked: str) -> Path:
    """The folder that process 0 chose, on every process.

    Raises:
      UserError: process 0 found a run in it, or cannot make it.
    """
    # A run that failed before its first step leaves its options alone, and its name free.
    taken = asked and os.path.exists(Path(asked) / "metrics.jsonl")
    folder = "" if taken or jax.process_index() else asked or _new_folder(name)
    if jax.process_count() > 1:
        text = np.frombuffer(folder.encode().ljust(4096, b"\0"), np.uint8)
        folder = bytes(np.asarray(multihost_utils.broadcast_one_to_all(text), np.uint8)).decode()
        folder = folder.rstrip("\0")
    if not folder:
        raise UserError(
            f"{asked} holds a run already. Give another --folder, or none for a new one."
        )
    return Path(folder)


def _new_folder(name: str) -> str:
    stamp, number = time.strftime(f"runs/{name}-%Y%m%d-%H%M%S"), 0
    while True:
        folder = Path(f"{stamp}-{number}" if number else stamp)
        try:
            # Made at once, so that another run of the same second cannot take it too.
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"{folder} cannot be written ({error.strerror}). Give another --folder.")


def _commit() -> str:
    """The commit of the code, or "unknown" outside a repository."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
