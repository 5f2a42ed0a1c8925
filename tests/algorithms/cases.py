"""A small instance of every algorithm, for the tests that all of them must pass."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from algorithms.lm import lm
from algorithms.lm.model import ModelConfig, build
from core.decode import Sampling


@dataclasses.dataclass(frozen=True)
class Case:
    collate: Callable
    loss: Callable
    predict: Callable
    params: Any
    examples: list
    """At least four."""
    questions: list
    """The same without targets."""
    whole_batch: bool = False


def lm_case():
    config = ModelConfig(layers=2, dim=16, heads=4, kv_heads=2, hidden=24, dropout=0.1)
    model, init = build(config, 11)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 11, size=n) for n in (9, 4, 9, 2, 7)]
    sampling = Sampling(temperature=0.9, top_k=5)
    return Case(
        partial(lm.collate, block=8),
        partial(lm.loss, model=model),
        partial(lm.predict, model=model, length=4, sampling=sampling, end=0),
        init(jax.random.key(0)),
        [{"tokens": t, "bytes": np.full(len(t) - 1, 2.5)} for t in tokens],
        [{"tokens": t} for t in tokens],
    )


CASES = {"lm": lm_case}
