"""Tiny environments that must be learnt, each for a property that a mistake would break."""

import functools
from functools import partial

import jax
import numpy as np
import pytest

from algorithms.ppo import ppo
from algorithms.ppo.data import RolloutOptions, Rollouts, seen
from algorithms.ppo.environments import evaluate, make_envs, spaces_of
from algorithms.ppo.model import build
from core import MeshOptions, Trainer, TrainOptions, make_mesh
from core.optimizer import AdamWOptions
from core.report import ReportOptions
from tests.algorithms.ppo import tiny  # noqa: F401 (registers)


@functools.cache
def networks(spaces):
    """A model and new parameters, compiled once for all tests."""
    model, init = build(spaces.size, spaces.actions, spaces.discrete, 16)
    return model, jax.device_get(jax.jit(init)(jax.random.key(0)))


def made(env, iterations, batch_size=32, seed=0, folder=None, kind=Rollouts, **options):
    """A trainer for so many rollouts, and its source."""
    options = RolloutOptions(**{"env": env, "num_steps": 32, "gamma": 0.9} | options)
    envs = make_envs(env, options.num_envs)
    spaces = spaces_of(envs)
    model, params = networks(spaces)
    batches = options.num_envs * options.num_steps // batch_size
    steps = iterations * options.passes * batches
    trainer = Trainer(
        ppo.collate,
        partial(ppo.loss, model=model, clip=0.2, value_weight=0.5, entropy_weight=0.0),
        partial(ppo.predict, model=model),
        params,
        AdamWOptions(1e-2, schedule="linear", eps=1e-5).build(steps),
        make_mesh(MeshOptions(), jax.devices()[:1]),
        spaces.example(),
        options=TrainOptions(
            steps=steps,
            batch_size=batch_size,
            seed=seed,
            clip_norm=0.5,
            report=ReportOptions(quiet=True),
        ),
        summarize=ppo.summarize,
        whole_batch=True,
        folder=folder,
    )
    return trainer, kind(envs, trainer.predict_step, options, seed, print)


def trained(*args, **options):
    """A trainer and its source, and what `fit` returned."""
    trainer, source = made(*args, **options)
    return trainer, source, trainer.fit(source)


def held_out(trainer, source, episodes=50):
    see = partial(seen, moments=source.observed)
    envs = make_envs(source.options.env, episodes)
    return evaluate(envs, trainer.predict_step, trainer.state.params, see, 1)["mean_return"]


def test_an_action_is_learnt_from_the_reward_that_only_the_last_one_earns():
    assert held_out(*trained("TinyLast-v0", 12)[:2]) > 0.9


def test_large_observations_in_double_precision_are_learnt_from_where_they_are_normalised():
    assert held_out(*trained("TinyLarge-v0", 12, normalize_observations=True)[:2]) > 0.9


def test_an_end_by_both_flags_is_learnt_as_an_end():
    assert held_out(*trained("TinyBoth-v0", 16)[:2]) > 1.4


def test_a_constant_reward_has_a_defined_result():
    _, source, result = trained("TinyConstant-v0", 2, normalize_rewards=True)
    assert result["train"]["mean_return"] == 3
    assert np.isfinite([result["train"][name] for name in ("loss", "grad_norm", "entropy")]).all()


def test_minibatches_of_one_and_open_actions_have_a_defined_result():
    _, _, result = trained("TinyOpen-v0", 1, batch_size=1, num_envs=1, num_steps=8)
    assert result["train"]["policy_loss"] == 0 and np.isfinite(result["train"]["loss"])


def test_the_same_seed_gives_the_same_curve():
    ends = [trained("CartPole-v1", 2, seed=5) for _ in range(2)]
    assert ends[0][2]["train"] == ends[1][2]["train"]
    for a, b in zip(*(jax.tree.leaves(end[0].state.params) for end in ends), strict=True):
        np.testing.assert_array_equal(a, b)


class Recorded(Rollouts):
    """Remembers what it gave, and fails in an epoch."""

    fails_in = 6

    def __call__(self, epoch, params):
        self.given = getattr(self, "given", {}) | {epoch: super().__call__(epoch, params)}
        if epoch == self.fails_in:
            raise KeyboardInterrupt
        return self.given[epoch]


def test_a_run_that_is_interrupted_within_a_rollout_goes_on_with_it(tmp_path, capsys):
    trainer, source = made("TinyLast-v0", 3, folder=tmp_path, kind=Recorded)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(source)
    trainer, again = made("TinyLast-v0", 3, folder=tmp_path, kind=Recorded)
    again.fails_in = None
    assert trainer.fit(again)["steps"] == 48
    assert "cannot save its environments" in capsys.readouterr().out
    assert list(again.given) == [6, 7, 8, 9, 10, 11]
    for name, array in source.given[6].items():
        np.testing.assert_array_equal(again.given[7][name], array)
    assert not np.array_equal(again.given[8]["observation"], again.given[7]["observation"])
