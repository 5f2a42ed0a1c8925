"""A small instance of every algorithm, for the tests that all of them must pass."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from algorithms.lm import lm
from algorithms.lm.model import ModelConfig, build
from algorithms.maml import maml
from algorithms.maml.model import ModelConfig as NetworkConfig
from algorithms.maml.model import build as build_network
from algorithms.ppo import ppo
from algorithms.ppo.model import build as build_agent
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


def ppo_case():
    model, init = build_agent(size=3, actions=2, discrete=False, hidden=8)
    rng = np.random.default_rng(0)
    numbers = ("log_prob", "value", "advantage", "target", "weight", "mean_return")
    shapes = {"observation": (5, 3), "action": (5, 2)} | {name: (5,) for name in numbers}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["weight"] = np.array([1, 1, 0, 1, 1], np.float32)

    def collate(examples):  # the tests pick rows, where the core would select from arrays
        names = examples[0]
        return ppo.collate({name: np.stack([row[name] for row in examples]) for name in names})

    return Case(
        collate,
        partial(ppo.loss, model=model, clip=0.2, value_weight=0.5, entropy_weight=0.01),
        partial(ppo.predict, model=model),
        init(jax.random.key(0)),
        [{name: array[row] for name, array in arrays.items()} for row in range(5)],
        [{"observation": row} for row in arrays["observation"]],
        whole_batch=True,
    )


def maml_case():
    model, init = build_network(NetworkConfig(), (1,), 1)
    bound = {
        "model": model,
        "objective": maml.regression,
        "learner": partial(maml.adapt, optimizer=optax.sgd(0.05), steps=2),
    }
    rng = np.random.default_rng(0)
    shapes = {"support_x": (3, 1), "support_y": (3, 1), "query_x": (4, 1), "query_y": (4, 1)}
    tasks = [
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(5)
    ]
    return Case(
        maml.collate,
        partial(maml.loss, **bound),
        partial(maml.predict, **bound),
        init(jax.random.key(0)),
        tasks,
        [{name: task[name] for name in maml.INPUTS} for task in tasks],
    )


CASES = {"lm": lm_case, "maml": maml_case, "ppo": ppo_case}
