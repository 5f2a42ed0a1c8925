"""The three functions of language modelling, and the trainer around them."""

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from algorithms.lm import lm
from algorithms.lm.model import ModelConfig, build
from core import MeshOptions, Trainer, TrainOptions, UserError, make_mesh
from core.contract import weighted_sums
from core.decode import Sampling
from core.report import ReportOptions
from core.step import cast

VOCAB = 32
CONFIG = ModelConfig(layers=2, dim=64, heads=4, kv_heads=2, hidden=128, dropout=0.1)


def blocks(number, seed=0):
    """Ragged blocks of 5 to 9 tokens, with the bytes of each prediction."""
    rng = np.random.default_rng(seed)
    lengths = [5 + i % 5 for i in range(number)]
    return [
        {"tokens": rng.integers(0, VOCAB, n), "bytes": rng.uniform(1, 5, n - 1)} for n in lengths
    ]


def trainer(sizes=(1, 1, 1), config=CONFIG, params=None, **kwargs):
    model, init = build(config, VOCAB)
    mesh = make_mesh(MeshOptions(*sizes), jax.devices()[: math.prod(sizes)])
    return Trainer(
        partial(lm.collate, block=8),
        partial(lm.loss, model=model),
        partial(lm.predict, model=model, length=6, sampling=Sampling(), end=0),
        init if params is None else params,
        optax.sgd(0.1),
        mesh,
        blocks(1),
        options=TrainOptions(batch_size=16, report=ReportOptions(quiet=True), **kwargs),
        summarize=lm.summarize,
    )


def test_collate_pads_at_the_end_and_keeps_the_last_tokens_of_a_long_prompt():
    batch = lm.collate([{"tokens": [5, 6, 7], "bytes": [1.0, 2.0]}, {"tokens": range(9)}], block=4)
    assert batch["tokens"].tolist() == [[5, 6, 7, 0, 0], [4, 5, 6, 7, 8]]
    assert batch["length"].tolist() == [3, 5]
    assert batch["bytes"].tolist() == [[1, 2, 0, 0], [0, 0, 0, 0]]


def test_an_empty_prompt_is_refused():
    with pytest.raises(UserError, match="has no tokens"):
        lm.collate([{"tokens": [1]}, {"tokens": []}], block=4)


def test_every_token_but_the_first_is_predicted_whatever_it_is():
    """The padding is token 0 too: a real 0 is trained on, padding is not."""
    model, init = build(CONFIG, VOCAB)
    batch = lm.collate([{"tokens": [3, 0, 0]}, {"tokens": [3]}, {"tokens": [1] * 9}], block=8)
    out = lm.loss(init(jax.random.key(0)), batch, None, model=model)
    assert out.weights.astype(int).tolist() == [[1, 1] + [0] * 6, [0] * 8, [1] * 8]


def test_uniform_logits_cost_log_v():
    model, init = build(CONFIG, VOCAB)
    params = init(jax.random.key(0))
    params = {**params, "head": jnp.zeros_like(params["head"])}
    out = lm.loss(params, lm.collate(blocks(3), block=8), None, model=model)
    np.testing.assert_allclose(out.values, math.log(VOCAB), rtol=1e-6)


