"""Environments written in JAX: a rollout and all passes over it, compiled as one function.

They have gymnax's interface, reset themselves within the step that ends an episode, and tell its
final observation: no action is ignored, and an episode that was cut short goes on with that.

Shapes: T time steps, N environments, O size of an observation, S agents side by side.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from core import Trainer, UserError
from core.step import INIT, TrainState, stream

from .data import LIMIT, RECENT, ROLLOUTS, Moments, RolloutOptions, seen
from .environments import Spaces
from .ppo import gae

PREFIX = "gymnax:"  # of the ids of such environments
START = np.iinfo(np.uint32).max  # in place of the number of an iteration


@dataclasses.dataclass(frozen=True)
class JaxEnv:
    """An environment of gymnax's interface with its parameters, for so many at once."""

    env: Any
    params: Any

    def reset(self, keys: jax.Array) -> tuple[jax.Array, Any]:
        """(observations [N, O], states)."""
        return jax.vmap(self.env.reset, (0, None))(keys, self.params)

    def step(self, keys: jax.Array, states: Any, actions: jax.Array) -> tuple[Any, ...]:
        """(observations, states, rewards, terminated, truncated, info), each [N, ...]."""
        space = self.env.action_space(self.params)
        if not hasattr(space, "n"):
            actions = jnp.clip(actions, space.low, space.high).astype(space.dtype)
        return jax.vmap(self.env.step, (0, 0, 0, None))(keys, states, actions, self.params)

    def spaces(self) -> Spaces:
        """Raises a `UserError` where the networks cannot see or act in it."""
        seen, acts = (
            space(self.params) for space in (self.env.observation_space, self.env.action_space)
        )
        discrete = hasattr(acts, "n")
        if len(getattr(seen, "shape", ())) != 1 or not (discrete or len(acts.shape) == 1):
            raise UserError(
                f"The observation space {seen} or the action space {acts} is not supported: "
                "observations must be vectors, actions numbered or vectors."
            )
        return Spaces(seen.shape[0], int(acts.n) if discrete else acts.shape[0], discrete)


def make_jax_env(env: str) -> JaxEnv:
    """The environment of this id, "gymnax:..."; raises a `UserError` where there is none."""
    try:
        import gymnax  # an extra

        return JaxEnv(*gymnax.make(env.removeprefix(PREFIX)))
    except ImportError as error:
        raise UserError(
            f"{env} needs gymnax ({error}): pip install --no-deps gymnax==1.0.1 six seaborn "
            "(without dependencies, since it asks for an older Gymnasium, which it does not need)."
        ) from error
    except ValueError as error:
        raise UserError(f"The environment {env} cannot be made ({error}).") from error


def begin(env: JaxEnv, options: RolloutOptions, seed: Any) -> dict[str, Any]:
    """What an agent carries from one iteration to the next, besides the state of the trainer."""
    keys = jax.random.split(jax.random.fold_in(stream(seed, ROLLOUTS), START), options.num_envs)
    observation, states = env.reset(keys)
    zeros = jnp.zeros(options.num_envs)
    extra = {
        "seed": jnp.int32(seed),
        "env": states,
        "observation": observation,
        "returns": zeros,  # of the episodes under way
        "recent": jnp.full(RECENT, jnp.nan),  # of the latest ones, NaN while there are fewer
    }
    if options.normalize_observations:
        zero = jnp.zeros(observation.shape[1:])
        extra["observed"] = Moments(jnp.zeros(()), zero, zero)
    if options.normalize_rewards:
        extra |= {"rewarded": Moments(*[jnp.zeros(())] * 3), "discounted": zeros}
    # An array of a type that is only weakly known would become another one in the first step.
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), extra)


def iteration(carry: Any, *, trainer: Trainer, env: JaxEnv, options: RolloutOptions) -> Any:
    """One rollout and all passes over it, as `Trainer.fit` takes a step: carry -> carry, metrics.

    The order of the rows, like all else that is random, is a function of the seed and of how many
    optimizer steps were done.
    """
    state, extra = carry
    size = trainer.options.batch_size
    minibatches = options.num_steps * options.num_envs // size
    done = state.step // (options.passes * minibatches)
    key, order_key = jax.random.split(jax.random.fold_in(stream(extra["seed"], ROLLOUTS), done))
    extra, rollout = _roll_out(state.params, extra, key, trainer, env, options)

    def update(state: TrainState, rows: jax.Array) -> Any:
        batch = {name: x[rows][None] for name, x in rollout.items()}
        batch["row_mask"] = jnp.ones((1, size), bool)
        if trainer.layout.width == size:  # the devices divide it
            batch = jax.lax.with_sharding_constraint(batch, trainer.layout.sharding)
        return trainer.step(state, batch)

    order = partial(jax.random.permutation, x=minibatches * size)
    orders = jax.vmap(order)(jax.random.split(order_key, options.passes)).reshape(-1, size)
    state, metrics = jax.lax.scan(update, state, orders)
    rate = {"learning_rate": metrics.pop("learning_rate")[-1]}
    del metrics["first_bad"], metrics["skipped"]  # the core reads them in the state
    return (state, extra), jax.tree.map(jnp.mean, metrics) | rate


