"""Gymnasium environments to rollouts: the source of examples, and what it remembers.

A rollout is T steps of N environments. Environments reset themselves in the step after an episode's
last one: that step's action is ignored, so its transition weighs 0 and enters no statistics. What
it starts from is the final observation, so the value there is what a truncated episode goes on
with, and the value that follows a transition is always that of the next time step.
"""

import dataclasses
import math
from collections import deque
from functools import partial
from typing import Any, Literal

import gymnasium
import jax
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

from core import UserError
from core.errors import at_least

from .ppo import gae

RECENT = 100  # episodes that the mean return is taken over
LIMIT = 10.0  # of normalised observations and rewards

MODES = {"auto": None, "vector": "vector_entry_point", "sync": "sync", "async": "async"}

_gae = jax.jit(gae)


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
    env: str = "CartPole-v1"
    """Gymnasium's id of the environment; MODULE:ID imports the module first."""
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


@dataclasses.dataclass(frozen=True)
class Spaces:
    """What a network needs to know of an environment."""

    size: int
    """Of an observation."""
    actions: int
    """How many there are, or the size of one where they are continuous."""
    discrete: bool

    def example(self) -> dict[str, np.ndarray]:
        """A row of a rollout, for its shapes."""
        action = np.zeros(1, np.int32) if self.discrete else np.zeros((1, self.actions), np.float32)
        names = ("log_prob", "value", "advantage", "target", "weight", "mean_return")
        row = {name: np.zeros(1, np.float32) for name in names}
        return row | {"observation": np.zeros((1, self.size), np.float32), "action": action}


def make_envs(env: str, num_envs: int, vectorization: str = "auto") -> VectorEnv:
    """Environments that are stepped together.

    Raises:
      UserError: there is no such environment, or it has no such version or does not run here.
    """
    # Processes are started afresh: a fork of one with JAX's threads may hang.
    more = {"vector_kwargs": {"context": "spawn"}} if vectorization == "async" else {}
    try:
        envs = gymnasium.make_vec(env, num_envs, MODES[vectorization], **more)
    except (gymnasium.error.Error, ImportError) as error:
        raise UserError(
            f"The environment {env!r} with vectorization {vectorization!r} cannot be made: "
            f"{str(error).rstrip('.')}. Give an id that Gymnasium has registered, such as "
            "CartPole-v1, or MODULE:ID where a module registers it; auto runs any environment."
        ) from error
    if envs.metadata.get("autoreset_mode") == AutoresetMode.NEXT_STEP:
        return envs
    envs.close()
    if vectorization == "auto":
        return make_envs(env, num_envs, "sync")
    raise UserError(
        f"The vector version of {env!r} does not reset environments in the step after an episode "
        "ends, as it must: use vectorization sync."
    )


def spaces_of(envs: VectorEnv) -> Spaces:
    """Raises a `UserError` where the networks cannot see or act in these environments."""
    seen, acts = envs.single_observation_space, envs.single_action_space
    if not isinstance(seen, Box) or len(seen.shape) != 1:
        raise UserError(
            f"The observation space {seen} is not supported, only a Box with one dimension: wrap "
            "the environment, with gymnasium.wrappers.FlattenObservation for instance."
        )
    if isinstance(acts, Discrete):
        return Spaces(seen.shape[0], int(acts.n), True)
    if isinstance(acts, Box) and len(acts.shape) == 1 and acts.dtype.kind == "f":
        return Spaces(seen.shape[0], acts.shape[0], False)
    raise UserError(
        f"The action space {acts} is not supported, only Discrete and a Box of floating-point "
        "numbers with one dimension: wrap the environment."
    )


def to_env(action: np.ndarray, space: Any) -> np.ndarray:
    """Actions of the policy [N, ...] as environments take them.

    Numbers count from the first of the space. Continuous ones are clipped on each side where the
    space has a bound, and pass as they are on a side where it has none.
    """
    if isinstance(space, Discrete):
        return action.astype(space.dtype) + space.start
    return np.clip(action, space.low, space.high).astype(space.dtype)


class Moments:
    """Mean and variance of all that was seen, in double precision (Chan et al. 1979)."""

    def __init__(self, *shape: int):
        self.number, self.mean, self.squares = 0.0, np.zeros(shape), np.zeros(shape)

    def update(self, x: np.ndarray) -> None:
        """Adds n values, x [n, ...]."""
        if not len(x):
            return
        x = x.astype(np.float64)
        mean, total = x.mean(axis=0), self.number + len(x)
        between = np.square(mean - self.mean) * (self.number * len(x) / total)
        self.squares = self.squares + np.square(x - mean).sum(axis=0) + between
        self.mean = self.mean + (mean - self.mean) * (len(x) / total)
        self.number = total

    def deviation(self) -> np.ndarray:
        """1 before anything was seen, and where all was equal."""
        variance = self.squares / max(self.number, 1.0)
        return np.sqrt(np.where(variance > 0, variance, 1.0))

    def state(self) -> dict[str, Any]:
        return {"number": self.number, "mean": self.mean, "squares": self.squares}

    def restore(self, state: dict[str, Any]) -> None:
        self.number = float(state["number"])
        self.mean, self.squares = (np.asarray(state[name]) for name in ("mean", "squares"))

    def scaled(self, x: np.ndarray) -> np.ndarray:
        return np.clip((x - self.mean) / self.deviation(), -LIMIT, LIMIT)


