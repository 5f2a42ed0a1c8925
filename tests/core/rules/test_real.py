"""Real dimensions, on shapes alone: which tensor sizes split nearly all of a model."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from core.mesh import AXES
from core.rules import infer
from tests.core.rules.models import (
    LAYER_NORMS,
    NORMS,
    attention_shapes,
    decoder,
    encoder_decoder,
    plain_mlp,
    self_attention,
)
from tests.core.rules.test_models import as_others_write  # noqa: F401

SIZES = (2, 4, 8, 16, 32, 64)


def norms(names, width):
    return dict.fromkeys(names, (width,))


def llama(width, hidden, heads, kv, layers, vocab):
    layer = attention_shapes(heads, kv, width=width, size=width // heads)
    layer |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    attention = partial(self_attention, heads=heads, kv=kv, rope=True)
    layer |= norms(NORMS, width)
    return decoder(layer, attention, scan=True, layers=layers, vocab=vocab, width=width)


def plain(width, hidden, heads, layers, vocab, **options):
    layer = attention_shapes(heads, heads, options.get("tied", False), width, width // heads)
    layer |= {"up": (width, hidden), "up_bias": (hidden,)}
    layer |= {"down": (hidden, width), "down_bias": (width,)} | norms(LAYER_NORMS, width)
    attention = partial(self_attention, heads=heads, kv=heads)
    sizes = {"layers": layers, "vocab": vocab, "width": width}
    return decoder(layer, attention, plain_mlp, scan=True, **sizes, **options)


# The tensor sizes that split at least 95 % of the bytes.
GOLDEN = {
    "OPT-66B": (plain(9216, 36864, 72, 64, 50272, tied=True, positions=True), {2, 4, 8}),
    "LLaMA-7B": (llama(4096, 11008, 32, 32, 32, 32000), {2, 4, 8, 16, 32}),
    "LLaMA-13B": (llama(5120, 13824, 40, 40, 40, 32000), {2, 4, 8}),
    "LLaMA-70B": (llama(8192, 28672, 64, 8, 80, 32000), {2, 4, 8, 16, 32, 64}),
    "GPT-J-6B": (plain(4096, 16384, 16, 28, 50400, shape="parallel"), {2, 4, 8, 16}),
    "T5-11B": (
        encoder_decoder("t5", 24, 1024, 128, 128, 65536, 32128),
        {2, 4, 8, 16, 32, 64},
    ),
    "Llama-3 8B": (llama(4096, 14336, 32, 8, 32, 128256), {2, 4, 8, 16, 32}),
}


def share_split(model, tensor):
    """Of the bytes, and what is said of the rest."""
    mesh = AbstractMesh((1, 1, tensor), AXES)
    fn = lambda params, batch: model.loss(params, batch, None)  # noqa: E731
    found = infer(fn, model.params(), model.batch_shapes(), mesh)
    specs = jax.tree.leaves(found.specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    sizes = [float(np.prod(x.shape)) for x in jax.tree.leaves(model.params())]
    split = sum(n for n, spec in zip(sizes, specs, strict=True) if "tensor" in spec)
    return split / sum(sizes), found.problems


@pytest.mark.parametrize("name", GOLDEN)
def test_tensor_sizes_that_split_nearly_all_of_a_model(name):
    model, sizes = GOLDEN[name]
    shares = {tensor: share_split(model, tensor) for tensor in SIZES}
    assert {tensor for tensor, (share, _) in shares.items() if share >= 0.95} == sizes
    for tensor, (share, problems) in shares.items():
        assert share >= 0.95 or problems, f"tensor {tensor} splits {share:.0%} and nothing is said"


def test_64_devices_do_not_divide_the_heads_of_opt_66b():
    _, problems = share_split(GOLDEN["OPT-66B"][0], 64)
    assert (
        "Heads 72 do not divide by 64: tensor 2, 3, 4, 6, 8, 9, 12, 18, 24, 36 would." in problems
    )
