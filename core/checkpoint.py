"""Checkpoints of a run: saved in the background, the latest and the best kept, restored anywhere.

Orbax writes them, every process its own shards. What is restored takes the shardings of the target
it is asked for; the ones it was saved with are never looked at.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from core.errors import UserError

FOLDER = "checkpoints"

# Orbax warns of what is meant here: a save without a metric, a folder that is only read.
logging.getLogger("absl").setLevel(logging.ERROR)

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


class Checkpoints:
    """The checkpoints in a run's folder, as they are written."""

    def __init__(self, folder: Path, keep: int):
        best = managers.BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)
        policies = [managers.LatestN(keep), best]
        self._manager = ocp.CheckpointManager(
            (folder / FOLDER).absolute(),
            item_names=("params", "state"),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(policies), best_fn=_score
            ),
        )

    def save(self, step: int, params: Any, state: Any, score: float | None) -> None:
        """Starts to save; returns once the arrays are copied, so that they may be donated.

        Args:
          step: optimizer steps done.
          params: pytree of arrays.
          state: pytree of all else that training changes.
          score: how good it is, the larger the better; None or NaN where nobody knows.
        """
        known = score is not None and not math.isnan(score)
        started = self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params), state=ocp.args.StandardSave(state)
            ),
            metrics={"score": score} if known else None,
        )
        assert started, f"step {step} is not after the latest checkpoint"

    def close(self) -> None:
        """Waits until all is written."""
        self._manager.wait_until_finished()
        self._manager.close()


class Saved:
    """The weights in the folder of a run; as `init` of a Trainer, each host reads its parts."""

    def __init__(self, folder: str | Path, which: Which = "best"):
        """Raises a `UserError` where the folder holds no checkpoint."""
        path = Path(folder).absolute() / FOLDER
        if not path.is_dir():
            raise UserError(f"{folder} holds no checkpoints: give the folder of a run.")
        with ocp.CheckpointManager(
            path, options=ocp.CheckpointManagerOptions(best_fn=_score, read_only=True)
        ) as manager:
            step = manager.best_step() if which == "best" else None
            step = manager.latest_step() if step is None else step
        if step is None:
            raise UserError(f"{path} holds no finished checkpoint: let the run save one first.")
        self.step = step
        self._path = path / str(step) / "params"

    def shapes(self) -> Any:
        """A `ShapeDtypeStruct` per parameter."""
        with ocp.StandardCheckpointer() as reader:
            tree = reader.metadata(self._path).item_metadata.tree
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)

    def load(self, shardings: Any) -> Any:
        """The parameters, laid out as these shardings say."""
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.shapes(),
            shardings,
        )
        with ocp.StandardCheckpointer() as reader:
            return reader.restore(self._path, target)


def _score(metrics: Mapping[str, float]) -> float:
    return metrics["score"]
