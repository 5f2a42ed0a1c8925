"""AdamW on a schedule in optimizer steps: what most scripts train with."""

import dataclasses
from typing import Any, Literal

import optax

from core.errors import UserError, at_least


@dataclasses.dataclass(frozen=True)
class AdamWOptions:
    learning_rate: float = 1e-3
    """Highest learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up, to nothing at the end of the run."""
    warmup: int = 0
    """Optimizer steps in which the learning rate rises linearly from nothing."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay, times the learning rate."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "warmup", "eps", "weight_decay"):
            at_least(self, name, 0)
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"{name} {getattr(self, name)} is out of range: it must be at least 0 and "
                    "below 1."
                )

    def rate(self, total_steps: int) -> Any:
        """The schedule: number of updates done before -> learning rate."""
        if self.warmup >= total_steps:
            raise UserError(
                f"warmup {self.warmup} is not shorter than the run of {total_steps} steps. Give a "
                "shorter one (--optimizer.warmup 0) or more --steps."
            )
        rest = total_steps - self.warmup
        falling = {
            "constant": optax.constant_schedule(self.learning_rate),
            "linear": optax.linear_schedule(self.learning_rate, 0.0, rest),
            "cosine": optax.cosine_decay_schedule(self.learning_rate, rest),
        }[self.schedule]
        # From 1 / (warmup + 1) and not from 0: an update of nothing would waste a step.
        rising = optax.linear_schedule(
            self.learning_rate / (self.warmup + 1), self.learning_rate, self.warmup
        )
        return optax.join_schedules([rising, falling], [self.warmup]) if self.warmup else falling

    def build(self, total_steps: int, decayed: Any = None) -> optax.GradientTransformation:
        """The optimizer of a run; its learning rate is kept in its state, to be logged as applied.

        Args:
          total_steps: optimizer steps of the whole run.
          decayed: params -> pytree of booleans: which of them decay; None: all.
        """
        fixed = ("b1", "b2", "eps", "weight_decay", "mask")
        return optax.inject_hyperparams(optax.adamw, static_args=fixed)(
            learning_rate=self.rate(total_steps),
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=decayed,
        )
