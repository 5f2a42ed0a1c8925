"""What every script shares: options, devices and hosts, the folder of the run, errors.

A script is `launch(Config, main)`: a frozen dataclass of options, with `RunOptions` as its `run`,
and a function of it. `main` makes a `Run`, which owns the folder with

    config.json     the options, versions and what else it takes to repeat the run
    metrics.jsonl   one row per logged step and evaluation
    curves.png      the same as a picture
    sharding.json   how each parameter is split, for each mesh that it ran on
    checkpoints/    the latest and the best state of training
    nonfinite/      the step that stopped the run, if its loss or gradient was not finite
    summary.json    how it ended

A folder without a summary is that of a run which is not finished, and goes on with it; its options
must then be those that it has, except for the ones that change no number.
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

from core.checkpoint import FOLDER as CHECKPOINTS
from core.errors import UserError, at_least, differences
from core.mesh import (
    HostOptions,
    MeshOptions,
    from_first,
    join_hosts,
    make_mesh,
    simulate_devices,
)
from core.rules import parse_overrides
from core.signals import Ended, Stopped
from core.trainer import FREE, TrainOptions, compute_dtype

PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")

# A folder that has one of these has a run.
RUN_FILES = ("metrics.jsonl", CHECKPOINTS, "summary.json")

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
    """Folder of the run, which goes on if it is not finished; empty makes a new one below runs/."""

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
      record: what else the numbers depend on, such as the digest of the data.

    Raises:
      UserError: the folder holds a run with other options, or cannot be written.
      Ended: the folder holds a run that is finished.
    """

    def __init__(self, name: str, config: Any, record: Mapping[str, Any] | None = None):
        self.options: RunOptions = config.run
        self.mesh = make_mesh(self.options.mesh)
        self.overrides = parse_overrides(self.options.overrides)
        # A run that is only looked at leaves no trace.
        self._looks = bool(self.options.replay or self.options.explain or self.options.explain_json)
        content = {
            "algorithm": name,
            "config": dataclasses.asdict(config),
            # What the option "auto" stands for changes with the kind of device.
            "computes_in": str(compute_dtype(self.options.compute_dtype, self.mesh) or "as given"),
            **(record or {}),
        }
        self.folder = _agreed_folder(name, self.options, _plain(content))
        self.write(
            "config.json",
            content
            | {
                "python": platform.python_version(),
                "versions": {package: metadata.version(package) for package in PACKAGES},
                "commit": _commit(),
                "devices": [device.device_kind for device in self.mesh.devices.flat],
            },
        )

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON file into the folder, on process 0."""
        if jax.process_index() != 0 or self._looks:
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
        if jax.process_index() == 0 and not self._looks:
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

    Where the config has a method `defaults`, the config that it returns holds the options that the
    command line does not give: those of a data set, say, that it does.

    A `UserError` prints as one paragraph and exits with 2; everything else is a bug and shows its
    traceback.
    """
    debug = "--debug" in sys.argv
    try:
        config = tyro.cli(config_type)
        if defaults := getattr(config, "defaults", None):
            config = tyro.cli(config_type, default=defaults())
        options: Any = config.run  # type: ignore[attr-defined]
        if replay := getattr(options, "replay", ""):
            # The options of that run stand for those that the command line does not give.
            config = tyro.cli(config_type, default=read_config(replay, config))
            options = config.run  # type: ignore[attr-defined]
        if options.simulate_devices:
            simulate_devices(options.simulate_devices)
        join_hosts(options.hosts)
        main(config)
    except Ended as ended:
        if jax.process_index() == 0:
            print(ended)
    except Stopped as stopped:
        same = "the same command" + ("" if options.folder else f" with --folder {stopped.folder}")
        if jax.process_index() == 0:
            print(f"{stopped}; {same} goes on", file=sys.stderr)
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


def _agreed_folder(name: str, options: RunOptions, content: Mapping[str, Any]) -> Path:
    """The folder that process 0 chose, on every process.

    Raises:
      UserError: process 0 found a run with other options in it, or cannot make it.
      Ended: process 0 found a finished run in it.
    """
    told = {"folder": "", "error": "", "ended": ""}
    if jax.process_index() == 0:
        try:
            looks = options.replay or "runs" * (options.explain or options.explain_json)
            folder = looks or options.folder or _new_folder(name)
            told |= {"folder": folder, "ended": "" if looks else _found(folder, content)}
        except UserError as error:
            told["error"] = str(error)
    told = json.loads(from_first(json.dumps(told)))
    if told["error"]:
        raise UserError(told["error"])
    if told["ended"]:
        raise Ended(told["ended"])
    return Path(told["folder"])


def _found(folder: str, content: Mapping[str, Any]) -> str:
    """What to say of a finished run in the folder; "" where there is none.

    Raises:
      UserError: there is a run with other options.
    """
    path = Path(folder)
    config, begun = path / "config.json", any(os.path.exists(path / file) for file in RUN_FILES)
    # A run that failed before its first step leaves its options alone, and its name free.
    if not begun and not os.path.exists(config):
        return ""
    try:
        before = json.loads(config.read_text())
        if not before["config"]["run"]:
            raise ValueError("it is none of a run")
        if not begun:
            return ""
        if table := differences(_fixed(before), _fixed(content)):
            raise UserError(
                f"{folder} holds a run with other options, which would change its numbers:\n"
                f"{table}\nGive those that it has, or another --folder."
            )
        if (path / "summary.json").exists():
            summary = (path / "summary.json").read_text().strip()
            return f"The run in {folder} is finished; another --folder starts a new one.\n{summary}"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{folder} holds a run whose config.json or summary.json cannot be read, or something "
            f"else that has such files ({error!r}). Give another --folder."
        ) from error
    return ""


def _fixed(content: Mapping[str, Any]) -> dict[str, Any]:
    """What must stay the same while a run goes on, of what config.json holds."""
    free = FREE | {"python", "versions", "commit", "devices"}
    free |= {field.name for field in dataclasses.fields(DeviceOptions)} | {"folder"}
    run = {name: value for name, value in content["config"]["run"].items() if name not in free}
    rest = {name: value for name, value in content["config"].items() if name != "run"}
    return {k: v for k, v in content.items() if k not in free | {"config"}} | rest | run


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
