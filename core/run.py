"""What every script shares: options, devices and hosts, the folder of the run, errors.

A script is `launch(Config, main)`: a frozen dataclass of options, with `RunOptions` among them, and
a function of it. `main` makes a `Run`, which owns the folder with

    config.json     the options, versions and what else it takes to repeat the run
    metrics.jsonl   one row per logged step and evaluation
    curves.png      the same as a picture
    checkpoints/    the latest and the best weights
    summary.json    how it ended
"""

import dataclasses
import json
import logging
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
from core.trainer import TrainOptions

PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")

C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class RunOptions(TrainOptions):
    folder: str = ""
    """Folder of the run; empty makes a new one below runs/."""
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
        super().__post_init__()
        at_least(self, "simulate_devices", 0)


# The run's options stand among a script's own, without a prefix: --seed, --mesh.data.
Shared = Annotated[RunOptions, tyro.conf.arg(name="")]


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
        self.folder = Path(_agreed(self.options.folder or _new_folder(name)))
        if (self.folder / "config.json").exists():
            raise UserError(
                f"{self.folder} holds a run already. Give another --folder, or none for a new one."
            )
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
            part.write_text(json.dumps(content, indent=2, default=str) + "\n")
            part.replace(self.folder / name)
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be written ({error.strerror}). Give another --folder."
            ) from error

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
        options: RunOptions = config.run  # type: ignore[attr-defined]
        logging.getLogger("absl").setLevel(logging.ERROR)
        if options.simulate_devices:
            simulate_devices(options.simulate_devices)
        join_hosts(options.hosts)
        main(config)
    except UserError as error:
        if debug:
            raise
        notes = " ".join(getattr(error, "__notes__", ()))
        print(f"error: {error} {notes}".rstrip(), file=sys.stderr)
        sys.exit(2)


def read_config(folder: str | Path, default: C) -> C:
    """The config of a run, as the dataclass that its script reads.

    Args:
      folder: of the run.
      default: an instance of that dataclass, for the types and for options since added.

    Raises:
      UserError: no run is there.
    """
    path = Path(folder) / "config.json"
    try:
        config: C = _filled(default, json.loads(path.read_text())["config"])
        return config
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} is not the folder of a run: {path} cannot be read.") from error


def _filled(default: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass with the values of a JSON object in place of its own, nested ones too."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(default):
        was = getattr(default, field.name)
        value = values.get(field.name, was)
        if dataclasses.is_dataclass(was) and isinstance(value, Mapping):
            value = _filled(was, value)
        fields[field.name] = tuple(value) if isinstance(was, tuple) else value
    return dataclasses.replace(default, **fields)


def _new_folder(name: str) -> str:
    stamp = time.strftime(f"runs/{name}-%Y%m%d-%H%M%S")
    free = (stamp + (f"-{n}" if n else "") for n in range(1000))
    return next(folder for folder in free if not Path(folder).exists())


def _agreed(folder: str) -> str:
    """The folder that process 0 chose, on every process."""
    if jax.process_count() == 1:
        return folder
    text = np.zeros(1024, np.uint8)
    encoded = np.frombuffer(folder.encode(), np.uint8)
    text[: len(encoded)] = encoded
    agreed = np.asarray(multihost_utils.broadcast_one_to_all(text))
    return bytes(agreed[agreed > 0].astype(np.uint8)).decode()


def _commit() -> str:
    """The commit of the code, or "unknown" outside a repository."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
