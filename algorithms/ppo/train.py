"""Trains an agent by proximal policy optimisation, by default to balance a pole.

python -m algorithms.ppo.train
"""

import dataclasses
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from gymnasium.vector import VectorEnv
from jax.sharding import Mesh

from core import Trainer, UserError
from core.errors import at_least
from core.optimizer import AdamWOptions
from core.report import ReportOptions
from core.run import Run, RunOptions, launch

from . import ppo
from .compiled import (
    PREFIX,
    JaxEnv,
    begin,
    evaluate_jax,
    iteration,
    make_jax_env,
    side_by_side,
    stacked,
)
from .data import STATISTICS, Moments, RolloutOptions, Rollouts, seen
from .environments import Spaces, described, evaluate, make_envs, seed_of, spaces_of
from .model import build


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """Those of all scripts, less what follows from the rollouts."""

    epochs: tyro.conf.SuppressFixed[int] = 1
    batch_size: tyro.conf.SuppressFixed[int] = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Train an agent in a Gymnasium environment by proximal policy optimisation."""

    rollout: Annotated[RolloutOptions, tyro.conf.arg(name="")] = RolloutOptions()
    timesteps: int = 150_000
    """Steps of all environments together; whole rollouts, rounded up."""
    minibatches: int = 4
    """Optimizer steps in a pass over a rollout, on equal parts of it."""
    hidden: int = 64
    """Width of the networks."""
    clip: float = 0.2
    """How far the probability of an action may move, as a ratio, before its gain counts no more."""
    clip_values: bool = True
    """Clip by the same number how far values move."""
    value_weight: float = 0.5
    """Weight of the loss of the values."""
    entropy_weight: float = 0.01
    """Weight of the policy's entropy, which keeps it exploring."""
    episodes: int = 100
    """Episodes to evaluate at the end."""
    seeds: int = 1
    """Agents that are trained side by side, from --seed on, in an environment written in JAX."""
    optimizer: AdamWOptions = AdamWOptions(1e-3, schedule="linear", eps=1e-5)
    run: Annotated[Options, tyro.conf.arg(name="")] = Options(
        clip_norm=0.5, save_every=1000, report=ReportOptions(log_every=16)
    )

    def __post_init__(self) -> None:
        for name in ("timesteps", "minibatches", "hidden", "seeds"):
            at_least(self, name, 1)
        for name in ("clip", "value_weight", "entropy_weight", "episodes"):
            at_least(self, name, 0)
        if self.rows % self.minibatches:
            raise UserError(
                f"{self.rollout.num_steps} steps of {self.rollout.num_envs} environments are "
                f"{self.rows} transitions, which do not divide into {self.minibatches} equal "
                "minibatches: change --num-steps, --num-envs or --minibatches."
            )

        if self.seeds > 1 and not self.rollout.env.startswith(PREFIX):
            raise UserError(
                f"--seeds {self.seeds} is for environments written in JAX, such as "
                "gymnax:CartPole-v1: here, train one seed after the other, each with its --seed."
            )

    def envs(self, number: int) -> JaxEnv | VectorEnv:
        """So many environments, stepped together; one in JAX, for any number."""
        if self.rollout.env.startswith(PREFIX):
            return make_jax_env(self.rollout.env)
        return make_envs(self.rollout.env, number, self.rollout.vectorization)

    @property
    def rows(self) -> int:
        """Transitions of a rollout."""
        return self.rollout.num_envs * self.rollout.num_steps

    @property
    def options(self) -> RunOptions:
        """What the trainer is to do, in optimizer steps and rows."""
        steps = -(-self.timesteps // self.rows) * self.rollout.passes * self.minibatches
        batch_size = self.rows // self.minibatches
        return dataclasses.replace(self.run, steps=self.run.steps or steps, batch_size=batch_size)


def main(config: Config) -> None:
    envs = config.envs(config.rollout.num_envs)
    run = Run("ppo", config)
    trainer, init, optimizer = make_trainer(
        config, spaces(envs), run.mesh, overrides=run.overrides, folder=run.folder
    )
    if isinstance(envs, JaxEnv):
        result, moments = fit_compiled(config, trainer, envs, init, optimizer)
    else:
        source = Rollouts(envs, trainer.predict_step, config.rollout, config.run.seed, run.say)
        result, moments = trainer.fit(source), source.observed
        envs.close()
    if moments is not None:
        run.write(STATISTICS, moments._asdict())
    if config.episodes:
        # On seeds that training does not use.
        seed, held_out = seed_of(config.run.seed, 0, 1), config.envs(config.episodes)
        result["held_out"] = played(held_out, trainer, moments, config.episodes, seed)
        run.say(f"held out: {described(result['held_out'])}")
    run.finish(result)


def spaces(envs: JaxEnv | VectorEnv) -> Spaces:
    """What networks must know of these environments."""
    return envs.spaces() if isinstance(envs, JaxEnv) else spaces_of(envs)


def make_trainer(
    config: Config, spaces: Spaces, mesh: Mesh, **more: Any
) -> tuple[Trainer, Any, Any]:
    """The trainer of an agent, and the initialiser and the optimizer that it has."""
    model, init = build(spaces.size, spaces.actions, spaces.discrete, config.hidden)
    optimizer = config.optimizer.build(config.options.steps)
    trainer = Trainer(
        ppo.collate,
        partial(
            ppo.loss,
            model=model,
            clip=config.clip,
            value_weight=config.value_weight,
            entropy_weight=config.entropy_weight,
            clip_values=config.clip_values,
        ),
        partial(ppo.predict, model=model),
        init,
        optimizer,
        mesh,
        spaces.example(),
        options=config.options,
        summarize=ppo.summarize,
        whole_batch=True,
        unit="steps",
        show=("mean_return", "entropy"),
        **more,
    )
    return trainer, init, optimizer


def played(
    envs: JaxEnv | VectorEnv, trainer: Trainer, moments: Moments | None, episodes: int, seed: int
) -> dict[str, float]:
    """What the trainer's agent earns in so many whole episodes; closes the environments."""
    params = trainer.state.params
    if isinstance(envs, JaxEnv):
        return evaluate_jax(envs, trainer.outputs, params, moments, episodes, seed)
    earned = evaluate(envs, trainer.predict_step, params, partial(seen, moments=moments), seed)
    envs.close()
    return earned


def fit_compiled(
    config: Config, trainer: Trainer, env: JaxEnv, init: Any, optimizer: Any
) -> tuple[dict[str, Any], Moments | None]:
    """Trains one agent, or several side by side; returns how it went and the moments they saw."""
    step = partial(iteration, trainer=trainer, env=env, options=config.rollout)
    start = partial(begin, env, config.rollout)
    if config.seeds == 1:
        result = trainer.fit(step=step, extra=jax.jit(start)(config.run.seed))
    else:
        seeds = config.run.seed + jnp.arange(config.seeds)
        trainer.state = stacked(trainer.state, init, optimizer, seeds)
        extra = jax.jit(jax.vmap(start))(seeds)
        result = trainer.fit(step=side_by_side(step), extra=extra)
    return result, trainer.extra.get("observed")


if __name__ == "__main__":
    launch(Config, main)
