"""Environments to rollouts: the source of examples, and what it remembers.

A rollout is T steps of N environments. In the step after an episode's last one an environment only
resets itself: its action is ignored, so that transition weighs 0 and enters no statistics. It
starts from the final observation, so the value that follows a transition is always that of the next
time step, which is what an episode that was cut short goes on with.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from gymnasium.vector import VectorEnv

from core import UserError
from core.errors import at_least
from core.step import stream

from .environments import Act, checked, seed_of, spaces_of, to_env
from .ppo import gae

ROLLOUTS = 3  # a stream of randomness beside those that the core draws from the seed, 0 to 2
RECENT = 100  # episodes that the mean return is taken over
STATISTICS = "statistics.json"  # of a run's observations, in its folder
LIMIT = 10.0  # of normalised observations and rewards

Say = Callable[[str], None]

_gae = jax.jit(gae)


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
    env: str = "CartPole-v1"
    """Gymnasium's id of the environment; MODULE:ID imports the module first, and gymnax:ID is
    one of gymnax's, written in JAX, for which the whole of training is compiled."""
    num_envs: int = 4
    """Environments that are stepped together."""
    num_steps: int = 128
    """Time steps of a rollout, in each environment."""
    passes: int = 4
    """Passes over each rollout."""
    gamma: float = 0.99
    """Discount of a reward that comes one step later."""
    gae_lambda: float = 0.95
    """Decay of the trace of advantages: 0 trusts the values, 1 the rewards."""
    normalize_observations: bool = False
    """Give observations mean 0 and deviation 1, by running statistics."""
    normalize_rewards: bool = False
    """Divide rewards by the running deviation of their discounted sums."""
    vectorization: Literal["auto", "vector", "sync", "async"] = "auto"
    """How environments are stepped together: by Gymnasium's own vector version (vector), one after
    the other (sync), or in processes (async), which pays for slow ones; auto takes the first of
    these that there is."""

    def __post_init__(self) -> None:
        for name in ("num_envs", "num_steps", "passes"):
            at_least(self, name, 1)
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} {getattr(self, name)} is out of range: 0 to 1.")


class Moments(NamedTuple):
    """Mean and variance of all that was seen (Chan et al. 1979), of NumPy's arrays or of JAX's."""

    number: Any
    """Of values, 0 at first."""
    mean: Any
    squares: Any
    """Sum of squared differences from the mean."""

    def added(self, x: Any) -> "Moments":
        """Those with n values more, x [n, ...], in the type of the mean."""
        if not len(x):
            return self
        x, n, total = x.astype(self.mean.dtype), len(x), self.number + len(x)
        mean = x.mean(axis=0)
        between = (mean - self.mean) ** 2 * (self.number * n / total)
        squares = self.squares + ((x - mean[None]) ** 2).sum(axis=0) + between
        return Moments(total, self.mean + (mean - self.mean) * (n / total), squares)

    def deviation(self) -> Any:
        """1 before anything was seen, and where all was equal, but for rounding."""
        variance = self.squares / (self.number + (self.number == 0))
        rounding = max(1e-14, (100 * float(np.finfo(self.mean.dtype).eps)) ** 2)
        varies = variance > rounding * self.mean**2
        return (variance * varies + ~varies) ** 0.5

    def scaled(self, x: Any) -> Any:
        """Values [n, ...] less the mean, over the deviation, within the limit."""
        return ((x - self.mean[None]) / self.deviation()[None]).clip(-LIMIT, LIMIT)


def nothing_seen(*shape: int) -> Moments:
    """Moments of values of this shape, in double precision."""
    return Moments(0.0, np.zeros(shape), np.zeros(shape))


def seen(observation: Any, moments: Moments | None) -> Any:
    """Observations as the networks see them, float32."""
    scaled = observation if moments is None else moments.scaled(observation)
    return scaled.astype(np.float32)


