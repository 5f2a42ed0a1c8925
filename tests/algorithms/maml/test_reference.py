"""The meta-gradient against learn2learn's, as recorded by tests/references/maml.py."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from algorithms.maml import maml
from algorithms.maml.model import ModelConfig, build
from tests.references import maml as reference

RECORD = dict(np.load(reference.FILE))


def tree(prefix):
    """Recorded arrays by path, as parameters."""
    out = {}
    for name, array in RECORD.items():
        if name.startswith(prefix):
            *path, last = name.removeprefix(prefix).split("/")
            at = out
            for part in path:
                at = at.setdefault(int(part) if part.isdecimal() else part, {})
            at[last] = jnp.asarray(array)
    return out


@pytest.mark.parametrize("kind, steps, first_order", reference.CASES)
def test_the_meta_gradient_is_learn2learns(kind, steps, first_order, x64):
    config = ModelConfig(reference.FILTERS, pool=kind == "pooled")
    model, _ = build(config, reference.SIDES[kind], reference.WAYS)
    learner = partial(
        maml.adapt, optimizer=optax.sgd(reference.RATE), steps=steps, first_order=first_order
    )
    batch = {name: RECORD[f"{kind}/{name}"] for name in (*maml.INPUTS, "query_y")}
    batch |= {name: batch[name] / 255 for name in ("support_x", "query_x")}

    def loss(params):
        out = maml.loss(
            params, batch, None, model=model, objective=maml.classification, learner=learner
        )
        return jnp.mean(out.values), out.values

    gradients, values = jax.jit(jax.grad(loss, has_aux=True))(tree(f"{kind}/weight/"))
    found = f"{kind}/{steps}/{first_order}"
    np.testing.assert_allclose(values, RECORD[f"{found}/loss"], rtol=1e-8)
    wanted = tree(f"{found}/gradient/")
    for got, want in zip(*map(jax.tree.leaves, (gradients, wanted)), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-8 * np.abs(want).max())


@pytest.mark.heavy
def test_the_record_is_what_learn2learn_says_today():
    made = reference.make()
    assert made.keys() == RECORD.keys()
    for name, array in made.items():
        np.testing.assert_allclose(array, RECORD[name], rtol=1e-9, atol=1e-12, err_msg=name)
