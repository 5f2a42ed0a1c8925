"""Trains an agent by proximal policy optimisation, by default to balance a pole.

python -m algorithms.ppo.train
"""

import dataclasses
from functools import partial
from typing import Annotated

import tyro

from core import Trainer, UserError
from core.errors import at_least
from core.optimizer import AdamWOptions
from core.report import ReportOptions
from core.run import Run, RunOptions, launch

from . import ppo
from .data import STATISTICS, RolloutOptions, Rollouts, seen
from .environments import described, evaluate, make_envs, seed_of, spaces_of
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
    clip_values: bool = False
    """Clip by the same number how far values move."""
    value_weight: float = 0.5
    """Weight of the loss of the values."""
    entropy_weight: float = 0.01
    """Weight of the policy's entropy, which keeps it exploring."""
    episodes: int = 100
    """Episodes to evaluate at the end."""
    optimizer: AdamWOptions = AdamWOptions(1e-3, schedule="linear", eps=1e-5)
    run: Annotated[Options, tyro.conf.arg(name="")] = Options(
        clip_norm=0.5, save_every=1000, report=ReportOptions(log_every=16)
    )

    def __post_init__(self) -> None:
        for name in ("timesteps", "minibatches", "hidden"):
            at_least(self, name, 1)
        for name in ("clip", "value_weight", "entropy_weight", "episodes"):
            at_least(self, name, 0)
        if self.rows % self.minibatches:
            raise UserError(
                f"{self.rollout.num_steps} steps of {self.rollout.num_envs} environments are "
                f"{self.rows} transitions, which do not divide into {self.minibatches} equal "
                "minibatches: change --num-steps, --num-envs or --minibatches."
            )

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
    envs = make_envs(config.rollout.env, config.rollout.num_envs, config.rollout.vectorization)
    spaces = spaces_of(envs)
    run = Run("ppo", config)
    model, init = build(spaces.size, spaces.actions, spaces.discrete, config.hidden)
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
        config.optimizer.build(config.options.steps),
        run.mesh,
        spaces.example(),
        options=config.options,
        overrides=run.overrides,
        summarize=ppo.summarize,
        whole_batch=True,
        folder=run.folder,
        unit="steps",
        show=("mean_return", "entropy"),
    )
    act = trainer.predict_step
    source = Rollouts(envs, act, config.rollout, config.run.seed, run.say)
    result = trainer.fit(source)
    envs.close()
    if source.observed is not None:
        run.write(STATISTICS, source.observed.state())
    if config.episodes:
        # On seeds that training does not use.
        held_out = make_envs(config.rollout.env, config.episodes, config.rollout.vectorization)
        see = partial(seen, moments=source.observed)
        seed = seed_of(config.run.seed, 0, 1)
        result |= {"held_out": evaluate(held_out, act, trainer.state.params, see, seed)}
        held_out.close()
        run.say(f"held out: {described(result['held_out'])}")
    run.finish(result)


if __name__ == "__main__":
    launch(Config, main)
