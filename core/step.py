"""The step of training as a pure function, and its state.

In order: a scan over the k microbatches sums gradients of the weighted loss, weighted values and
weights; the sums are divided once by the total weight; the global norm of the gradient is taken and
the gradient clipped to it; the optimizer updates, unless loss or gradient are not finite: then
parameters and optimizer state, its schedule's count included, stay as they are. It is one
function over global arrays, so what it gives does not depend on devices, hosts or microbatches.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from core.contract import at_least_float32

# The streams of randomness that are drawn from one seed.
INIT, TRAIN, PREDICT = range(3)

Arrays = dict[str, jax.Array]
# (params, rows, key) -> sums over these rows, see `contract.weighted_sums`.
SumsFn = Callable[[Any, Any, jax.Array | None], Arrays]
# (params, batch, key) -> (gradients, sums), not yet divided by the total weight.
GradientsFn = Callable[[Any, Any, jax.Array], tuple[Any, Arrays]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes."""

    step: jax.Array
    """Optimizer steps done, int32."""
    params: Any
    opt_state: Any
    first_bad: jax.Array
    """The first of as many steps in a row without a finite loss and gradient as are too many,
    counted from 1, int32; 0 while there is none. From that step on no update is applied."""
    in_a_row: jax.Array
    """Steps without a finite loss and gradient since the last one with, int32."""
    skipped: jax.Array
    """Steps without a finite loss and gradient so far, int32."""


def stream(seed: int | jax.Array, purpose: int) -> jax.Array:
    """The key of one stream of randomness."""
    return jax.random.fold_in(jax.random.key(seed), purpose)


def step_key(seed: int, steps_done: jax.Array | int) -> jax.Array:
    """The key of the step after so many."""
    return jax.random.fold_in(stream(seed, TRAIN), steps_done)


def initial_state(
    params: Any, optimizer: optax.GradientTransformation | None, shardings: Any, whole: Any
) -> TrainState:
    """The state before the first step; what the optimizer keeps per parameter lies as it does.

    Args:
      params: the weights, laid out as `shardings` say.
      optimizer: None keeps nothing.
      shardings: one per parameter.
      whole: the sharding of what is not split.
    """

    opt_state, trained = None, floating(params)
    if optimizer is not None:
        place = _Followers(trained, floating(params, shardings), whole)
        kept = jax.eval_shape(optimizer.init, trained)
        opt_shardings = jax.tree_util.tree_map_with_path(place.sharding, kept)
        opt_state = jax.jit(optimizer.init, out_shardings=opt_shardings)(trained)
    step, *bad = jax.jit(lambda: [jnp.int32(0)] * 4, out_shardings=whole)()
    return TrainState(step, params, opt_state, *bad)


class _Followers:
    """Where what an optimizer keeps lies: with the parameter whose path is in its own, whatever
    optimizer it is; also without one of the dimensions, or with one more in front."""

    def __init__(self, params: Any, shardings: Any, whole: Any):
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self.params = {
            path: (leaf.shape, sharding)
            for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
        }
        self.whole = whole

    def sharding(self, path: Any, leaf: Any) -> Any:
        spans = itertools.combinations_with_replacement(range(len(path) + 1), 2)
        for start, end in sorted(spans, key=lambda span: span[0] - span[1]):
            if path[start:end] in self.params:
                return self._like(leaf.shape, *self.params[path[start:end]])
        return self.whole

    def _like(self, shape: tuple[int, ...], of: tuple[int, ...], sharding: NamedSharding) -> Any:
        if shape == of:
            return sharding
        entries = (*sharding.spec, *(None,) * (len(of) - len(sharding.spec)))
        found: set[tuple[Any, ...]] = set()
        if len(shape) == len(of) and all(n in (1, m) for n, m in zip(shape, of, strict=True)):
            # An axis of which it keeps one value only is not split.
            found = {tuple(e if n > 1 else None for e, n in zip(entries, shape, strict=True))}
        elif shape[1:] == of:
            found = {(None, *entries)}
        elif len(shape) == len(of) - 1:
            gone = [d for d in range(len(of)) if of[:d] + of[d + 1 :] == shape]
            found = {entries[:d] + entries[d + 1 :] for d in gone}
        if len(found) != 1:  # of another form, or of a form that might be of several dimensions
            return self.whole
        return NamedSharding(sharding.mesh, PartitionSpec(*found.pop()))


def summed_gradients(sums: SumsFn, constrain: Callable[[Any], Any]) -> GradientsFn:
    """The function (params, batch, key) -> (gradients, sums) of a batch of arrays [k, B/k, ...].

    Args:
      sums: of loss, metrics and weights over the rows of a microbatch.
      constrain: lays a tree of gradients out over the devices as the parameters are.
    """

    def gradients(params: Any, batch: Any, key: jax.Array) -> tuple[Any, Arrays]:
        def loss(trained: Any, rows: Any, key: jax.Array) -> tuple[jax.Array, Arrays]:
            out = sums(merged(params, trained), rows, key)
            return out["loss"], out

        def part(index: jax.Array, rows: Any) -> tuple[Any, Arrays]:
            grad = jax.grad(loss, has_aux=True)
            grads, out = grad(floating(params), rows, jax.random.fold_in(key, index))
            return constrain(jax.tree.map(at_least_float32, grads)), out

        total: tuple[Any, Arrays] = scan_sum(part, batch)
        return total

    return gradients


