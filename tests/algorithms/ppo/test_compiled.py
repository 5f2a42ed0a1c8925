"""Environments in JAX: the rollout by hand, what is learnt, and what does not change it."""

import dataclasses
import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms.ppo import compiled, play, ppo, train
from algorithms.ppo.compiled import JaxEnv, begin, evaluate_jax, iteration, side_by_side, stacked
from algorithms.ppo.data import RolloutOptions
from algorithms.ppo.model import build
from core import MeshOptions, Trainer, TrainOptions, UserError, make_mesh
from core.optimizer import AdamWOptions
from core.report import ReportOptions
from tests.core.test_resume import bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    time: jax.Array


class Steps:
    """Of gymnax's interface: so many steps, of which only the last earns, the action's number.

    Terminates, or is cut short where `cut`. Observes the time, as a share of the episode.
    """

    length = 3

    def __init__(self, cut=False):
        self.cut = cut

    def reset(self, key, params):
        del params
        return jnp.zeros(1), State(jnp.int32(0))

    def step(self, key, state, action, params):
        reward = jnp.where(state.time == self.length - 1, action, 0) + 0.0
        new = State(state.time + 1)
        over, seen = new.time == self.length, new.time[None] / self.length
        observation, fresh = self.reset(key, params)
        state = jax.tree.map(lambda a, b: jnp.where(over, a, b), fresh, new)
        ends = (over & (not self.cut), over & self.cut)
        info = {"final_observation": seen}
        return jnp.where(over, observation, seen), state, reward, *ends, info

    def action_space(self, params):
        return types.SimpleNamespace(n=2, shape=())

    def observation_space(self, params):
        return types.SimpleNamespace(shape=(1,))


class Aim(Steps):
    """The same, for a continuous action, which earns the more the closer to 0.5 it is."""

    def step(self, key, state, action, params):
        return super().step(key, state, 1 - jnp.abs(action[0] - 0.5), params)

    def action_space(self, params):
        return types.SimpleNamespace(low=-1.0, high=1.0, shape=(1,), dtype=jnp.float32)


def made(env=None, iterations=8, devices=1, folder=None, seed=0, **options):
    """A trainer, its environment, its options and its first parameters."""
    env = JaxEnv(env or Steps(), None)
    options = RolloutOptions(**{"num_steps": 16, "gamma": 0.9} | options)
    spaces = env.spaces()
    model, make = build(spaces.size, spaces.actions, spaces.discrete, 16)

    def init(key):
        return jax.tree.map(lambda x: x.astype(float), make(key))

    steps = iterations * options.passes * 4
    optimizer = AdamWOptions(2e-2, schedule="linear", eps=1e-5).build(steps)
    trainer = Trainer(
        ppo.collate,
        partial(ppo.loss, model=model, clip=0.2, value_weight=0.5, entropy_weight=0.0),
        partial(ppo.predict, model=model),
        init,
        optimizer,
        make_mesh(MeshOptions(), jax.devices()[:devices]),
        spaces.example(),
        options=TrainOptions(
            steps=steps,
            batch_size=options.num_steps * options.num_envs // 4,
            clip_norm=0.5,
            seed=seed,
            save_every=16,
            report=ReportOptions(log_every=1, quiet=True),
        ),
        summarize=ppo.summarize,
        whole_batch=True,
        folder=folder,
    )
    return types.SimpleNamespace(
        trainer=trainer, env=env, options=options, init=init, opt=optimizer
    )


def fitted(one, seed=0):
    step = partial(iteration, trainer=one.trainer, env=one.env, options=one.options)
    return one.trainer.fit(step=step, extra=begin(one.env, one.options, seed))


def rolled(one):
    """What is carried on after a rollout of the first parameters, and its rows."""
    params, options = one.trainer.state.params, one.options
    roll_out = partial(compiled._roll_out, trainer=one.trainer, env=one.env, options=options)
    return jax.jit(roll_out)(params, begin(one.env, options, 0), jax.random.key(1))


