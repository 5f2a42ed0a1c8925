"""Checkpoints of a run: saved in the background, the latest and the best kept, restored anywhere.

checkpoints/STEP/ holds the items `params`, `state` (all else that a step changes) and `run` (what
the host knows, as JSON), and checksums.json, the SHA-256 of every file. Orbax writes the items,
every process its own shards, into a folder of another name, and renames it when all is there. What
is restored is compared with its checksums first, and takes the shardings of the target it is asked
for; the ones it was saved with are never looked at.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import math
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

from core import checksums
from core.checksums import Damaged, agree_on
from core.errors import UserError, short
from core.mesh import all_processes, from_first

FOLDER = "checkpoints"
LOCK = ".lock"
WAIT_SECONDS = 600  # that processes wait for the others' arrays to be written

# What fails to be written is for the report to say, once and in a sentence.
logging.getLogger("absl").setLevel(logging.CRITICAL)
logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())

Which = Literal["best", "last"]


@dataclasses.dataclass(frozen=True)
class Best:
    """Which checkpoint of a run is the best: by a metric of the evaluations."""

    metric: str
    mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise UserError(
                f'best=({self.metric!r}, {self.mode!r}): the second entry is "min" or "max".'
            )

    def score(self, metrics: Mapping[str, float]) -> float:
        """The larger the better; NaN where the metric is not a number.

        Raises:
          UserError: there is no such metric.
        """
        if self.metric not in metrics:
            raise UserError(
                f"best names the metric {self.metric!r}, which the evaluation does not have; it "
                f"has {', '.join(metrics)}."
            )
        return metrics[self.metric] * (1 if self.mode == "max" else -1)


class SaveError(Exception):
    """A checkpoint could not be written; those before it are as they were."""

    def __init__(self, step: int, error: Exception):
        super().__init__(f"the checkpoint of step {step} could not be written ({short(error)})")


class Checkpoints:
    """The checkpoints in a run's folder, one of which may be under way.

    Args:
      folder: of the run.
      keep: how many of the latest stay; the best one stays as well.

    Raises:
      UserError: the folder cannot be used, or another process uses it.
    """

    def __init__(self, folder: Path, keep: int):
        self.path, self._keep = (folder / FOLDER).absolute(), keep
        self._main = jax.process_index() == 0
        self._under_way: tuple[int, float | None] | None = None
        if problem := from_first(self._claim() if self._main else ""):
            raise UserError(problem)
        self._writer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(),
            async_options=ocp.options.AsyncOptions(
                # Only so does a failure to make the folder surface at once.
                create_directories_asynchronously=False,
                timeout_secs=WAIT_SECONDS,
                post_finalization_callback=self._add_checksums,
            ),
        )
        self._remove_unfinished()
        # Step -> its score, of those that are finished.
        self._scores = {step: _score(self.path / str(step)) for step in steps(self.path)}

    def save(self, step: int, params: Any, state: Any, run: Any, score: float | None) -> None:
        """Starts to save; returns once the arrays are copied, so that they may be donated.

        Args:
          step: optimizer steps done.
          params: pytree of arrays.
          state: pytree of all else that training changes.
          run: what else to keep, as JSON has it; that of process 0.
          score: how good it is, the larger the better; None or NaN where nobody knows.

        Raises:
          SaveError: it could not be begun, or the one before could not be finished (`wait`).
        """
        self.wait()
        score = None if score is None or math.isnan(score) else score
        problem: Exception | None = None
        try:
            if jax.process_count() == 1 and not self.path.is_dir():
                self.path.mkdir(parents=True)
                self._scores = {}
                raise FileNotFoundError(f"{self.path} was removed, and is made anew")
            self._writer.save(
                self.path / str(step),
                args=ocp.args.Composite(
                    # (Orbax takes no single array.)
                    params=ocp.args.StandardSave({"all": params}),
                    state=ocp.args.StandardSave(state),
                    run=ocp.args.JsonSave({"score": score, "run": run}),
                ),
                force=True,
            )
        except Exception as error:
            problem = error
        self._agree(step, problem)
        self._under_way = step, score

    def wait(self) -> None:
        """Waits until what is under way is written, and removes what need not be kept any more.

        Raises:
          SaveError: it could not be written.
        """
        if self._under_way is None:
            return
        (step, score), self._under_way = self._under_way, None
        problem: Exception | None = None
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            problem = error
        self._agree(step, problem)
        self._scores[step] = score
        kept = {*sorted(self._scores)[-self._keep :], _best(self._scores)}
        for old in set(self._scores) - kept:
            del self._scores[old]
            if self._main:
                shutil.rmtree(self.path / str(old), ignore_errors=True)

    def _agree(self, step: int, problem: Exception | None) -> None:
        """Raises a `SaveError` on every process where one of them has a problem."""
        if not all_processes(problem is None):
            self._remove_unfinished()
            problem = problem or OSError("another process failed")
            raise SaveError(step, problem) from problem

    def close(self) -> None:
        """Ends the writing; what is under way is abandoned if it fails."""
        try:
            self.wait()
        finally:
            self._writer.close()
            if self._main:
                self._unlock()

    def _claim(self) -> str:
        """Makes the folder and keeps other processes out of it; returns what is in the way."""
        run = self.path.parent
        if unreadable := sorted(set(str(run)) & set("[]\\")):
            return (
                f"The folder {run} has {' and '.join(unreadable)} in its path, where arrays can be "
                "written but not read back: give another one."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(run / LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            return f"{self.path} cannot be written ({error.strerror})."
        self._unlock = weakref.finalize(self, os.close, lock)
        try:
            # Of the process, which it ends with: also where that is killed.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return f"Another process is training in {run}: let it end, or give another folder."
        except OSError:  # a file system without locks
            pass
        return ""

    def steps(self) -> list[int]:
        """The steps that have a finished checkpoint, in order, the same on every process."""
        found: list[int] = json.loads(from_first(json.dumps(steps(self.path))))
        return found

    def run(self) -> Any:
        """What the latest checkpoint keeps as `run`; None where none can be read."""
        for step in reversed(self.steps()):
            with contextlib.suppress(Damaged):
                checksums.verify(self.path / str(step), ("run",))
                return _json(self.path / str(step))["run"]
        return None

    def restore(self, params: Any, state: Any, warn: Callable[[str], None]) -> Any:
        """The latest checkpoint that is whole; damaged ones after it are named and set aside.

        Args:
          params, state: `ShapeDtypeStruct`s with shardings, of what was saved.
          warn: told of each checkpoint that is passed over.

        Returns:
          (params, state, run) as they were saved.

        Raises:
          UserError: there is none that can be restored.
        """
        reasons: dict[int, str] = {}
        for step in reversed(self.steps()):
            folder = self.path / str(step)
            try:
                checksums.verify(folder, ("params", "state", "run"))
                restored = (
                    _read(folder / "params", {"all": params})["all"],
                    _read(folder / "state", state),
                    _json(folder)["run"],
                )
            except Damaged as error:
                reasons[step] = str(error)
                continue
            for passed, reason in reasons.items():
                warn(f"The checkpoint of step {passed} is passed over: {reason}")
                self._scores.pop(passed, None)
                self._set_aside(passed)
            return restored
        text = " ".join(f"Step {step}: {reason}" for step, reason in reasons.items())
        raise UserError(
            f"No checkpoint in {self.path} can be restored. {text} Give another folder, or remove "
            "this one to start anew."
        )

    def _add_checksums(self) -> None:
        """Called when all is written but under another name, on process 0, in the background."""
        for folder in self._unfinished():
            checksums.write(folder)

    def _unfinished(self) -> list[Path]:
        names = self.path.iterdir() if self.path.is_dir() else ()
        return [path for path in names if ".orbax-checkpoint-tmp" in path.name]

    def _remove_unfinished(self) -> None:
        """Removes what a killed process or a full disk has left."""
        if self._main:
            for path in self._unfinished():
                shutil.rmtree(path, ignore_errors=True)

    def _set_aside(self, step: int) -> None:
        if self._main:
            aside = self.path / f"{step}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (self.path / str(step)).rename(aside)


class Saved:
    """The weights in the folder of a run; as `init` of a Trainer, each host reads its parts."""

    def __init__(self, folder: str | Path, which: Which = "best"):
        """Raises a `UserError` where the folder holds no checkpoint."""
        path = Path(folder).absolute() / FOLDER
        if not path.is_dir():
            raise UserError(f"{folder} holds no checkpoints: give the folder of a run.")
        if not (found := steps(path)):
            raise UserError(f"{path} holds no finished checkpoint: let the run save one first.")
        best = _best({step: _score(path / str(step)) for step in found})
        self.step = found[-1] if which == "last" or best is None else best
        self._folder = path / str(self.step)

    def shapes(self) -> Any:
        """A `ShapeDtypeStruct` per parameter, in dicts with string keys, lists and tuples."""
        try:
            tree = ocp.StandardCheckpointHandler().metadata(self._folder / "params").tree["all"]
        except Exception as error:
            raise self._error(short(error)) from error
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)

    def load(self, shardings: Any) -> Any:
        """The parameters, laid out as these shardings say.

        Raises:
          UserError: they are damaged.
        """
        return self.read(like(self.shapes(), shardings))

    def read(self, target: Any) -> Any:
        """The parameters as a pytree of this structure, of `ShapeDtypeStruct`s with shardings.

        Raises:
          UserError: they are damaged, or others.
        """
        try:
            checksums.verify(self._folder, ("params",))
            return _read(self._folder / "params", {"all": target})["all"]
        except Damaged as error:
            raise self._error(str(error)) from error

    def _error(self, reason: str) -> UserError:
        return UserError(f"The checkpoint {self._folder} cannot be restored: {reason}")


def check_savable(state: Any) -> None:
    """Raises a `UserError` where an array of a state has no elements, which cannot be saved."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.size == 0:
            raise UserError(
                f"{jax.tree_util.keystr(path)} has the shape {list(leaf.shape)}, without any "
                "elements, which cannot be saved: leave it out of the parameters."
            )