def _roll_out(
    params: Any,
    extra: dict[str, Any],
    key: jax.Array,
    trainer: Trainer,
    env: JaxEnv,
    options: RolloutOptions,
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """What to carry on, and the rows [T * N, ...] of a rollout."""
    times, envs = options.num_steps, options.num_envs
    agent = partial(_agent, trainer, params)

    def step(extra: dict[str, Any], keys: jax.Array) -> Any:
        if options.normalize_observations:
            extra |= {"observed": extra["observed"].added(extra["observation"])}
        observed = extra.get("observed")
        observation = seen(extra["observation"], observed)
        out = agent(observation, keys[0])
        following, states, *told = env.step(keys[1], extra["env"], out["action"])
        reward, terminated, truncated, info = told
        ended, returns = terminated | truncated, extra["returns"] + reward
        if options.normalize_rewards:
            discounted = extra["discounted"] * options.gamma + reward
            rewarded = extra["rewarded"].added(discounted)
            reward = jnp.clip(reward / rewarded.deviation(), -LIMIT, LIMIT)
            extra |= {"rewarded": rewarded, "discounted": jnp.where(ended, 0, discounted)}
        extra |= {"observation": following, "env": states, "returns": jnp.where(ended, 0, returns)}
        more = {"reward": reward, "terminated": terminated, "truncated": truncated}
        final = seen(info["final_observation"], observed)
        episode = jnp.where(ended, returns, jnp.nan)
        return extra, out | more | {"observation": observation, "final": final, "episode": episode}

    extra, rollout = jax.lax.scan(step, extra, jax.random.split(key, (times, 2, envs)))
    extra["recent"] = _latest(extra["recent"], rollout.pop("episode").reshape(-1))
    final = rollout.pop("final")
    next_values = agent(final.reshape(times * envs, -1), jax.random.split(key, times * envs))
    reward, *ends = (rollout.pop(name) for name in ("reward", "terminated", "truncated"))
    advantage = gae(
        reward,
        rollout["value"],
        next_values["value"].reshape(times, envs),
        *ends,
        gamma=options.gamma,
        decay=options.gae_lambda,
    )
    rows = rollout | {
        "advantage": advantage,
        "target": advantage + rollout["value"],
        "weight": jnp.full((times, envs), 1 / options.passes),
        "mean_return": jnp.full((times, envs), jnp.nanmean(extra["recent"])),
    }
    return extra, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)


def _agent(trainer: Trainer, params: Any, observation: jax.Array, keys: jax.Array) -> Any:
    mask = jnp.ones(len(observation), bool)
    return trainer.outputs(params, {"observation": observation, "row_mask": mask}, keys)


def _latest(recent: jax.Array, episodes: jax.Array) -> jax.Array:
    """The latest returns that are not NaN, as many as `recent` has, in order of time."""
    returns = jnp.concatenate([recent, episodes])
    real = ~jnp.isnan(returns)
    place = jnp.cumsum(real) - jnp.sum(real) - 1  # from the end, -1 the latest
    place = jnp.where(real & (place >= -len(recent)), place + len(recent), len(recent))
    return jnp.full_like(recent, jnp.nan).at[place].set(returns, mode="drop")


def stacked(state: TrainState, init: Any, optimizer: Any, seeds: jax.Array) -> TrainState:
    """The state before the first step of an agent for each seed [S], along a first axis."""

    def one(seed: jax.Array) -> TrainState:
        params = init(stream(seed, INIT))
        return dataclasses.replace(state, params=params, opt_state=optimizer.init(params))

    return jax.jit(jax.vmap(one), out_shardings=state.step.sharding)(seeds)


def side_by_side(step: Any) -> Any:
    """An iteration of agents along a first axis: means of their metrics, and the deviations."""

    def all_of_them(carry: Any) -> Any:
        carry, metrics = jax.vmap(step)(carry)
        weight = jnp.sum(metrics.pop("weight"))
        means = {name: jnp.mean(x) for name, x in metrics.items()}
        deviations = {f"{name}_deviation": jnp.std(x) for name, x in metrics.items()}
        return carry, means | deviations | {"weight": weight}

    return all_of_them


def evaluate_jax(
    env: JaxEnv, act: Any, params: Any, moments: Moments | None, episodes: int, seed: int
) -> dict[str, float]:
    """As `evaluate`; of agents side by side also the "deviation_of_agents", of their means.

    Args:
      act: (params, batch, keys) -> outputs of `ppo.predict`, such as `trainer.outputs`.
      params: of an agent, or of several along a first axis.
      moments: of the observations, used as they are.
      seed: of the environments and of the actions.
    """

    def play(params: Any, moments: Moments | None) -> jax.Array:
        def going_on(at: Any) -> jax.Array:
            return jnp.any(at["going"])

        def step(at: Any) -> Any:
            key = jax.random.fold_in(jax.random.key(seed), at["time"])
            keys = jax.random.split(key, (2, episodes))
            batch = {"observation": seen(at["observation"], moments), "row_mask": at["going"]}
            action = act(params, batch, keys[0])["action"]
            observation, states, reward, *ends, _ = env.step(keys[1], at["states"], action)
            return {
                "observation": observation,
                "states": states,
                "time": at["time"] + 1,
                "returns": at["returns"] + jnp.where(at["going"], reward, 0),
                "going": at["going"] & ~(ends[0] | ends[1]),
            }

        observation, states = env.reset(jax.random.split(jax.random.key(seed), episodes))
        at = {"observation": observation, "states": states, "time": jnp.int32(0)}
        at |= {"returns": jnp.zeros(episodes), "going": jnp.ones(episodes, bool)}
        returns: jax.Array = jax.lax.while_loop(going_on, step, at)["returns"]
        return returns

    several = jax.tree.leaves(params)[0].ndim > 1
    returns = np.asarray(jax.jit(jax.vmap(play) if several else play)(params, moments))
    played = {"episodes": returns.size, "mean_return": returns.mean(), "deviation": returns.std()}
    return played | ({"deviation_of_agents": returns.mean(axis=1).std()} if several else {})