@pytest.mark.parametrize("cut", [False, True])
def test_a_rollout_is_the_one_worked_by_hand(cut):
    one = made(Steps(cut), num_steps=4, num_envs=2, gamma=0.5, gae_lambda=0.5)
    params, (extra, rows) = one.trainer.state.params, rolled(one)
    by_time = {name: np.asarray(x).reshape(4, 2, *x.shape[1:]) for name, x in rows.items()}
    np.testing.assert_allclose(by_time["observation"][:, 0, 0], [0, 1 / 3, 2 / 3, 0], rtol=1e-6)

    def value(seen):
        batch = {"observation": jnp.full((1, 1), seen), "row_mask": jnp.ones(1, bool)}
        out = one.trainer.outputs(params, batch, jax.random.split(jax.random.key(0), 1))
        return float(out["value"][0])

    v = [value(t / 3) for t in range(4)]
    np.testing.assert_allclose(by_time["value"][:, 1], [*v[:3], v[0]], rtol=1e-5)
    for env in range(2):
        earned = float(by_time["action"][2, env])
        last = earned + (0.5 * v[3] if cut else 0) - v[2]
        second = 0.5 * v[2] - v[1] + 0.25 * last
        first = 0.5 * v[1] - v[0] + 0.25 * second
        # The fourth starts the next episode, and is followed by the value of what comes.
        wanted = [first, second, last, 0.5 * v[1] - v[0]]
        np.testing.assert_allclose(by_time["advantage"][:, env], wanted, rtol=1e-4, atol=1e-6)
        assert extra["recent"][-2 + env] == earned
    np.testing.assert_allclose(rows["target"], rows["advantage"] + rows["value"], rtol=1e-6)
    assert np.isnan(extra["recent"][:-2]).all()
    assert (rows["weight"] == 1 / one.options.passes).all()


def test_log_probabilities_are_those_of_the_policy_that_acted():
    one = made()
    rows = rolled(one)[1] | {"row_mask": np.ones(64, bool)}
    out = one.trainer.loss(one.trainer.state.params, rows, None)
    np.testing.assert_allclose(out.metrics["approx_kl"], 0, atol=1e-6)


def test_the_latest_returns_are_kept_in_order():
    recent = jnp.asarray([np.nan, 1, 2])
    latest = compiled._latest(recent, jnp.asarray([np.nan, 3, np.nan]))
    np.testing.assert_array_equal(latest, [1, 2, 3])
    latest = compiled._latest(recent, jnp.asarray([np.nan, np.nan]))
    np.testing.assert_array_equal(latest, [np.nan, 1, 2])
    latest = compiled._latest(recent, jnp.arange(5.0))
    np.testing.assert_array_equal(latest, [2, 3, 4])


@pytest.mark.parametrize("env", [Steps(), Aim()], ids=["numbered", "continuous"])
def test_the_last_action_is_learnt(env):
    one = made(env, iterations=16)
    result = fitted(one)
    assert result["train"]["mean_return"] > 0.7
    params, act = one.trainer.state.params, one.trainer.outputs
    played = evaluate_jax(one.env, act, params, None, 64, 3)
    assert played["episodes"] == 64 and played["mean_return"] > 0.75
    assert result["train"]["weight"] == 16 / 4


def test_actions_stay_in_their_space():
    env = JaxEnv(Aim(), None)
    keys = jax.random.split(jax.random.key(0), 2)
    _, states = env.reset(keys)
    for _ in range(2):
        _, states, *_ = env.step(keys, states, jnp.zeros((2, 1)))
    _, _, reward, *_ = env.step(keys, states, jnp.full((2, 1), 9.0))
    np.testing.assert_allclose(reward, 0.5)


def test_normalisation_sees_what_the_networks_see_less_the_mean():
    one = made(iterations=2, normalize_observations=True, normalize_rewards=True)
    fitted(one)
    observed, rewarded = (one.trainer.extra[name] for name in ("observed", "rewarded"))
    assert observed.number == rewarded.number == 2 * 16 * 4
    np.testing.assert_allclose(observed.mean, (np.arange(32) % 3 / 3).mean(), rtol=1e-5)
    np.testing.assert_allclose(observed.deviation(), (np.arange(32) % 3 / 3).std(), rtol=1e-5)


def test_a_run_that_was_interrupted_ends_to_the_bit_as_if_not(tmp_path):
    whole = made(normalize_rewards=True)
    result = fitted(whole)
    one = made(folder=tmp_path, normalize_rewards=True)
    figures, count = one.trainer.figures, 0

    def counted(metrics):
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return figures(metrics)

    one.trainer.figures = counted
    with pytest.raises(KeyboardInterrupt):
        fitted(one)
    again = made(folder=tmp_path, normalize_rewards=True)
    ended = fitted(again)
    carried = [bits((one.trainer.state, one.trainer.extra)) for one in (again, whole)]
    assert carried[0] == carried[1]
    assert ended["train"]["loss"] == result["train"]["loss"]


