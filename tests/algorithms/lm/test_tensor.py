"""Tensor parallelism of the language model: what moves between devices, and what lies where."""

import re
from functools import partial

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from algorithms.lm import lm
from algorithms.lm.model import ModelConfig, build
from core import MeshOptions, Trainer, TrainOptions, UserError, make_mesh, unpad
from core.data import batches
from core.decode import Sampling
from core.report import ReportOptions
from core.step import row_keys
from tests.core.rules.collectives import count

ROWS, PROMPT, NEW = 2, 16, 5
EXAMPLES = [{"tokens": list(range(1, PROMPT + 1)), "bytes": [1.0] * (PROMPT - 1)}] * ROWS


@pytest.fixture(scope="module")
def trainer():
    config = ModelConfig(layers=2, dim=64, heads=8, kv_heads=4, hidden=96)
    model, init = build(config, 128)
    return Trainer(
        partial(lm.collate, block=PROMPT),
        partial(lm.loss, model=model),
        partial(lm.predict, model=model, length=NEW, sampling=Sampling(temperature=0.0)),
        init,
        optax.adam(1e-3),
        make_mesh(MeshOptions(tensor=4), jax.devices()[:4]),
        EXAMPLES,
        options=TrainOptions(batch_size=ROWS),
    )


def test_specs_are_megatrons(trainer):
    column, row = P(None, None, "tensor"), P(None, "tensor")
    assert trainer.inferred.specs == {
        "embedding": P("tensor"),
        "head": P(None, "tensor"),
        "norm": P(),
        "layers": dict.fromkeys(("q", "k", "v", "gate", "up"), column)
        | {"o": row, "down": row, "attention_norm": P(), "mlp_norm": P()},
    }
    assert trainer.inferred.problems == []


def test_a_step_holds_only_all_reduces(trainer):
    batch = trainer.layout.batch(trainer.collate(EXAMPLES), ROWS)
    text = trainer.step_jit.lower(trainer.state, batch).compile().as_text()
    assert set(count(text)) == {"AR"}


def test_generation_reduces_twice_per_layer_and_token_and_splits_the_cache(trainer):
    layout = trainer._flat(ROWS)
    batch = next(iter(batches(EXAMPLES, np.arange(ROWS), layout, trainer.collate)))
    keys = layout.to_global(row_keys(0, np.arange(ROWS)))
    text = trainer._outputs_jit.lower(trainer.state.params, batch, keys).compile().as_text()
    lines = text.splitlines()
    # A token is a turn of the outer loop, a layer one of the inner.
    layer = "\n".join(line for line in lines if "while/body/while/body" in line)
    assert count(layer) == {"AR": 2}
    # Outside of the layers only the likeliest token is gathered: a number for each device and row.
    gathers = [re.search(r"= \w+\[([\d,]*)\]", line)[1] for line in lines if "all-gather(" in line]
    assert set(gathers) <= {f"{ROWS},4"}
    size = f"[2,{ROWS},{PROMPT + 1 + NEW},"
    assert f"{size}1,8]" in text, "one of four heads of the cache on each device"
    assert f"{size}4,8]" not in text


def padded_trainer(pad_vocab, optimizer, tied=False):
    config = ModelConfig(layers=1, dim=16, heads=4, kv_heads=4, hidden=24, tied=tied)
    model, init = build(config, 23, pad_vocab)
    sampling = Sampling(temperature=1.0, top_k=5)
    sizes = MeshOptions(data=2, tensor=4) if pad_vocab else MeshOptions(data=8)
    return Trainer(
        partial(lm.collate, block=8),
        partial(lm.loss, model=model),
        partial(lm.predict, model=model, length=6, sampling=sampling),
        init,
        optimizer,
        make_mesh(sizes),
        SHORT[:1],
        options=TrainOptions(batch_size=8, epochs=3, report=ReportOptions(quiet=True)),
    )


SHORT = [{"tokens": list(range(n, n + 9)), "bytes": [1.0] * 8} for n in range(14)]


@pytest.mark.parametrize("tied", [True, False])
def test_padded_vocabulary_is_split_and_changes_nothing(tied, x64):
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    plain, padded = (padded_trainer(n, optimizer, tied) for n in (0, 24))
    assert padded.inferred.specs["embedding"] == P("tensor")
    assert padded.inferred.problems == []
    losses = [trainer.fit(SHORT)["train"]["loss"] for trainer in (plain, padded)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    true = unpad(padded.state.params, plain.state.params)
    for one, other in zip(*map(jax.tree.leaves, (plain.state.params, true)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(padded.state.params["embedding"][23:], 0)
    prompts = [{"tokens": [3, 4, 5]}, {"tokens": [20]}]
    np.testing.assert_array_equal(plain.predict(prompts), padded.predict(prompts))


def test_padding_to_less_than_the_vocabulary_is_refused():
    with pytest.raises(UserError, match="pad_vocab 22 is less than the vocabulary of 23; use more"):
        build(ModelConfig(), 23, 22)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"a": np.zeros((3, 4))}, r"a has the shape \[2, 5\], which cannot be cut to \[3, 4\]"),
        ({"a": np.zeros(2)}, r"a has the shape \[2, 5\], which cannot be cut to \[2\]"),
        ({"b": np.zeros((2, 5))}, "The shapes to cut the parameters to are those of others"),
    ],
)
def test_shapes_that_parameters_cannot_be_cut_to_are_refused(shapes, says):
    with pytest.raises(UserError, match=says):
        unpad({"a": np.zeros((2, 5))}, shapes)
