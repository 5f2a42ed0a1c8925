"""Gymnasium environments: how they are stepped together, what networks must know, whole episodes.

Environments reset themselves in the step after an episode's last one: the action of that step is
ignored, and what it starts from is the final observation.
"""

import dataclasses
import multiprocessing
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

from core import UserError

MODES = {"auto": None, "vector": "vector_entry_point", "sync": "sync", "async": "async"}

# (params, batch, keys) -> outputs of `ppo.predict`, such as `trainer.predict_step`.
Act = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Spaces:
    """What networks must know of an environment."""

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
    # Processes are started afresh: a fork of one that has JAX's threads may hang.
    processes = vectorization == "async"
    more: Any = {"context": "spawn"} if processes else None
    wrappers: Any = [_undisturbed] if processes else None
    try:
        envs = gymnasium.make_vec(env, num_envs, MODES[vectorization], more, wrappers)
    except (gymnasium.error.Error, ImportError) as error:
        raise _cannot_be_made(env, error, f" with vectorization {vectorization}") from error
    if envs.metadata.get("autoreset_mode") == AutoresetMode.NEXT_STEP:
        return envs
    envs.close()
    if vectorization == "auto":
        return make_envs(env, num_envs, "sync")
    raise UserError(
        f"The vector version of {env!r} does not reset environments in the step after an episode "
        "ends, as it must: use vectorization sync."
    )


def _undisturbed(env: gymnasium.Env) -> gymnasium.Env:
    """Lets the process of an environment live on at Ctrl-C, which reaches it too.

    The run then ends as it should, and its environments with it.
    """
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return env


def make_env(env: str, render_mode: str | None = None) -> gymnasium.Env:
    """A single environment; raises a `UserError` like `make_envs`."""
    try:
        return gymnasium.make(env, render_mode=render_mode)
    except (gymnasium.error.Error, ImportError) as error:
        raise _cannot_be_made(env, error, "") from error


def _cannot_be_made(env: str, error: Exception, how: str) -> UserError:
    return UserError(
        f"The environment {env!r} cannot be made{how} ({str(error).rstrip('.')}). Give an id that "
        "Gymnasium has registered, such as CartPole-v1, or MODULE:ID where a module registers it; "
        "vectorization auto fits any environment."
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


def checked(observation: Any, time: int) -> np.ndarray:
    """Observations [N, O]; raises a `UserError` where one is not finite."""
    observation = np.asarray(observation)
    if not np.isfinite(observation).all():
        env = int(np.argmin(np.isfinite(observation).all(axis=1)))
        when = f"in step {time}" if time else "from its reset"
        raise UserError(
            f"Environment {env} gave an observation that is not finite {when}: "
            f"{observation[env].tolist()}. Mend the environment."
        )
    return observation


def seed_of(*numbers: int) -> int:
    """A seed for environments, which take one number."""
    return int(np.random.default_rng(numbers).integers(2**31))


def evaluate(
    envs: VectorEnv, act: Act, params: Any, see: Callable[[np.ndarray], np.ndarray], seed: int
) -> dict[str, float]:
    """Mean and deviation of the returns of whole episodes, the first one of each environment.

    (Of many in each, those that end first would be the short ones.)

    Args:
      see: observations as the environments give them -> as the networks see them.
      seed: of the environments and of the actions.
    """
    keys = jax.jit(partial(_key_data, seed, envs.num_envs))
    observation, _ = envs.reset(seed=seed)
    returns, going, time = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool), 0
    while going.any():
        seen = see(checked(observation, time))
        out = act(params, {"observation": seen}, np.asarray(keys(time)))
        action = to_env(out["action"], envs.single_action_space)
        observation, reward, terminated, truncated, _ = envs.step(action)
        returns += np.where(going, np.asarray(reward), 0)
        going &= ~(np.asarray(terminated) | np.asarray(truncated))
        time += 1
    return {
        "episodes": envs.num_envs,
        "mean_return": float(returns.mean()),
        "deviation": float(returns.std()),
    }


def described(played: dict[str, float]) -> str:
    """What `evaluate` returned, for people."""
    return "{episodes} episodes, mean return {mean_return:.2f} +- {deviation:.2f}".format(**played)


def _key_data(seed: int, number: int, time: Any) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), time)
    return jax.random.key_data(jax.random.split(key, number))