def test_one_device_equals_eight(x64):
    ends = [made(iterations=2, devices=devices) for devices in (1, 8)]
    for one in ends:
        fitted(one)
    assert ends[1].trainer.layout.width == 16, "rows are split"
    for a, b in zip(*(jax.tree.leaves(one.trainer.state.params) for one in ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_all_that_is_random_depends_on_the_seed_and_on_the_step():
    one = made(iterations=1)
    step = partial(iteration, trainer=one.trainer, env=one.env, options=one.options)
    step, state = jax.jit(step), one.trainer.state
    later = dataclasses.replace(state, step=state.step + 16)
    extras = [begin(one.env, one.options, seed) for seed in (0, 1)]
    cases = [(state, extras[0]), (state, extras[0]), (state, extras[1]), (later, extras[0])]
    losses = [float(step(case)[1]["loss"]) for case in cases]
    assert losses[0] == losses[1] and len(set(losses)) == 3


def test_agents_side_by_side_are_those_that_are_trained_alone(x64):
    seeds = jnp.arange(2) + 4
    one = made(iterations=2)
    one.trainer.state = stacked(one.trainer.state, one.init, one.opt, seeds)
    step = partial(iteration, trainer=one.trainer, env=one.env, options=one.options)
    extra = jax.vmap(partial(begin, one.env, one.options))(seeds)
    result = one.trainer.fit(step=side_by_side(step), extra=extra)
    alone = made(iterations=2, seed=5)
    second = fitted(alone, 5)["train"]["loss"]
    for a, b in zip(*map(jax.tree.leaves, (one.trainer.state, alone.trainer.state)), strict=True):
        np.testing.assert_allclose(a[1], b, rtol=1e-9, atol=1e-12)
    mean, deviation = (result["train"][name] for name in ("loss", "loss_deviation"))
    assert abs(mean - second) == pytest.approx(deviation, rel=1e-6), "as of two it must be"
    assert deviation > 0
    assert result["train"]["weight"] == 2 * 16 / 4, "steps of all environments"


@pytest.fixture
def gymnax(monkeypatch):
    def make(env):
        if env != "Steps-v0":
            raise ValueError(f"{env} is not registered")
        return Steps(), None

    monkeypatch.setitem(sys.modules, "gymnax", types.SimpleNamespace(make=make))


SMALL = train.Config(
    RolloutOptions("gymnax:Steps-v0", num_steps=16),
    timesteps=256,
    hidden=8,
    episodes=4,
    seeds=2,
)


def config(folder, **change):
    run = dataclasses.replace(SMALL.run, folder=str(folder))
    return dataclasses.replace(SMALL, run=run, **change)


def test_the_scripts_train_and_play(tmp_path, gymnax, capsys):
    normalized = dataclasses.replace(SMALL.rollout, normalize_observations=True)
    train.main(config(tmp_path, rollout=normalized))
    assert "held out: 8 episodes, mean return" in capsys.readouterr().out
    for file in ("curves.png", "summary.json", "statistics.json"):
        assert (tmp_path / file).exists()
    play.main(play.Config(str(tmp_path), episodes=3, gif="", agent=1))
    assert "3 episodes, mean return" in capsys.readouterr().out
    with pytest.raises(UserError, match="agent 2 is not in the run: it has 0 to 1"):
        play.main(play.Config(str(tmp_path), episodes=3, gif="", agent=2))


@pytest.mark.heavy
def test_an_agent_of_gymnax_is_shown_in_gymnasium(tmp_path, capsys):
    options = RolloutOptions("gymnax:CartPole-v1")
    train.main(config(tmp_path, seeds=1, rollout=options, timesteps=60_000, hidden=64))
    play.main(play.Config(str(tmp_path), episodes=8))
    said = capsys.readouterr().out
    assert float(said.split("mean return ")[-1].split()[0]) > 100
    assert (tmp_path / "play.gif").stat().st_size > 10_000


def test_mistakes_are_said(tmp_path, gymnax, monkeypatch):
    missing = dataclasses.replace(SMALL.rollout, env="gymnax:None-v0")
    with pytest.raises(UserError, match="gymnax:None-v0 cannot be made .*not registered"):
        train.main(config(tmp_path, rollout=missing))
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(UserError, match="needs gymnax .* pip install --no-deps gymnax"):
        train.main(config(tmp_path))
    with pytest.raises(UserError, match="--seeds 2 is for environments written in JAX"):
        config(tmp_path, rollout=RolloutOptions())
    square = Steps()
    square.observation_space = lambda params: types.SimpleNamespace(shape=(2, 2))
    with pytest.raises(UserError, match="observations must be vectors"):
        JaxEnv(square, None).spaces()