def test_bits_per_byte_are_those_of_the_text(x64):
    data = blocks(21)
    metrics = trainer((8, 1, 1)).evaluate(data)
    nats = metrics["loss"] * sum(len(b["bytes"]) for b in data)
    wanted = nats / math.log(2) / sum(b["bytes"].sum() for b in data)
    assert metrics["bits_per_byte"] == pytest.approx(wanted, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["weight"] == sum(len(b["bytes"]) for b in data)


@pytest.fixture(scope="module")
def reference():
    jax.config.update("jax_enable_x64", True)
    one = trainer()
    result = one.fit(blocks(40))
    yield jax.device_get(one.state.params), result["train"]
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 4, 1)], ids=str)
def test_devices_change_neither_loss_nor_gradients_dropout_on(reference, sizes, x64):
    one = trainer(sizes)
    metrics = one.fit(blocks(40))["train"]
    for a, b in zip(jax.tree.leaves(one.state.params), jax.tree.leaves(reference[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    assert metrics["loss"] == pytest.approx(reference[1]["loss"], rel=1e-12)


@pytest.mark.parametrize("unroll", [False, True])
def test_fsdp_splits_the_parameters_but_never_the_layer_axis(unroll):
    # More layers than anything else, so that the layer axis would be the largest to divide.
    config = dataclasses.replace(CONFIG, layers=64, dim=32, hidden=32, unroll=unroll)
    one = trainer((1, 8, 1), config)
    leaves = jax.tree.leaves(one.state.params)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    whole = sum(leaf.nbytes for leaf in leaves)
    assert (whole - held) / whole * 8 / 7 >= 0.9
    specs = one.inferred.specs["layers"]
    assert all(spec[0] is None for spec in specs.values() if len(spec))


def test_scanned_and_unrolled_layers_train_alike(x64):
    losses = []
    params = build(CONFIG, VOCAB)[1](jax.random.key(1))
    for unroll in (False, True):
        one = trainer(config=dataclasses.replace(CONFIG, unroll=unroll), params=params, epochs=2)
        losses.append(one.fit(blocks(20))["train"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_the_step_moves_no_batch_data():
    one = trainer((8, 1, 1), microbatches=2)
    arrays = lm.collate(blocks(16), block=8)
    batch = one.layout.batch(arrays, 16)
    text = one.step_jit.lower(one.state, batch).compile().as_text()
    assert "all-reduce" in text
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)


def test_large_logits_cost_the_same_in_bfloat16():
    model, init = build(CONFIG, VOCAB)
    params = init(jax.random.key(0))
    batch = lm.collate(blocks(16), block=8)
    logits = nnx.merge(model, params)(batch["tokens"][:, :-1])
    params["head"] *= 60 / jnp.abs(logits).max()

    def mean(params):
        sums = weighted_sums(lm.loss(params, batch, None, model=model), jnp.ones(16, bool))
        return float(sums["loss"] / sums["weight"])

    assert mean(cast(params, jnp.bfloat16)) == pytest.approx(mean(params), rel=0.01)
    assert mean(params) > 10


def test_a_little_text_is_learnt_by_heart():
    rng = np.random.default_rng(0)
    data = [{"tokens": rng.integers(1, VOCAB, 9), "bytes": np.ones(8)} for _ in range(16)]
    model, init = build(dataclasses.replace(CONFIG, dropout=0.0), VOCAB)
    one = Trainer(
        partial(lm.collate, block=8),
        partial(lm.loss, model=model),
        partial(lm.predict, model=model, length=5, sampling=Sampling(temperature=0)),
        init,
        optax.adam(1e-2),
        make_mesh(devices=jax.devices()[:1]),
        data[:1],
        options=TrainOptions(epochs=80, batch_size=16, report=ReportOptions(quiet=True)),
    )
    assert one.fit(data)["train"]["loss"] < 0.1
    prompts = [{"tokens": example["tokens"][:4]} for example in data]
    for example, tokens in zip(data, one.predict(prompts), strict=True):
        assert tokens.tolist() == example["tokens"][4:].tolist()


def test_predictions_depend_neither_on_batch_size_nor_devices():
    prompts = [{"tokens": block["tokens"][: 1 + i % 7]} for i, block in enumerate(blocks(11))]
    outputs = []
    for sizes, batch_size in (((1, 1, 1), 16), ((8, 1, 1), 3)):
        model, init = build(CONFIG, VOCAB)
        one = Trainer(
            partial(lm.collate, block=8),
            None,
            partial(lm.predict, model=model, length=6, sampling=Sampling(top_p=0.9), end=0),
            init,
            None,
            make_mesh(MeshOptions(*sizes), jax.devices()[: math.prod(sizes)]),
            prompts[:1],
            options=TrainOptions(batch_size=batch_size),
        )
        outputs.append(np.stack(one.predict(prompts)))
    np.testing.assert_array_equal(*outputs)
    assert len(np.unique(outputs[0], axis=0)) > 5


def test_the_merged_model_is_the_network():
    model, init = build(CONFIG, VOCAB)
    assert isinstance(nnx.merge(model, init(jax.random.key(0))), nnx.Module)
    sums = weighted_sums(
        lm.loss(init(jax.random.key(0)), lm.collate(blocks(2), block=8), None, model=model),
        jnp.ones(2, bool),
    )
    assert float(sums["weight"]) == 4 + 5
