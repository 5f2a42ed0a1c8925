"""Proximal policy optimisation: several passes of clipped updates over each rollout.

Schulman et al. 2017 (arXiv 1707.06347), with advantages by Schulman et al. 2016 (arXiv
1506.02438). With r = p(a|s) / p_old(a|s), normalised advantage A, value V and its target R:

    loss = -min(r A, clip(r, 1 - c, 1 + c) A)  +  v (V - R)^2 / 2  -  e entropy       (equation 9)
    A_t  = d_t + gamma lambda A_t+1,   d_t = reward_t + gamma V(s_t+1) - V(s_t),   R = A + V_old

An episode that ends cuts the trace of A. Its last V(s_t+1) is 0 where it terminated, and the value
of its final observation where it was only cut short (truncated).

Shapes: B transitions, T time steps, N environments, O size of an observation, [...] of an action.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from core import Loss

# Added to the standard deviation that advantages are divided by.
EPSILON = 1e-8


def collate(examples):
    """Selected rows of a rollout, or of observations alone, as they are.

    Args:
      examples: {"observation": [B, O], and what `data.Rollouts` adds: "action": [B, ...],
        "log_prob", "value", "advantage", "target", "weight", "mean_return": [B]}.
    """
    return {name: np.asarray(array) for name, array in examples.items()}


def loss(params, batch, key, *, model, clip, value_weight, entropy_weight, clip_values=False):
    """Equation 9 per transition, weighted as the rollout says: 0 where an action was ignored.

    The advantages are normalised over the rows, so all rows of a step must be seen at once.
    """
    policy, value = nnx.merge(model, params)(batch["observation"])
    log_ratio = policy.log_prob(batch["action"]) - batch["log_prob"]
    ratio = jnp.exp(log_ratio)
    real = batch["row_mask"] & (batch["weight"] > 0)
    advantage = normalized(batch["advantage"], real)
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage)

    error = jnp.square(value - batch["target"])
    if clip_values:
        near = batch["value"] + jnp.clip(value - batch["value"], -clip, clip)
        error = jnp.maximum(error, jnp.square(near - batch["target"]))
    entropy = policy.entropy()
    values = policy_loss + value_weight * error / 2 - entropy_weight * entropy

    metrics = {
        "mean_return": batch["mean_return"],
        "policy_loss": policy_loss,
        "value_loss": error / 2,
        "entropy": entropy,
        # Never negative, and of less variance than -log r (Schulman, joschu.net/blog/kl-approx).
        "approx_kl": ratio - 1 - log_ratio,
        "clip_fraction": (jnp.abs(ratio - 1) > clip).astype(ratio.dtype),
        # Moments about the means of the rows, of which `summarize` makes the explained variance.
        "target_variance": jnp.square(centred(batch["target"], real)),
        "residual_variance": jnp.square(centred(batch["target"] - batch["value"], real)),
    }
    return Loss(values, batch["weight"], metrics)


def predict(params, batch, keys, *, model, greedy=False):
    """{"action": [B, ...] drawn from the policy, "log_prob": [B] of it, "value": [B]}.

    Greedy takes the likeliest action instead.
    """
    policy, value = nnx.merge(model, params)(batch["observation"])
    action = policy.mode() if greedy else policy.sample(keys)
    return {"action": action, "log_prob": policy.log_prob(action), "value": value}


def summarize(metrics):
    """The share of the variance of the value targets that the values of the rollout explain.

    NaN where the targets do not vary.
    """
    variance, unexplained = metrics["target_variance"], metrics["residual_variance"]
    return {"explained_variance": 1 - unexplained / variance if variance else math.nan}


def normalized(advantage, real):
    """Advantages [B] with mean 0 and deviation 1 over the real ones, 0 where not real [B].

    The deviation is that of a sample (over n - 1), as in PyTorch. A single real one, or equal ones,
    give exactly 0.
    """
    x = centred(advantage, real)
    variance = jnp.sum(jnp.square(x)) / jnp.maximum(jnp.sum(real) - 1, 1).astype(x.dtype)
    return x / (jnp.sqrt(variance) + EPSILON)


def centred(x, real):
    """x [B] less the mean of the real ones, 0 where not real; equal ones give exactly 0."""
    # Counted from the largest, equal ones have no rounding error that a division could blow up.
    x = jnp.where(real, x - jnp.max(jnp.where(real, x, -jnp.inf)), 0)
    mean = jnp.sum(x) / jnp.maximum(jnp.sum(real), 1).astype(x.dtype)
    return jnp.where(real, x - mean, 0)


def gae(rewards, values, next_values, terminated, truncated, *, gamma, decay):
    """Generalised advantage estimates [T, N] of transitions in order of time, all [T, N].

    Args:
      rewards: of each transition.
      values: of the observation that it starts from.
      next_values: of the one that it leads to: where an episode ends, its final observation and
        not the first of the next episode.
      terminated: the episode ended and nothing follows; wins over `truncated`.
      truncated: the episode was cut short.
      gamma, decay: discount, and lambda.

    A transition whose action was ignored, as where an environment resets itself in the step after
    an episode, comes after an end and so touches no other; what it gets itself means nothing.
    """
    delta = rewards + gamma * jnp.where(terminated, 0, next_values) - values
    goes_on = ~(terminated | truncated)

    def back(later, at):
        delta, goes_on = at
        advantage = delta + gamma * decay * jnp.where(goes_on, later, 0)
        return advantage, advantage

    _, advantages = jax.lax.scan(back, jnp.zeros_like(delta[0]), (delta, goes_on), reverse=True)
    return advantages
