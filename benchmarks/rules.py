"""Time to read shardings from a traced loss, for a decoder of 2, 12 and 48 unrolled layers.

    python -m benchmarks.rules

Tracing is JAX's, and shown apart; the walk and the choice are ours. The aims: linear in the number
of layers, and 48 layers within 2 seconds.
"""

import dataclasses
import time
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from algorithms.lm.lm import loss
from algorithms.lm.model import ModelConfig, build
from core.rules.choose import choose
from core.rules.walk import Walk


@dataclasses.dataclass(frozen=True)
class Config:
    """How long the rules take."""

    layers: tuple[int, ...] = (2, 12, 48)
    """Numbers of layers."""
    tensor: int = 4
    """Devices along the tensor axis."""
    repeats: int = 5
    """Times that each is measured; medians are shown."""


def seconds(call, repeats):
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        out = call()
        taken.append(time.perf_counter() - began)
    return out, median(taken)


def main(config: Config) -> None:
    batch = {
        "tokens": jax.ShapeDtypeStruct((8, 129), jnp.int32),
        "length": jax.ShapeDtypeStruct((8,), jnp.int32),
        "bytes": jax.ShapeDtypeStruct((8, 128), jnp.float32),
    }
    for layers in config.layers:
        # Parameters of each layer apart, as most libraries have them.
        model, init = build(ModelConfig(layers=layers, unroll=True), 4096)
        stacked = jax.eval_shape(init, jax.random.key(0))
        rest = {name: leaf for name, leaf in stacked.items() if name != "layers"}
        one = {n: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for n, x in stacked["layers"].items()}
        params = rest | {"layers": [one] * layers}

        def mean(params, batch, model=model):
            layers = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])
            return jnp.mean(loss(params | {"layers": layers}, batch, None, model=model).values)

        closed, traced = seconds(lambda f=mean, p=params: jax.make_jaxpr(f)(p, batch), 1)
        leaves = jax.tree.leaves(params)
        sizes = [int(np.prod(leaf.shape)) for leaf in leaves]
        number = len(leaves)
        walk, walked = seconds(lambda c=closed, n=number: Walk(c, n), config.repeats)
        _, chosen = seconds(lambda w=walk, s=sizes: choose(w, s, config.tensor), config.repeats)
        each = (walked + chosen) / walk.equations * 1e6
        print(
            f"{layers:3} layers, {walk.equations:6,} equations: traced in {traced:.2f} s, walked "
            f"in {walked:.2f} s, chosen in {chosen:.2f} s; {each:.0f} us for each equation"
        )


if __name__ == "__main__":
    main(tyro.cli(Config))