def make_step(
    gradients: GradientsFn,
    optimizer: optax.GradientTransformation,
    seed: int,
    clip_norm: float,
    too_many: int,
) -> Callable[[TrainState, Any], tuple[TrainState, Arrays]]:
    """The step (state, batch) -> (state, metrics), for a batch of arrays [k, B/k, ...].

    Args:
      gradients: from `summed_gradients`.
      optimizer: updates the floating-point parameters; others never change.
      seed: of dropout and the like; a step's key is a function of it and the number of the step.
      clip_norm: largest norm of the gradient, 0 for no clipping.
      too_many: steps in a row without a finite loss and gradient that set `first_bad`.

    Returns:
      A pure function. Its metrics are the averages of loss and metrics, the total weight, the norm
      of the gradient before clipping, `first_bad`, `skipped`, and the learning rate as applied
      where the optimizer was made with `optax.inject_hyperparams`.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Arrays]:
        key = step_key(seed, state.step)
        grads, out = gradients(state.params, batch, key)
        metrics = averages(out)
        scale = jnp.where(out["weight"] > 0, 1 / out["weight"], 0)
        norm = optax.tree.norm(grads) * scale
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        if clip_norm:
            scale *= jnp.minimum(1, clip_norm / norm)
        trained = floating(state.params)
        grads = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), grads, trained)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        params = merged(state.params, optax.apply_updates(trained, updates))

        stopped = state.first_bad > 0
        in_a_row = jnp.where(finite, 0, state.in_a_row + 1)
        found = jnp.where(in_a_row >= too_many, state.step + 2 - in_a_row, 0)
        # A stopped run counts no further, so that what was before its first bad step is known.
        in_a_row = jnp.where(stopped, state.in_a_row, in_a_row)
        first_bad = jnp.where(stopped, state.first_bad, found)
        skipped = state.skipped + (~finite & ~stopped)
        old = (state.params, state.opt_state)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite & (first_bad == 0), new, old),
            (params, opt_state),
            old,
        )
        metrics |= {"grad_norm": norm, "first_bad": first_bad, "skipped": skipped}
        metrics |= learning_rate(opt_state)
        return TrainState(state.step + 1, params, opt_state, first_bad, in_a_row, skipped), metrics

    return step


def scan_sum(part: Callable[[jax.Array, Any], Any], batch: Any) -> Any:
    """The sum of part(index, rows) over the microbatches, the leading axis of the batch."""

    def add(total: Any, at: tuple[jax.Array, Any]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, part(*at)), None

    microbatches = jax.tree.leaves(batch)[0].shape[0]
    xs = (jnp.arange(microbatches), batch)
    first = jax.tree.map(lambda x: x[0], xs)
    if microbatches == 1:  # spares a pass over all gradients, to add them to zeros
        return part(*first)
    shapes = jax.eval_shape(part, *first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, xs)
    return total


def averages(sums: Arrays) -> Arrays:
    """Sums divided by the total weight, which stays among them; a total of 0 gives 0."""
    weight = sums["weight"]
    safe = jnp.where(weight > 0, weight, 1)
    means = {name: jnp.where(weight > 0, total / safe, 0) for name, total in sums.items()}
    return means | {"weight": weight}


def learning_rate(opt_state: Any) -> Arrays:
    """{"learning_rate": as last applied}, or {} where the optimizer does not keep it.

    `optax.inject_hyperparams` keeps it in an attribute; a parameter may have the same name.
    """
    found = optax.tree.get_all_with_path(
        opt_state,
        "learning_rate",
        filtering=lambda path, value: (
            isinstance(value, jax.Array)
            and value.ndim == 0
            and getattr(path[-2], "name", "") == "hyperparams"
        ),
    )
    return {"learning_rate": found[0][1]} if found else {}


def row_keys(seed: int, positions: np.ndarray) -> np.ndarray:
    """The data of the keys of prediction, a function of the seed and an example's position."""
    return np.asarray(_folded_keys(stream(seed, PREDICT), positions))


@jax.jit
def _folded_keys(key: jax.Array, numbers: jax.Array) -> jax.Array:
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)
    return jax.random.key_data(keys)


def is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def floating(params: Any, tree: Any = None) -> Any:
    """`tree` (by default the parameters), with None where a parameter is no floating-point one."""
    tree = params if tree is None else tree
    return jax.tree.map(lambda p, x: x if is_floating(p) else None, params, tree)


def merged(params: Any, trained: Any) -> Any:
    """`params` with the leaves of `trained` that are not None."""
    return jax.tree.map(lambda p, x: p if x is None else x, params, trained)


def cast(params: Any, dtype: Any) -> Any:
    """Floating-point parameters in the type of the computation; None: as they are."""
    if dtype is None:
        return params
    return jax.tree.map(lambda p: p.astype(dtype) if is_floating(p) else p, params)
