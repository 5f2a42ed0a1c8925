"""The networks of Finn et al. 2017: a small perceptron for sines, four convolutions for images.

Neither has any running state: what is normalised takes its statistics from the images at hand.

Shapes: N images or points, H and W their sides, C channels, F filters.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from core import at_least_float32
from core.errors import at_least

EPSILON = 1e-5  # added to the variance


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    filters: int = 64
    """Of each convolution."""
    pool: bool = False
    """Pool 2 x 2 after each convolution and flatten at the end, as for mini-ImageNet, instead of
    convolutions of stride 2 and a mean over the positions, as for Omniglot."""
    statistics: Literal["batch", "support"] = "batch"
    """Where queries are normalised: with the statistics of all queries of their task, so that
    they are answered together (transductive, as in the paper), or with those of its support set."""
    convolution: Literal["auto", "patches", "direct"] = "auto"
    """How convolutions are computed: as a product of patches with a matrix, or directly; "auto" is
    patches on CPU, where the kernels that differ by task are slow, and direct elsewhere."""

    def __post_init__(self):
        at_least(self, "filters", 1)


class Perceptron(nnx.Module):
    """Numbers [N, 1] -> numbers [N, 1], by two layers of 40 with ReLU."""

    def __init__(self, *, rngs):
        sizes = [(1, 40), (40, 40), (40, 1)]
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in sizes])

    def __call__(self, x, support=None):
        *inner, last = self.layers
        for layer in inner:
            x = jax.nn.relu(layer(x.astype(layer.kernel.dtype)))
        return at_least_float32(last(x))


class Block(nnx.Module):
    """Images [N, H, W, C] -> [N, H/2, W/2, F]: 3 x 3 convolution, normalisation, ReLU."""

    def __init__(self, channels, config, *, rngs):
        shape = (3, 3, channels, config.filters)
        # No bias: the normalisation would take it away.
        self.kernel = nnx.Param(nnx.initializers.glorot_uniform()(rngs.params(), shape))
        self.scale = nnx.Param(jnp.ones(config.filters))
        self.bias = nnx.Param(jnp.zeros(config.filters))

    def __call__(self, x, count, pool, convolve):
        x = convolve(x, self.kernel[...], 1 if pool else 2)
        x = jax.nn.relu(normalize(x, self.scale[...], self.bias[...], count))
        return max_pool(x) if pool else x


class Convolutional(nnx.Module):
    """Images [N, H, W, C] -> logits [N, ways]."""

    def __init__(self, shape, ways, config, *, rngs):
        height, width, channels = shape
        self.config = config
        self.blocks = nnx.List(
            [Block(c, config, rngs=rngs) for c in (channels, *[config.filters] * 3)]
        )
        # Four times rounded down by pooling.
        features = config.filters * ((height // 16) * (width // 16) if config.pool else 1)
        self.head = nnx.Linear(features, ways, rngs=rngs)

    def __call__(self, x, support=None):
        """Logits of x; `support` are the images whose statistics may be asked for."""
        config, count = self.config, len(x)
        x = x.astype(self.head.kernel.dtype)
        if support is not None and config.statistics == "support":
            count = len(support)
            x = jnp.concatenate([support.astype(x.dtype), x])
        convolve = by_patches if config.convolution == "patches" else direct
        for block in self.blocks:
            x = block(x, count, config.pool, convolve)
        x = x.reshape(len(x), -1) if config.pool else jnp.mean(x, (1, 2))
        logits = at_least_float32(self.head(x))
        return logits if count == len(x) else logits[count:]


def normalize(x, scale, bias, count):
    """x [N, H, W, F] with the mean and variance of each filter over the first `count` images."""
    y = at_least_float32(x)
    axes = (0, 1, 2)
    centred = y - jnp.mean(y[:count], axes)[None, None, None]
    variance = jnp.mean(jnp.square(centred[:count]), axes)
    scale = at_least_float32(scale) * jax.lax.rsqrt(variance + EPSILON)
    bias = at_least_float32(bias)
    return (centred * scale[None, None, None] + bias[None, None, None]).astype(x.dtype)


def by_patches(x, kernel, stride):
    """Convolution of x [N, H, W, C] with a kernel [3, 3, C, F], padded by 1, as one product.

    Under vmap, kernels that differ by task make grouped convolutions, which XLA's CPU backend
    computes 20 times as slowly as batched products.
    """
    count, height, width, channels = x.shape
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    high, wide = (-(-side // stride) for side in (height, width))
    parts = [
        x[:, i : i + stride * high : stride, j : j + stride * wide : stride]
        for i in range(3)
        for j in range(3)
    ]
    patches = jnp.concatenate(parts, axis=3).reshape(count * high * wide, 9 * channels)
    return (patches @ kernel.reshape(9 * channels, -1)).reshape(count, high, wide, -1)


def direct(x, kernel, stride):
    """The same by XLA's own convolution."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def max_pool(x):
    """The largest of each 2 x 2 positions of x [N, H, W, F]; an odd last row or column is left."""
    high, wide = (side // 2 * 2 for side in x.shape[1:3])
    corners = [x[:, i:high:2, j:wide:2] for i in range(2) for j in range(2)]
    return functools.reduce(jnp.maximum, corners)


def build(config: ModelConfig, shape, ways):
    """The structure of a network, and the function key -> params that initialises it.

    Args:
      config: of the network for images.
      shape: of an example: (H, W, C) of an image, or (1,) of a number.
      ways: classes to tell apart.
    """
    if config.convolution == "auto":
        on_cpu = jax.default_backend() == "cpu"
        config = dataclasses.replace(config, convolution="patches" if on_cpu else "direct")

    def make(key):
        rngs = nnx.Rngs(key)
        if len(shape) == 1:
            return Perceptron(rngs=rngs)
        return Convolutional(shape, ways, config, rngs=rngs)

    def init(key):
        return nnx.to_pure_dict(nnx.state(make(key)))

    return nnx.graphdef(nnx.eval_shape(lambda: make(0))), init
