"""Language modelling: each token of a block is predicted from those before it.

The loss is the cross-entropy in nats of every token but a block's first, over packed blocks of text
(Radford et al. 2019); masks come from lengths and never from the identity of a token, so that an
end of document is learnt although padding may look the same.

Shapes: B rows, T predictions (a block has T + 1 tokens), V symbols of the vocabulary.
"""

import math

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from core import Loss, UserError
from core.decode import sample


def collate(examples, *, block):
    """Blocks or prompts, {"tokens": ids[, "bytes": one per prediction]}, to arrays.

    Returns:
      tokens [B, T + 1] int32, padded at the end (of more ids, the last T + 1 are kept);
      length [B], how many are real; bytes [B, T], of text that each prediction stands for.
    """
    batch = {
        "tokens": np.zeros((len(examples), block + 1), np.int32),
        "length": np.zeros(len(examples), np.int32),
        "bytes": np.zeros((len(examples), block), np.float32),
    }
    for row, example in enumerate(examples):
        tokens = example["tokens"][-(block + 1) :]
        if not len(tokens):
            raise UserError("An example has no tokens: start it with the end token, as blocks do.")
        sizes = example.get("bytes", ())
        batch["tokens"][row, : len(tokens)] = tokens
        batch["length"][row] = len(tokens)
        batch["bytes"][row, : len(sizes)] = sizes
    return batch


def loss(params, batch, key, *, model):
    """Cross-entropy [B, T] of the next token, weighted 1 where there is one."""
    tokens = batch["tokens"]
    logits = nnx.merge(model, params)(tokens[:, :-1], key)  # [B, T, V]
    values = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    positions = jnp.arange(1, tokens.shape[1])
    weights = positions[None, :] < batch["length"][:, None]
    return Loss(values, weights, {"bytes_per_token": batch["bytes"]})


def predict(params, batch, keys, *, model, length, sampling, end=None):
    """Continues each prompt: tokens [B, length], filled with `end` after an end."""
    decoder = nnx.merge(model, params)
    size = batch["tokens"].shape[1] + length
    cache, logits = decoder.prefill(batch["tokens"], batch["length"], size)
    return sample(decoder.step, cache, logits, keys, length=length, sampling=sampling, end=end)


def summarize(metrics):
    """Bits per byte and perplexity per token, from the averages per token."""
    bits = metrics["loss"] / math.log(2)
    return {
        "bits_per_byte": bits / metrics["bytes_per_token"]
        if metrics["bytes_per_token"]
        else math.nan,
        "perplexity": math.exp(min(metrics["loss"], 700.0)),
    }