class Rollouts:
    """The source of examples: (epoch, params) -> a rollout as rows [T * N], the same one for all
    passes over it.

    Args:
      envs: from `make_envs`.
      act: (params, batch, keys) -> outputs of `ppo.predict`, such as `trainer.predict_step`.
      options: of the rollouts.
      seed: of environments and actions; a key is a function of it, the iteration, the time and the
        environment.
      say: prints a line.
    """

    def __init__(self, envs: VectorEnv, act: Any, options: RolloutOptions, seed: int, say: Any):
        self.envs, self.act, self.options = envs, act, options
        self.seed, self.say = seed, say
        size = spaces_of(envs).size
        self.observed = Moments(size) if options.normalize_observations else None
        self.rewarded = Moments() if options.normalize_rewards else None
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.epoch, self.rollout = -1, dict[str, np.ndarray]()
        self.observation: np.ndarray | None = None  # None: no episode is under way
        self._keys = jax.jit(partial(_keys, steps=options.num_steps, envs=envs.num_envs))

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
        return {name: moments and moments.state() for name, moments in kept.items()} | {
            "recent": list(self.recent),
            "epoch": self.epoch,
            "rollout": {} if over else self.rollout,
        }

    def restore(self, state: dict[str, Any]) -> None:
        for moments, name in ((self.observed, "observed"), (self.rewarded, "rewarded")):
            if moments is not None:
                moments.restore(state[name])
        self.recent.extend(state["recent"])
        self.epoch, self.rollout, self.observation = state["epoch"], state["rollout"], None
        self.say(
            "Gymnasium cannot save its environments: they start anew, with seeds from (seed, "
            "epoch), so the run goes on well but not to the bit as if never interrupted."
        )

    def normalized(self, observation: np.ndarray) -> np.ndarray:
        """Observations as the networks see them, float32."""
        seen = observation if self.observed is None else self.observed.scaled(observation)
        return seen.astype(np.float32)

    def _roll_out(self, epoch: int, params: Any) -> dict[str, np.ndarray]:
        if self.observation is None:
            self._reset(epoch)
        steps = []
        *keys, last = self._keys(self.seed, epoch // self.options.passes)
        for time, key in enumerate(keys):
            steps.append(self._step(params, key, time))
        end = self.act(params, {"observation": self.normalized(self.observation)}, last)
        rollout = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
        return self._rows(rollout, end["value"])

    def _reset(self, epoch: int) -> None:
        seed = int(np.random.default_rng((self.seed, epoch)).integers(2**31))
        observation, _ = self.envs.reset(seed=seed)
        self.observation = self._checked(observation, -1)
        self.ended = np.zeros(self.envs.num_envs, bool)  # by the latest step
        self.returns = np.zeros(self.envs.num_envs)  # of the episodes under way
        self.discounted = np.zeros(self.envs.num_envs)  # sums of rewards so far

    def _step(self, params: Any, key: jax.Array, time: int) -> dict[str, np.ndarray]:
        """One step of all environments."""
        real = ~self.ended
        if self.observed is not None:
            self.observed.update(self.observation[real])
        seen = self.normalized(self.observation)
        out = self.act(params, {"observation": seen}, key)
        action = to_env(out["action"], self.envs.single_action_space)
        observation, reward, terminated, truncated, _ = self.envs.step(action)
        self.observation = self._checked(observation, time)
        terminated, truncated = np.asarray(terminated), np.asarray(truncated)
        self.ended = terminated | truncated
        reward = self._reward(np.asarray(reward, np.float64), real)
        flags = {"real": real, "terminated": terminated, "truncated": truncated}
        return out | flags | {"observation": seen, "reward": reward}

    def _reward(self, reward: np.ndarray, real: np.ndarray) -> np.ndarray:
        """Counts the rewards of a step, and gives them as they are learnt from."""
        self.returns += reward
        if self.rewarded is not None:
            self.discounted = self.discounted * self.options.gamma + reward
            self.rewarded.update(self.discounted[real])
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

    def _checked(self, observation: Any, time: int) -> np.ndarray:
        """Raises a `UserError` where an observation is not finite."""
        observation = np.asarray(observation)
        if not (finite := np.isfinite(observation).all(axis=1)).all():
            env = int(np.argmin(finite))
            when = f"step {time} of a rollout" if time >= 0 else "the reset"
            raise UserError(
                f"Environment {env} gave an observation that is not finite in {when}: "
                f"{observation[env].tolist()}. Mend the environment {self.options.env}."
            )
        return observation


def _keys(seed: Any, iteration: Any, *, steps: int, envs: int) -> list[jax.Array]:
    """The keys [N] of each step and of the value after the last one."""
    key = jax.random.fold_in(jax.random.key(seed), iteration)
    of_steps = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(steps + 1))
    keys = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(envs)))
    return list(keys(of_steps))
