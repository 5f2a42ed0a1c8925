"""Steps of the environment per second, against stable-baselines3 on the same settings, CartPole-v1.

    python -m benchmarks.ppo        (needs stable-baselines3, torch and gymnax: see requirements/)

Both train with the script's settings, on one core; compilation and first rollouts are left out.
They take turns, so that a machine which is slower for a while is so for both; medians of the
ratios are shown. The compiled path runs gymnax's CartPole. The aims: 2.5 times with 4
environments, 4 times with 64, and 200,000 steps a second compiled, on a core where stable-
baselines3 makes 9,600 with 4 environments: 21 times as many.
"""

import dataclasses
import os
import time
from functools import partial
from statistics import median

import jax
import tyro

from algorithms.ppo import compiled, train
from algorithms.ppo.data import RolloutOptions, Rollouts
from core import make_mesh
from core.report import ReportOptions

ENV = "CartPole-v1"
AIMS = {4: 2.5, 64: 4.0}


@dataclasses.dataclass(frozen=True)
class Config:
    """PPO's speed beside stable-baselines3's."""

    rounds: int = 5
    """Turns of each."""
    rollouts: int = 40
    """Rollouts in a turn with 4 environments."""


class Ours:
    """Trains so many rollouts at a time, and measures where the time goes."""

    def __init__(self, num_envs: int, in_jax: bool = False):
        self.options = RolloutOptions(compiled.PREFIX * in_jax + ENV, num_envs=num_envs)
        self.in_jax = in_jax
        self.envs = self.config(1).envs(num_envs)
        self.seconds = {"environments": 0.0, "policy": 0.0}

    def config(self, rollouts: int) -> train.Config:
        """Of a run of so many rollouts."""
        quiet = ReportOptions(log_every=10**6, quiet=True)
        options = dataclasses.replace(train.Config().run, report=quiet)
        steps = rollouts * self.options.num_envs * self.options.num_steps
        return train.Config(self.options, timesteps=steps, run=options)

    def timed(self, name: str, call):
        def measured(*args):
            began = time.perf_counter()
            out = call(*args)
            self.seconds[name] += time.perf_counter() - began
            return out

        return measured

    def speed(self, rollouts: int) -> float:
        """Steps per second of so many rollouts; two more before them compile, and do not count."""
        config, marks = self.config(rollouts + 2), []
        trainer, *_ = train.make_trainer(config, train.spaces(self.envs), make_mesh())
        if not self.in_jax:
            act = self.timed("policy", trainer.predict_step)
            source = Rollouts(self.envs, act, self.options, 0, print)
            step = self.envs.step
            self.envs.step = self.timed("environments", step)

            def marked(epoch, params):
                jax.block_until_ready(params)
                if epoch == 2 * self.options.passes:
                    self.seconds = dict.fromkeys(self.seconds, 0.0)
                    marks.append(time.perf_counter())
                return source(epoch, params)

            trainer.fit(marked)
            self.envs.step = step
        else:
            iteration = partial(
                compiled.iteration, trainer=trainer, env=self.envs, options=self.options
            )
            extra = jax.jit(partial(compiled.begin, self.envs, self.options))(0)
            run = jax.jit(iteration, donate_argnums=0)
            carry = (trainer.state, extra)
            for number in range(rollouts + 2):
                if number == 2:
                    marks.append(time.perf_counter())
                carry, metrics = run(carry)
                jax.block_until_ready(metrics)
        self.total = time.perf_counter() - marks[0]
        return rollouts * self.options.num_steps * self.options.num_envs / self.total


class Theirs:
    def __init__(self, num_envs: int):
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env

        self.rollout = 128 * num_envs
        self.model = PPO(
            "MlpPolicy",
            make_vec_env(ENV, n_envs=num_envs),
            n_steps=128,
            batch_size=self.rollout // 4,
            n_epochs=4,
            learning_rate=1e-3,
            ent_coef=0.01,
            clip_range_vf=0.2,
            device="cpu",
        )
        self.model.learn(2 * self.rollout)

    def speed(self, rollouts: int) -> float:
        began = time.perf_counter()
        self.model.learn(rollouts * self.rollout)
        return rollouts * self.rollout / (time.perf_counter() - began)


def main(config: Config) -> None:
    # Before any library starts its threads, so that none has more of them than another.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    speeds = {}
    for num_envs, aim in AIMS.items():
        ours, theirs = Ours(num_envs), Theirs(num_envs)
        rollouts = max(4, config.rollouts * 4 // num_envs)
        turns = [(ours.speed(rollouts), theirs.speed(rollouts)) for _ in range(config.rounds)]
        ratios = [one / other for one, other in turns]
        speeds[num_envs] = median(other for _, other in turns)
        shares = {name: seconds / ours.total for name, seconds in ours.seconds.items()}
        shares["updates and the rest"] = 1 - sum(shares.values())
        print(
            f"{num_envs} environments: {median(one for one, _ in turns):,.0f} steps/s, "
            f"stable-baselines3 {speeds[num_envs]:,.0f}: {median(ratios):.2f} times "
            f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}; the aim is {aim})"
        )
        print("  " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    ours = Ours(4, in_jax=True)
    found = [ours.speed(10 * config.rollouts) for _ in range(config.rounds)]
    print(
        f"compiled, 4 environments: {median(found):,.0f} steps/s, "
        f"{median(found) / speeds[4]:.1f} times stable-baselines3 (the aim is 200,000)"
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
