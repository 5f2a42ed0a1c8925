"""What became of a step whose loss or gradient is not finite: which tensor, which rows.

The step is done once more from its batch, which the data's order gives back, and its parameters,
which no update has changed since. All of it is written into FOLDER/nonfinite, from where `replay`
does it again: finding.json, batch.npz (the rows of the step, collated) and checkpoints/.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from core.checkpoint import Checkpoints, Saved, SaveError, like
from core.contract import full_weights
from core.data import Batch, Examples, Layout, collated
from core.errors import UserError, short
from core.mesh import from_first
from core.rules import path_name
from core.step import cast, step_key

if TYPE_CHECKING:
    from core.trainer import Trainer

FOLDER = "nonfinite"
SHOWN = 8  # rows that a sentence lists


@dataclasses.dataclass(frozen=True)
class Finding:
    loss: float
    """Average over the rows of the step."""
    grad_norm: float
    tensors: tuple[str, ...]
    """What is not finite: gradients by path, then the loss; empty if all is."""
    rows: tuple[int, ...]
    """Rows of the step whose own loss is not finite, counted from 0."""

    def sentence(self, rows: np.ndarray) -> str:
        """What was found, given where in the data the rows of the step are."""
        text = f"loss {self.loss:.6g} and norm of the gradient {self.grad_norm:.6g}"
        if not self.tensors:
            return f"{text}, and all of it is finite."
        of = (
            "tensor that is"
            if len(self.tensors) == 1
            else f"of {len(self.tensors)} tensors that are"
        )
        guilty = (
            f"the loss is not finite in row {_listed(rows[list(self.rows)])}"
            if self.rows
            else "each has a finite loss"
        )
        return (
            f"{text}. The first {of} not finite is {self.tensors[0]}. Of the rows of the step, "
            f"{_listed(rows)}, {guilty}."
        )


def explain(trainer: "Trainer", examples: Examples, rows: np.ndarray, steps_done: int) -> str:
    """Does a step again, and writes it into the trainer's folder if it has one.

    Args:
      trainer: with the parameters before the step.
      examples: of the step's epoch.
      rows: of the examples, in the order of the step.
      steps_done: before the step.
    """
    arrays = collated(trainer.collate, examples, rows, "training data")
    found = find(trainer, placed(trainer.layout, arrays, len(rows)), steps_done)
    said = found.sentence(rows)
    if trainer.folder is None:
        return said
    try:
        _write(trainer, trainer.folder / FOLDER, arrays, rows, steps_done, found)
    except (OSError, UserError, SaveError) as error:
        return f"{said} (It could not be written to be run again: {error}.)"
    return f"{said} To run that step again: replay {trainer.folder}."


def find(trainer: "Trainer", batch: Batch, steps_done: int) -> Finding:
    """Does the gradient of a step again, with the trainer's parameters.

    Args:
      trainer: with the parameters before the step.
      batch: global arrays [k, width, ...].
      steps_done: before the step, which its key is a function of.
    """

    def examine(params: Any, batch: Batch, key: jax.Array) -> Any:
        grads, sums = trainer.gradients(params, batch, key)
        scale = jnp.where(sums["weight"] > 0, 1 / sums["weight"], 0)
        norm = optax.tree.norm(grads) * scale
        finite = jax.tree.map(lambda g: jnp.all(jnp.isfinite(g)), grads)
        return finite, sums["loss"] * scale, norm, _bad_rows(trainer, params, batch, key)

    whole = trainer.state.step.sharding
    args = (trainer.state.params, batch, step_key(trainer.options.seed, steps_done))
    result = jax.device_get(jax.jit(examine, out_shardings=whole)(*args))
    finite, loss, norm, (bad, real) = result
    leaves = jax.tree_util.tree_leaves_with_path(finite)
    tensors = [f"the gradient of {path_name(path)}" for path, good in leaves if not good]
    if not np.isfinite(loss):
        tensors.append("the loss")
    elif not tensors and not np.isfinite(norm):
        tensors.append("the norm of the gradient, which overflows")
    # The real rows, in the order of the data: microbatches are laid out one after the other.
    return Finding(float(loss), float(norm), tuple(tensors), tuple(np.flatnonzero(bad[real])))


def _bad_rows(trainer: "Trainer", params: Any, batch: Batch, key: jax.Array) -> Any:
    """Which rows [k, width] have a loss that is not finite, and which are real."""
    assert trainer.loss is not None, "it was trained"
    loss = trainer.loss

    def bad(at: tuple[jax.Array, Batch]) -> jax.Array:
        index, rows = at
        out = loss(cast(params, trainer.dtype), rows, jax.random.fold_in(key, index))
        finite = jnp.isfinite(out.values) & jnp.isfinite(full_weights(out))
        return ~jnp.all(finite, axis=tuple(range(1, finite.ndim)))

    numbers = jnp.arange(batch["row_mask"].shape[0])
    return jax.lax.map(bad, (numbers, batch)), batch["row_mask"]


def _write(
    trainer: "Trainer",
    path: Path,
    arrays: dict[str, np.ndarray],
    rows: np.ndarray,
    steps_done: int,
    found: Finding,
) -> None:
    """Writes all that `replay` needs; raises on every process where process 0 cannot."""
    problem = ""
    try:
        if jax.process_index() == 0:
            _write_batch(path, arrays, rows, steps_done, found)
    except OSError as error:
        problem = short(error)
    if problem := from_first(problem):
        raise OSError(problem)
    checkpoints = Checkpoints(path, keep=1)
    checkpoints.save(steps_done, trainer.state.params, {"step": np.int32(steps_done)}, None, None)
    checkpoints.close()


def _write_batch(
    path: Path, arrays: dict[str, np.ndarray], rows: np.ndarray, steps_done: int, found: Finding
) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    # What NumPy itself does not know, such as bfloat16, a file of its own cannot hold.
    plain = {k: x.astype(np.float32) if x.dtype.kind == "V" else x for k, x in arrays.items()}
    np.savez(path / "batch.npz", **plain)  # type: ignore[arg-type]
    content = {
        "step": steps_done + 1,
        "rows": rows.tolist(),
        "dtypes": {key: x.dtype.name for key, x in arrays.items()},
        "loss": str(found.loss),
        "grad_norm": str(found.grad_norm),
        "tensors": found.tensors,
        "bad_rows": rows[list(found.rows)].tolist(),
    }
    (path / "finding.json").write_text(json.dumps(content, indent=2) + "\n")


def replay(trainer: "Trainer", folder: Path) -> str:
    """Runs the step again that stopped the run in this folder, and says what it gives.

    Raises:
      UserError: there is no such step there.
    """
    path = folder / FOLDER
    try:
        content = json.loads((path / "finding.json").read_text())
        with np.load(path / "batch.npz") as file:
            arrays = {k: file[k].astype(np.dtype(t)) for k, t in content["dtypes"].items()}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} has no step to replay: {path} is written where a run stops at a step that "
            f"is not finite ({error})."
        ) from error
    rows = np.asarray(content["rows"])
    if len(rows) > trainer.options.batch_size:
        raise UserError(
            f"The step to replay has {len(rows)} rows, more than batch_size "
            f"{trainer.options.batch_size}: leave it as the run has it."
        )
    params = Saved(path, "last").read(like(trainer.state.params))
    trainer.state = dataclasses.replace(trainer.state, params=params)
    batch = placed(trainer.layout, arrays, len(rows))
    found = find(trainer, batch, content["step"] - 1)
    return f"Step {content['step']} of {folder}, done once more, has {found.sentence(rows)}"


def placed(layout: Layout, arrays: dict[str, np.ndarray], rows: int) -> Batch:
    """The collated arrays of all rows of a step as the global batch."""
    mine = layout.place(np.arange(rows))
    return layout.batch({key: array[mine] for key, array in arrays.items()}, rows)


def _listed(rows: np.ndarray) -> str:
    shown = ", ".join(str(row) for row in rows[:SHOWN])
    return f"{shown} and {len(rows) - SHOWN} more" if len(rows) > SHOWN else shown
