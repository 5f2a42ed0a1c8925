"""The loop of training around a step of one's own: many optimizer steps, compiled as one function.

An iteration makes its batches itself, where they depend on what it has learnt so far, and calls
`trainer.step` on them, under `jax.lax.scan` for instance. What else it carries from one to the next
is its `extra`, which is saved and restored beside the state.
"""

import itertools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from core.checkpoint import Best
from core.data import Batch, Examples
from core.errors import UserError
from core.fit import Loop, Score, highest
from core.step import Arrays, TrainState

if TYPE_CHECKING:
    from core.trainer import Trainer

Carry = tuple[TrainState, Any]
# (state, extra) -> ((state, extra), metrics)
Iteration = Callable[[Carry], tuple[Carry, Arrays]]


class CompiledLoop(Loop):
    """One call of `Trainer.fit` with a step of one's own."""

    def __init__(
        self,
        trainer: "Trainer",
        iteration: Iteration,
        extra: Any,
        valid: Examples | None,
        score: Score | None,
        best: Best | None,
    ):
        if not trainer.options.steps:
            raise UserError(
                "With a step of one's own, which has no epochs, the options must say how many "
                "optimizer steps to train for: set steps."
            )
        whole = NamedSharding(trainer.mesh, PartitionSpec())
        # A copy, since it is donated: the caller's stays the caller's.
        trainer.extra = jax.device_put(jax.tree.map(jnp.copy, extra), whole)
        carry = (trainer.state, trainer.extra)
        _check_iteration(iteration, carry)

        def step(carry: Carry) -> tuple[Carry, Arrays]:
            (state, extra), metrics = iteration(carry)
            news = {"first_bad": jnp.max(state.first_bad), "skipped": jnp.max(state.skipped)}
            return (state, extra), metrics | news

        after = (jax.tree.map(lambda x: x.sharding, carry), whole)
        self.iterate = jax.jit(step, donate_argnums=0, out_shardings=after)
        super().__init__(trainer, (), valid, score, best)

    def _settings(self) -> dict[str, Any]:
        return {}

    def _batches(self) -> Generator[tuple[Batch, int, bool]]:
        while self.at.step < self.total:
            yield {}, 1, False

    def _step(self, batch: Batch, rows: int, epoch_ends: bool) -> bool:
        last = super()._step(batch, rows, epoch_ends)
        self._log()  # at once, since nothing else is under way
        return last

    def _advance(self, batch: Batch) -> Arrays:
        metrics: Arrays
        trainer = self.trainer
        carry = (trainer.state, trainer.extra)
        (trainer.state, trainer.extra), metrics = self.iterate(carry)
        done = highest(trainer.state.step) - self.before
        if done <= self.at.step:
            raise UserError(
                "The step given to fit did no optimizer step, so it would never end: it must call "
                "trainer.step and return the state that this returns."
            )
        self.at.step = done
        return metrics

    def _carried(self) -> tuple[Any, dict[str, Any]]:
        params, rest = super()._carried()
        return params, rest | {"extra": self.trainer.extra}

    def _carry(self, params: Any, rest: dict[str, Any]) -> None:
        self.trainer.extra = rest.pop("extra")
        super()._carry(params, rest)

    def _stop_at(self, bad: int) -> NoReturn:
        raise UserError(
            f"Step {bad} was not finite. Its batch was made within a compiled step, so it cannot "
            "be shown. No update was applied from there on, and the checkpoints are from before. "
            "Try a lower learning rate, a lower clip norm, the compute dtype float32, or "
            "on_nonfinite skip."
        )


def _check_iteration(iteration: Iteration, carry: Carry) -> None:
    """Raises a `UserError` where an iteration does not return what it takes, and metrics."""
    out = jax.eval_shape(iteration, carry)
    if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict)):
        raise UserError(
            "The step given to fit must be a function (state, extra) -> ((state, extra), metrics), "
            f"taking one pair, with a dict of metrics; it returned a {type(out).__name__}."
        )
    taken, given = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (carry, out[0]))
    for path in itertools.chain(taken, given):
        one, other = taken.get(path), given.get(path)
        if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            shown = [
                f"{x.dtype}{list(x.shape)}" if x is not None else "nothing" for x in (one, other)
            ]
            raise UserError(
                "The step given to fit must return a state and extra of the types and shapes that "
                f"it takes: at {jax.tree_util.keystr(path)} it takes {shown[0]} and returns "
                f"{shown[1]}."
            )
    for name, metric in out[1].items():
        if metric.shape:
            raise UserError(
                f"The step given to fit returned the metric {name!r} of shape "
                f"{list(metric.shape)}; it must be a single number, such as the mean."
            )