class Rollouts:
    """The source of examples: (epoch, params) -> a rollout as rows [T * N], the same one for all
    passes over it.

    Args:
      envs: from `make_envs`.
      act: `trainer.predict_step`, which the trainer has before it has this source.
      options: of the rollouts.
      seed: of environments and actions; a key is a function of it, the iteration, the time and the
        environment.
      say: prints a line.
    """

    def __init__(self, envs: VectorEnv, act: Act, options: RolloutOptions, seed: int, say: Say):
        self.envs, self.act, self.options = envs, act, options
        self.seed, self.say = seed, say
        size = spaces_of(envs).size
        self.observed = nothing_seen(size) if options.normalize_observations else None
        self.rewarded = nothing_seen() if options.normalize_rewards else None
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.epoch, self.rollout = -1, dict[str, np.ndarray]()
        self.observation = np.empty(0)  # empty: no episode is under way
        # One more for the value after the last step.
        shape = (options.num_steps + 1, envs.num_envs)
        self._key_data = jax.jit(partial(_key_data, shape=shape))

    def __call__(self, epoch: int, params: Any) -> dict[str, np.ndarray]:
        passes = self.options.passes
        if not self.rollout or epoch // passes != self.epoch // passes:
            self.rollout = self._roll_out(epoch, params)
        self.epoch = epoch
        return self.rollout

    def state(self) -> dict[str, Any]:
        """Statistics, and the rollout where passes over it are left. Gymnasium cannot save an
        environment."""
        over = (self.epoch + 1) % self.options.passes == 0
        kept = {"observed": self.observed, "rewarded": self.rewarded}
        return {name: moments and moments._asdict() for name, moments in kept.items()} | {
            "recent": list(self.recent),
            "epoch": self.epoch,
            "rollout": {} if over else self.rollout,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.observed, self.rewarded = (
            state[name] and Moments(**state[name]) for name in ("observed", "rewarded")
        )
        self.recent.extend(state["recent"])
        self.epoch, self.rollout, self.observation = state["epoch"], state["rollout"], np.empty(0)
        self.say(
            "Gymnasium cannot save its environments: they start anew, with seeds from (seed, "
            "epoch), so the run goes on well but not to the bit as if never interrupted."
        )

    def _roll_out(self, epoch: int, params: Any) -> dict[str, np.ndarray]:
        if not self.observation.size:
            self._reset(epoch)
        steps = []
        data = np.asarray(self._key_data(self.seed, epoch // self.options.passes))
        for time in range(self.options.num_steps):
            steps.append(self._step(params, data[time]))
        batch = {"observation": seen(self.observation, self.observed)}
        end = self.act(params, batch, data[-1])
        rollout = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
        return self._rows(rollout, end["value"])

    def _reset(self, epoch: int) -> None:
        observation, _ = self.envs.reset(seed=seed_of(self.seed, epoch))
        self.observation, self.time = checked(observation, 0), 0
        self.ended = np.zeros(self.envs.num_envs, bool)  # by the latest step
        self.returns = np.zeros(self.envs.num_envs)  # of the episodes under way
        self.discounted = np.zeros(self.envs.num_envs)  # sums of rewards so far

    def _step(self, params: Any, keys: np.ndarray) -> dict[str, np.ndarray]:
        """One step of all environments."""
        real = ~self.ended
        if self.observed is not None:
            self.observed = self.observed.added(self.observation[real])
        batch = {"observation": seen(self.observation, self.observed)}
        out = self.act(params, batch, keys)
        action = to_env(out["action"], self.envs.single_action_space)
        observation, reward, terminated, truncated, _ = self.envs.step(action)
        self.time += 1
        self.observation = checked(observation, self.time)
        terminated, truncated = np.asarray(terminated), np.asarray(truncated)
        self.ended = terminated | truncated
        reward = self._reward(np.where(real, np.asarray(reward, np.float64), 0), real)
        flags = {"real": real, "terminated": terminated, "truncated": truncated}
        return out | flags | batch | {"reward": reward}

    def _reward(self, reward: np.ndarray, real: np.ndarray) -> np.ndarray:
        """Counts the rewards of a step, and gives them as they are learnt from."""
        self.returns += reward
        if self.rewarded is not None:
            self.discounted = self.discounted * self.options.gamma + reward
            self.rewarded = self.rewarded.added(self.discounted[real])
            reward = np.clip(reward / self.rewarded.deviation(), -LIMIT, LIMIT)
            self.discounted[self.ended] = 0
        if self.ended.any():
            self.recent.extend(self.returns[self.ended].tolist())
            self.returns[self.ended] = 0
        return reward.astype(np.float32)

    def _rows(self, rollout: dict[str, np.ndarray], last: np.ndarray) -> dict[str, np.ndarray]:
        """A rollout [T, N, ...], and values [N] of what it ends at, as rows [T * N, ...]."""
        real, value = rollout.pop("real"), rollout["value"]
        next_value = np.concatenate([value[1:], last[None]])
        given = [rollout.pop(name) for name in ("reward", "terminated", "truncated")]
        advantage = np.asarray(
            _gae(
                given[0],
                value,
                next_value,
                *given[1:],
                gamma=self.options.gamma,
                decay=self.options.gae_lambda,
            )
        )
        mean = math.fsum(self.recent) / len(self.recent) if self.recent else math.nan
        rollout |= {
            "advantage": advantage,
            "target": advantage + value,
            # All passes together weigh 1: what is counted is then steps of the environments.
            "weight": (real / self.options.passes).astype(np.float32),
            "mean_return": np.full(real.shape, mean, np.float32),
        }
        return {name: x.reshape(-1, *x.shape[2:]) for name, x in rollout.items()}


def _key_data(seed: Any, iteration: Any, *, shape: tuple[int, int]) -> jax.Array:
    """The data of keys [T, N, ...], each of its own place and the iteration."""
    key = jax.random.fold_in(stream(seed, ROLLOUTS), iteration)
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (None, 0))
    return jax.random.key_data(fold(key, np.arange(math.prod(shape)).reshape(shape)))
