"""Draws tokens from any autoregressive model, one for every row at a time.

A model is a function step(cache, tokens [B]) -> (cache, logits [B, V]). What its cache holds is
its own affair; the batch is axis 1 of every leaf (axis 0 is for what it stacks, such as layers).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from core.contract import at_least_float32
from core.errors import UserError, at_least

Cache = TypeVar("Cache")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn; what is set applies in this order, each to what the last one left."""

    temperature: float = 1.0
    """Divides the logits: low is safe, high is varied, 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0 draws from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach this sum; 1 from all."""

    def __post_init__(self) -> None:
        at_least(self, "temperature", 0)
        at_least(self, "top_k", 0)
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"top_p {self.top_p} is out of range: it must be above 0 and at most 1."
            )


def sample(
    step: Callable[[Cache, jax.Array], tuple[Cache, jax.Array]],
    cache: Cache,
    logits: jax.Array,
    keys: jax.Array,
    *,
    length: int,
    sampling: Sampling,
    end: int | Sequence[int] | None = None,
) -> jax.Array:
    """Draws `length` tokens for every row, in one step less, or until all rows have ended.

    Token t of a row is drawn with fold_in(the row's key, t), so that neither the number nor the
    order of the other rows changes it.

    Args:
      step: appends a token to each row, and gives the logits of the next.
      cache: what `step` starts from.
      logits: [B, V], of the first tokens.
      keys: [B], one per row.
      end: the token or tokens that end a row.

    Returns:
      tokens [B, length] int32; after its end a row is filled with the (first) end token.
    """
    if length < 1:
        raise UserError(f"Cannot draw {length} tokens: the length must be at least 1.")
    ends = jnp.array([] if end is None else end, jnp.int32).reshape(-1)
    fill = ends[0] if ends.size else jnp.int32(0)

    def put(t: Any, logits: jax.Array, tokens: jax.Array, ended: jax.Array) -> Any:
        now = jax.vmap(jax.random.fold_in, (0, None))(keys, t)
        token = jnp.where(ended, fill, draw(logits, now, sampling))
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, t, axis=1)
        return tokens, jnp.isin(token, ends)  # so is what fills a row that has ended

    def unfinished(state: tuple[Any, ...]) -> Any:
        t, _, _, ended = state
        return (t < length) & ~jnp.all(ended)

    def extend(state: tuple[Any, ...]) -> tuple[Any, ...]:
        t, cache, tokens, ended = state
        cache, logits = step(cache, tokens[:, t - 1])
        return t + 1, cache, *put(t, logits, tokens, ended)

    batch = logits.shape[0]
    first = put(0, logits, jnp.full((batch, length), fill), jnp.zeros(batch, bool))
    last = jax.lax.while_loop(unfinished, extend, (jnp.int32(1), cache, *first))
    tokens: jax.Array = last[2]
    return tokens


def draw(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """A token [B] int32 for each row of logits [B, V], with one key per row."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Below the highest, so that a tiny temperature can only overflow to a probability of 0.
    logits = at_least_float32(logits)
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    categorical = jax.vmap(jax.random.categorical)
    if sampling.top_k == 0 and sampling.top_p == 1:
        return categorical(keys, logits).astype(jnp.int32)
    vocab = logits.shape[-1]
    logits, order = jax.lax.top_k(logits, min(sampling.top_k or vocab, vocab))
    if sampling.top_p < 1:
        chances = jax.nn.softmax(logits, axis=-1)
        likelier = jnp.cumsum(chances, axis=-1) - chances  # 0 for the first: one always stays
        logits = jnp.where(likelier < sampling.top_p, logits, -jnp.inf)
    rank = categorical(keys, logits)
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0]
