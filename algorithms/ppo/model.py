"""Actor and critic as in CleanRL: two tanh networks apart, and the distributions of actions.

Weights are orthogonal with a gain of sqrt 2, 0.01 for the policy's last layer (a new policy is
close to uniform) and 1 for the value's; biases are 0.

Shapes: B rows, O size of an observation, A number of actions or size of one.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from core import at_least_float32

HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


@dataclasses.dataclass(frozen=True)
class Categorical:
    """Actions 0 to A - 1, with probabilities proportional to exp(logits [B, A])."""

    logits: jax.Array

    def log_prob(self, action):
        return jnp.take_along_axis(self._log_probs(), action[:, None], axis=1)[:, 0]

    def entropy(self):
        log_probs = self._log_probs()
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)

    def sample(self, keys):
        return jax.vmap(jax.random.categorical)(keys, self.logits).astype(jnp.int32)

    def mode(self):
        return jnp.argmax(self.logits, axis=1).astype(jnp.int32)

    def _log_probs(self):
        return jax.nn.log_softmax(self.logits)


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """Actions [B, A] around a mean [B, A], with deviations exp(log_std [A]), each size apart."""

    mean: jax.Array
    log_std: jax.Array

    def log_prob(self, action):
        z = (action - self.mean) * jnp.exp(-self.log_std)[None]
        return jnp.sum(-0.5 * jnp.square(z) - self.log_std[None] - HALF_LOG_TAU, axis=1)

    def entropy(self):
        entropy = jnp.sum(self.log_std + 0.5 + HALF_LOG_TAU)
        return jnp.broadcast_to(entropy, self.mean.shape[:1])

    def sample(self, keys):
        shape, dtype = self.log_std.shape, self.mean.dtype
        noise = jax.vmap(lambda key: jax.random.normal(key, shape, dtype))(keys)
        return self.mean + jnp.exp(self.log_std)[None] * noise

    def mode(self):
        return self.mean


class ActorCritic(nnx.Module):
    """Observations [B, O] -> the policy's distribution, values [B]."""

    def __init__(self, size, actions, discrete, hidden, *, rngs):
        def network(outputs, gain):
            sizes = [(size, hidden, 2**0.5), (hidden, hidden, 2**0.5), (hidden, outputs, gain)]
            return nnx.List([linear(i, o, g, rngs) for i, o, g in sizes])

        self.policy, self.value = network(actions, 0.01), network(1, 1.0)
        self.discrete = discrete
        if not discrete:
            self.log_std = nnx.Param(jnp.zeros(actions))

    def __call__(self, observation):
        out, value = (_through(net, observation) for net in (self.policy, self.value))
        if self.discrete:
            return Categorical(out), value[:, 0]
        return Gaussian(out, at_least_float32(self.log_std[...])), value[:, 0]


def linear(inputs, outputs, gain, rngs):
    return nnx.Linear(inputs, outputs, kernel_init=nnx.initializers.orthogonal(gain), rngs=rngs)


def _through(network, x):
    """Linear layers with tanh between them, in the type of their weights."""
    *inner, last = network
    for layer in inner:
        x = jnp.tanh(layer(x.astype(layer.kernel.dtype)))
    return at_least_float32(last(x))


def build(size, actions, discrete, hidden):
    """The structure of the networks, and the function key -> params that initialises them.

    Args:
      size: of an observation.
      actions: how many there are, or the size of one where they are continuous.
      discrete: whether they are numbered.
      hidden: width of both networks.
    """

    def make(key):
        return ActorCritic(size, actions, discrete, hidden, rngs=nnx.Rngs(key))

    def init(key):
        return nnx.to_pure_dict(nnx.state(make(key)))

    return nnx.graphdef(nnx.eval_shape(lambda: make(0))), init
