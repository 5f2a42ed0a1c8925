"""A small algorithm for tests of the core: regression with dropout on ragged rows."""

import jax
import jax.numpy as jnp
import numpy as np

from core import Loss


def examples(number, seed=0, width=16):
    """Each has `width` inputs, and 1 to 6 targets (zero of them in every tenth)."""
    rng = np.random.default_rng(seed)
    return [
        {"x": rng.normal(size=width), "y": rng.normal(size=0 if i % 10 == 9 else 1 + i % 6)}
        for i in range(number)
    ]


def collate(examples):
    batch = {
        "x": np.stack([e["x"] for e in examples]),
        "y": np.zeros((len(examples), 6)),
        "length": np.array([len(e.get("y", ())) for e in examples], np.int32),
    }
    for row, example in enumerate(examples):
        batch["y"][row, : batch["length"][row]] = example.get("y", ())
    return batch


def init(key, width=16, hidden=64):
    keys = jax.random.split(key, 3)
    return {
        "in": jax.random.normal(keys[0], (width, hidden)) / 4,
        "layers": jax.random.normal(keys[1], (4, hidden, hidden)) / 8,
        "out": jax.random.normal(keys[2], (hidden, 6)) / 8,
        "bias": jnp.zeros(6),
    }


def outputs(params, x, key=None):
    h = jnp.tanh(x.astype(params["in"].dtype) @ params["in"])

    def layer(h, at):
        weight, key = at
        new = jnp.tanh(h @ weight)
        keep = jnp.ones((), bool) if key is None else jax.random.bernoulli(key, 0.8, new.shape)
        return h + jnp.where(keep, new, 0), None

    keys = None if key is None else jax.random.split(key, 4)
    h, _ = jax.lax.scan(layer, h, (params["layers"], keys))
    return h @ params["out"] + params["bias"][None]


def loss(params, batch, key):
    error = outputs(params, batch["x"], key) - batch["y"]
    weights = jnp.arange(6)[None] < batch["length"][:, None]
    return Loss(error**2, weights, {"abs": jnp.abs(error)})


def predict(params, batch, keys):
    noise = jax.vmap(lambda key: jax.random.normal(key, (6,)))(keys)
    return {"mean": outputs(params, batch["x"]), "sample": noise}