def like(tree: Any, shardings: Any = None) -> Any:
    """A `ShapeDtypeStruct` per array, with these shardings or its own."""
    shardings = jax.tree.map(lambda x: x.sharding, tree) if shardings is None else shardings
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def steps(path: Path) -> list[int]:
    """The steps that have a finished checkpoint here, in order."""
    names = path.iterdir() if path.is_dir() else ()
    return sorted(int(name.name) for name in names if name.name.isdecimal() and name.is_dir())


def _read(path: Path, target: Any) -> Any:
    """A pytree of arrays with the shardings of the target, from files whose checksums are right.

    Raises:
      Damaged: it was saved of another model, on every process.
      UserError: it cannot be read, for a reason that is not the checkpoint's.
    """
    misfits, problem, tree = "", None, None
    # The handler alone: a checkpointer waits for processes that have failed.
    handler = ocp.StandardCheckpointHandler()
    try:
        misfits = _misfits(handler.metadata(path).tree, target)
        if not misfits:
            tree = handler.restore(path, args=ocp.args.StandardRestore(target))
    except Exception as error:
        problem = error
    if not all_processes(problem is None):
        reason = short(problem) if problem else "another process failed"
        raise UserError(f"{path} is whole, but could not be read: {reason}") from problem
    agree_on(misfits and f"its {path.name} do not fit this model and optimizer: {misfits}")
    return tree


