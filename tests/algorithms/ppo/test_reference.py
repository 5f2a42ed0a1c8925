"""A full update against PyTorch's, as recorded by tests/references/ppo.py."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms.ppo import ppo
from algorithms.ppo.environments import Spaces
from algorithms.ppo.model import build
from core import MeshOptions, Trainer, TrainOptions, make_mesh
from core.optimizer import AdamWOptions
from tests.references import ppo as reference

RECORD = dict(np.load(reference.FILE))


def tree(arrays, prefix):
    """Arrays by path, as parameters."""
    out = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            *path, last = name.removeprefix(prefix).split("/")
            at = out
            for part in path:
                at = at.setdefault(int(part) if part.isdecimal() else part, {})
            at[last] = jnp.asarray(array)
    return out


@pytest.mark.parametrize("kind", reference.KINDS)
def test_a_full_update_is_pytorchs(kind, x64):
    arrays = {k.removeprefix(f"{kind}/"): v for k, v in RECORD.items() if k.startswith(kind)}
    discrete, shape = reference.KINDS[kind], (reference.TIMES, reference.ENVS)
    advantage = ppo.gae(
        arrays["reward"],
        arrays["value"].reshape(shape),
        *(arrays[name] for name in ("next_value", "terminated", "truncated")),
        gamma=reference.GAMMA,
        decay=reference.LAMBDA,
    )
    np.testing.assert_allclose(advantage, arrays["advantage"], rtol=1e-12)

    spaces = Spaces(reference.SIZE, reference.ACTIONS, discrete)
    model, _ = build(spaces.size, spaces.actions, discrete, reference.HIDDEN)
    size = advantage.size // reference.MINIBATCHES
    trainer = Trainer(
        ppo.collate,
        partial(
            ppo.loss,
            model=model,
            clip=reference.CLIP,
            value_weight=reference.VALUE_WEIGHT,
            entropy_weight=reference.ENTROPY_WEIGHT,
            clip_values=discrete,
        ),
        partial(ppo.predict, model=model),
        tree(arrays, "weight/"),
        AdamWOptions(reference.LEARNING_RATE, schedule="constant", eps=reference.EPSILON).build(16),
        make_mesh(MeshOptions(), jax.devices()[:1]),
        spaces.example(),
        options=TrainOptions(steps=16, batch_size=size, clip_norm=reference.CLIP_NORM),
        whole_batch=True,
    )
    rows = {name: arrays[name] for name in ("observation", "action", "log_prob", "value")} | {
        "advantage": np.asarray(advantage).reshape(-1),
        "target": np.asarray(advantage).reshape(-1) + arrays["value"],
        "weight": arrays["real"] / reference.PASSES,
        "mean_return": np.zeros(advantage.size),
    }
    state, step = trainer.state, jax.jit(trainer.step)
    for number, order in enumerate(arrays["order"].reshape(-1, size)):
        batch = ppo.collate({name: x[order] for name, x in rows.items()})
        state, metrics = step(state, trainer.layout.batch(batch, size))
        for name, found in (("loss", "loss"), ("norm", "grad_norm")):
            np.testing.assert_allclose(metrics[found], arrays[name][number], rtol=1e-5)
    wanted = tree(arrays, "updated/")
    for got, want in zip(*map(jax.tree.leaves, (state.params, wanted)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.heavy
def test_the_record_is_what_pytorch_says_today():
    made = reference.make()
    assert made.keys() == RECORD.keys()
    for name, array in made.items():
        if name != "torch":
            np.testing.assert_allclose(array, RECORD[name], rtol=1e-9, atol=1e-12, err_msg=name)
