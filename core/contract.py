"""The contract of the three functions: their types, what a loss returns, and the checks.

collate(examples) -> batch            NumPy arrays with a leading example axis
loss(params, batch, key) -> Loss      unreduced values with weights; key is None in evaluation
predict(params, batch, keys) -> out   arrays with a leading example axis; one key per row
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from core.errors import UserError

# Names of the metrics that the core itself logs, and of what else stands in a row.
RESERVED = {"loss", "weight", "grad_norm", "learning_rate", "first_bad", "skipped"}
RESERVED |= {"step", "split", "time"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loss:
    """What a loss function returns; every reduction is the core's."""

    values: jax.Array
    """Unreduced losses, led by the example axis: [B], [B, T], ..."""
    weights: jax.Array | None = None
    """Shaped like `values` or like its leading axes; ones by default. No gradient flows here."""
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    """Each shaped like `values`, averaged with the same weights."""


class CollateFn(Protocol):
    def __call__(self, examples: Any) -> Mapping[str, np.ndarray]: ...


class LossFn(Protocol):
    def __call__(self, params: Any, batch: Any, key: Any) -> Loss: ...


class PredictFn(Protocol):
    def __call__(self, params: Any, batch: Any, keys: Any) -> Any: ...


def at_least_float32(x: jax.Array) -> jax.Array:
    """`x` in its own or in single precision, whichever is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def full_weights(out: Loss) -> jax.Array:
    """Weights with as many axes as the values; ones where none are given."""
    if out.weights is None:
        return jnp.ones_like(out.values)
    return out.weights.reshape(out.weights.shape + (1,) * (out.values.ndim - out.weights.ndim))


def weighted_sums(out: Loss, row_mask: jax.Array) -> dict[str, jax.Array]:
    """Sums of weight times value over the real rows: of the loss and each metric; and of weights.

    Padding rows are cut out by `where` and not by a product with zero: NaN times zero is NaN.

    Args:
      out: values [B, ...], weights [B, ...] with as many axes or fewer.
      row_mask: [B], true for real rows.
    """
    values = out.values
    real = row_mask.reshape(row_mask.shape + (1,) * (values.ndim - 1))
    weights = jax.lax.stop_gradient(at_least_float32(full_weights(out)))
    weights = jnp.where(real, jnp.ones_like(values) * weights, 0)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(real, at_least_float32(x), 0) * weights)

    sums = {name: total(jax.lax.stop_gradient(x)) for name, x in out.metrics.items()}
    return {"loss": total(values), "weight": jnp.sum(weights)} | sums


def check_signatures(collate: CollateFn, loss: LossFn | None, predict: PredictFn | None) -> None:
    """Raises a `UserError` where a function does not take the arguments of the contract."""
    if loss is None and predict is None:
        raise UserError("A trainer needs a loss or a predict function, and got neither.")
    _check_signature("collate", collate, ("examples",))
    if loss is not None:
        _check_signature("loss", loss, ("params", "batch", "key"))
    if predict is not None:
        _check_signature("predict", predict, ("params", "batch", "keys"))


def _check_signature(name: str, fn: Callable[..., Any], wanted: tuple[str, ...]) -> None:
    must = f"{name}({', '.join(wanted)})"
    if not callable(fn):
        raise UserError(f"{name} is a {type(fn).__name__}; it must be a function {must}.")
    parameters = [p for p in inspect.signature(fn).parameters.values() if p.kind not in (2, 4)]
    # A partial keeps the arguments that it binds by keyword, with their values as defaults, and
    # what follows them can then be given by keyword only.
    by_place = [p.name for p in parameters if p.kind != p.KEYWORD_ONLY]
    needed = [p.name for p in parameters if p.default is p.empty or p.name in wanted]
    if needed != list(wanted) or by_place[: len(wanted)] != needed:
        shown = [p.name + "=..." * (p.default is not p.empty) for p in parameters]
        shown[len(by_place) :] = ["*"][: len(shown) - len(by_place)] + shown[len(by_place) :]
        raise UserError(
            f"{name} takes ({', '.join(shown)}); it must take exactly {must}, by position. Bind "
            "everything else with functools.partial and rename what is named otherwise."
        )


def check_loss(out: Any, rows: int) -> None:
    """Raises a `UserError` where a loss function's result (arrays or shapes) is not as agreed."""
    if not isinstance(out, Loss):
        raise UserError(
            f"loss returned a {type(out).__name__}; it must return core.Loss(values, weights, "
            "metrics), with values not yet reduced."
        )
    shape = tuple(out.values.shape)
    if shape[:1] != (rows,):
        raise UserError(
            f"loss returned values of shape {list(shape)} for a batch of {rows} rows; its leading "
            "axis must be the rows. Return one value per row or token; the core does the mean."
        )
    if not jnp.issubdtype(out.values.dtype, jnp.floating):
        raise UserError(
            f"loss returned values of type {out.values.dtype}, through which no gradient flows; "
            "they must be floating-point."
        )
    if out.weights is not None and shape[: len(out.weights.shape)] != tuple(out.weights.shape):
        raise UserError(
            f"loss returned weights of shape {list(out.weights.shape)} for values of shape "
            f"{list(shape)}; weights have the shape of values or of its leading axes."
        )
    for name, metric in out.metrics.items():
        if name in RESERVED:
            raise UserError(f"loss returned a metric named {name!r}, which is the core's own name.")
        if tuple(metric.shape) != shape:
            raise UserError(
                f"loss returned the metric {name!r} of shape {list(metric.shape)}; it must have "
                f"the shape of values, {list(shape)}."
            )


def check_outputs(out: Any, rows: int) -> None:
    """Raises a `UserError` where outputs of `predict` (arrays or shapes) do not lead with rows."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        if tuple(leaf.shape[:1]) != (rows,):
            raise UserError(
                f"predict returned an array{jax.tree_util.keystr(path)} of shape "
                f"{list(leaf.shape)} for a batch of {rows} rows; its leading axis must be the rows."
            )