def _misfits(saved: Any, wanted: Any) -> str:
    """Which arrays have another type or shape than wanted, the first few; "" if none has."""

    def shape(x: Any) -> str:
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.eval_shape(jax.random.key_data, x)  # as it is saved
        return f"{np.dtype(x.dtype).name}{list(x.shape)}"

    def shapes(tree: Any) -> dict[str, str]:
        flat = ocp.tree.to_flat_dict(ocp.tree.serialize_tree(tree, keep_empty_nodes=True), sep="/")
        return {path: shape(x) for path, x in flat.items() if hasattr(x, "shape")}

    has, needs = shapes(saved), shapes(wanted)
    names = [name for name in {**needs, **has} if has.get(name) != needs.get(name)]
    told = [
        f"{name.removeprefix('all/')} is {has.get(name, 'missing')}, not {needs.get(name, 'there')}"
        for name in names[:3]
    ]
    more = [f"and {len(names) - 3} more"] if len(names) > 3 else []
    return "; ".join(told + more) + "." * bool(names)


def _json(folder: Path) -> Any:
    return ocp.JsonCheckpointHandler().restore(folder / "run")


def _score(folder: Path) -> float | None:
    try:
        score = _json(folder)["score"]
        return None if score is None else float(score)
    except Exception:  # damaged, which `restore` will say
        return None


def _best(scores: Mapping[int, float | None]) -> int | None:
    """The step with the largest score, the first of equals."""
    known = {step: score for step, score in scores.items() if score is not None}
    return max(known, key=lambda step: (known[step], -step), default=None)
