"""The network against PyTorch's LLaMA, as recorded by tests/references/lm.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from algorithms.lm import lm
from algorithms.lm.model import ModelConfig, build
from core.contract import weighted_sums
from core.decode import Sampling
from tests.references import lm as reference

RECORD = dict(np.load(reference.FILE))


@pytest.fixture(params=["untied", "tied"])
def case(request, x64):
    prefix = request.param + "/"
    arrays = {k.removeprefix(prefix): v for k, v in RECORD.items() if k.startswith(prefix)}
    config = ModelConfig(
        layers=reference.LAYERS,
        dim=reference.DIM,
        heads=reference.HEADS,
        kv_heads=reference.KV_HEADS,
        hidden=reference.HIDDEN,
        tied=request.param == "tied",
    )
    return arrays, build(config, reference.VOCAB)[0], tree(arrays, "weight/")


def tree(arrays, prefix):
    out = {"layers": {}}
    for name, array in arrays.items():
        if name.startswith(prefix + "layers/"):
            out["layers"][name.rpartition("/")[2]] = jnp.asarray(array)
        elif name.startswith(prefix):
            out[name.removeprefix(prefix)] = jnp.asarray(array)
    return out


def batch_of(arrays, block=12):
    rows = zip(arrays["tokens"], arrays["lengths"], strict=True)
    batch = lm.collate([{"tokens": tokens[:n]} for tokens, n in rows], block=block)
    # The reference saw other padding than ours: only what comes before it may matter.
    return batch | {"row_mask": np.ones(len(batch["length"]), bool)}


def mean_loss(params, model, batch):
    sums = weighted_sums(lm.loss(params, batch, None, model=model), batch["row_mask"])
    return sums["loss"] / sums["weight"]


def test_logits_are_pytorchs(case):
    arrays, model, params = case
    logits = nnx.merge(model, params)(jnp.asarray(arrays["tokens"][:, :-1]))
    np.testing.assert_allclose(logits, arrays["logits"], rtol=1e-11, atol=1e-12)


def test_loss_and_gradients_are_pytorchs(case):
    arrays, model, params = case
    loss, gradients = jax.value_and_grad(mean_loss)(params, model, batch_of(arrays))
    np.testing.assert_allclose(loss, arrays["loss"], rtol=1e-12)
    wanted = tree(arrays, "gradient/")
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True
    ):
        scale = np.abs(want).max()
        assert scale > 0
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-11 * scale, err_msg=str(path))


def test_greedy_continuations_with_a_cache_are_pytorchs_without_one(case):
    arrays, model, params = case
    keys = jax.random.split(jax.random.key(0), len(arrays["lengths"]))
    tokens = lm.predict(
        params,
        batch_of(arrays),
        keys,
        model=model,
        length=reference.NEW,
        sampling=Sampling(temperature=0),
    )
    np.testing.assert_array_equal(tokens, arrays["greedy"])


@pytest.mark.heavy
def test_the_record_is_what_pytorch_says_today():
    made = reference.make()
    assert made.keys() == RECORD.keys()
    for name, array in made.items():
        if np.asarray(array).dtype.kind == "f":
            np.testing.assert_allclose(array, RECORD[name], rtol=1e-9, atol=1e-12, err_msg=name)
        elif np.asarray(array).dtype.kind == "i":
            np.testing.assert_array_equal(array, RECORD[name], err_msg=name)
