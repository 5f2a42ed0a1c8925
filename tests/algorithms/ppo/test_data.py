"""Environments, running statistics and rollouts."""

import jax
import numpy as np
import pytest

from algorithms.ppo.data import RolloutOptions, Rollouts, nothing_seen, seen
from algorithms.ppo.environments import checked, evaluate, make_envs, spaces_of, to_env
from core import UserError
from core.encoding import decoded, encoded
from tests.algorithms.ppo import tiny  # noqa: F401 (registers)


def first_action(params, batch, keys):
    """Always action 0; the value is the first number of the observation, in tenths."""
    rows = len(batch["observation"])
    return {
        "action": np.zeros(rows, np.int32),
        "log_prob": np.zeros(rows, np.float32),
        "value": batch["observation"][:, 0] * 10,
    }


def coin(params, batch, keys):
    """An action that the key alone decides."""
    action = jax.vmap(lambda key: jax.random.bernoulli(key))(keys)
    return first_action(params, batch, keys) | {"action": np.asarray(action, np.int32)}


def rollouts(env, act=first_action, seed=0, **options):
    options = RolloutOptions(**{"env": env, "num_envs": 2, "num_steps": 6, "passes": 2} | options)
    envs = make_envs(options.env, options.num_envs, options.vectorization)
    said = []
    source = Rollouts(envs, act, options, seed, said.append)
    source.said = said
    return source


def by_time(rows, envs=2):
    return {name: x.reshape(-1, envs, *x.shape[1:]) for name, x in rows.items()}


def test_an_ignored_action_weighs_nothing_and_a_cut_episode_goes_on_with_its_final_value():
    source = rollouts("TinyConstant-v0", gamma=0.5, gae_lambda=0.0, num_steps=8)
    one = by_time(source(0, None))
    # Three steps, cut short; the fourth only resets. The passes share a weight of 1.
    assert one["weight"][:, 0].tolist() == [0.5, 0.5, 0.5, 0] * 2
    # Values are 0, 2, 4 and 6 of the final observation.
    np.testing.assert_allclose(one["value"][:, 1], [0, 2, 4, 6] * 2, rtol=1e-6)
    np.testing.assert_allclose(one["target"][:3, 0], [1 + 1, 1 + 2, 1 + 3], rtol=1e-6)
    np.testing.assert_allclose(one["advantage"][:3, 0], [2, 1, 0], atol=1e-6)
    assert set(source.recent) == {3.0} and np.all(one["mean_return"] == 3)


def test_episodes_of_one_step_alternate_with_ignored_ones():
    one = by_time(rollouts("TinyLarge-v0")(0, None))
    assert (one["weight"] > 0).T.tolist() == [[True, False] * 3] * 2


def test_an_end_by_both_flags_is_a_termination():
    one = by_time(rollouts("TinyBoth-v0", gamma=0.5)(0, None))
    np.testing.assert_allclose(one["target"][0], 1)


def test_each_pass_gets_the_same_rollout_and_then_comes_a_new_one():
    source = rollouts("CartPole-v1", coin)
    first, again, new = source(0, None), source(1, None), source(2, None)
    assert again is first
    assert not np.array_equal(first["action"], new["action"])
    assert not np.array_equal(first["observation"], new["observation"])


@pytest.mark.parametrize("vectorization", ["vector", "sync"])
def test_the_same_seed_gives_the_same_rollouts_and_another_one_others(vectorization):
    a, b, c = (
        rollouts("CartPole-v1", coin, seed, vectorization=vectorization) for seed in (1, 1, 2)
    )
    for epoch in range(4):
        first, second, other = (source(epoch, None) for source in (a, b, c))
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
        assert not np.array_equal(first["observation"], other["observation"])
        # Environments differ from each other too.
        assert len(np.unique(by_time(first)["observation"][0, :, 0])) == 2


def test_a_source_goes_on_from_its_state():
    options = {"normalize_observations": True, "normalize_rewards": True}
    source, new = (rollouts("CartPole-v1", coin, **options) for _ in range(2))
    for epoch in range(3):
        source(epoch, None)
    kept = decoded(encoded(source.state(), "state()"))
    new.restore(kept)
    assert new.said and "seeds from (seed, epoch)" in new.said[0]
    # A pass is left over the rollout at hand, which is kept.
    for name, array in source(3, None).items():
        np.testing.assert_array_equal(new(3, None)[name], array)
    np.testing.assert_array_equal(new.observed.mean, source.observed.mean)
    assert list(new.recent) == list(source.recent) and not new.state()["rollout"]
    third = rollouts("CartPole-v1", coin, **options)
    third.restore(kept)
    third(3, None)
    for name, array in new(4, None).items():  # what comes is a function of the state
        np.testing.assert_array_equal(third(4, None)[name], array)


def test_running_moments_are_those_of_all_that_was_seen():
    rng, moments = np.random.default_rng(0), nothing_seen(3)
    parts = [1e6 + rng.normal(2, 5, size=(n, 3)) for n in (4, 0, 1, 30)]
    for part in parts:
        moments = moments.added(part)
    x = np.concatenate(parts)
    np.testing.assert_allclose(moments.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.deviation(), x.std(0), rtol=1e-9)
    np.testing.assert_allclose(moments.scaled(x), (x - x.mean(0)) / x.std(0), rtol=1e-5)


def test_what_does_not_vary_is_only_shifted():
    moments = nothing_seen(1)
    for _ in range(100):
        moments = moments.added(np.full((3, 1), 0.1))
    assert moments.deviation() == 1 and abs(moments.scaled(np.array([0.1]))[0]) < 1e-12
    assert nothing_seen(1).deviation() == 1


def test_ignored_transitions_enter_no_statistics():
    source = rollouts(
        "TinyConstant-v0", num_steps=8, normalize_observations=True, normalize_rewards=True, gamma=0
    )
    source(0, None)
    # Times 0, 0.2 and 0.4, not the final 0.6; rewards of 1, not the 0 of a reset.
    assert source.observed.number == 12
    np.testing.assert_allclose(source.observed.mean, [0.2, 1])
    assert source.rewarded.number == 12 and source.rewarded.mean == 1


def test_rewards_are_divided_by_the_deviation_of_their_discounted_sums():
    source = rollouts("TinyConstant-v0", num_steps=3, normalize_rewards=True, gamma=0.5)
    one = by_time(source(0, None))
    sums, wanted = [], []
    for step in (1, 1.5, 1.75):
        sums += [step, step]
        wanted.append(1 / (np.std(sums) or 1))
    rewards = one["advantage"] + one["value"]  # less what follows
    following = np.array([2, 4, 6])  # values, of which half counts
    trace = one["advantage"][1:, 0] * 0.5 * 0.95
    found = rewards[:, 0] - 0.5 * following - np.append(trace, 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert source.recent[0] == 3, "returns are those that the environment gave"


@pytest.mark.parametrize("vectorization, kind", [("auto", "CartPoleVectorEnv"), ("sync", "Sync")])
def test_the_native_vector_version_is_taken_where_there_is_one(vectorization, kind):
    assert type(make_envs("CartPole-v1", 2, vectorization)).__name__.startswith(kind)
    assert type(make_envs("Pendulum-v1", 2)).__name__ == "SyncVectorEnv"


def test_processes_give_what_one_process_gives():
    sources = [rollouts("CartPole-v1", coin, vectorization=kind) for kind in ("sync", "async")]
    found = [source(0, None) for source in sources]
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array)
    sources[1].envs.close()


def test_continuous_actions_are_clipped_only_where_there_is_a_bound():
    space = tiny.Open.action_space
    found = to_env(np.array([[-1e9, -1.0], [1e9, 2.0]], np.float32), space)
    assert found.tolist() == [[-1e9, 0], [1e9, 1]]


def test_numbered_actions_count_from_the_first_of_the_space():
    envs = make_envs("TinyShifted-v0", 3)
    assert to_env(np.array([0, 1, 0]), envs.single_action_space).tolist() == [5, 6, 5]
    played = evaluate(envs, coin, None, lambda x: x.astype(np.float32), 0)
    assert played["episodes"] == 3 and 0 <= played["mean_return"] <= 1


def test_evaluation_takes_one_whole_episode_of_each_environment():
    envs = make_envs("TinyConstant-v0", 5)
    played = evaluate(envs, first_action, None, lambda x: x.astype(np.float32), 0)
    assert played == {"episodes": 5, "mean_return": 3.0, "deviation": 0.0}


@pytest.mark.parametrize(
    "env, says",
    [
        ("TinyNested-v0", "observation space Dict.*not supported"),
        ("TinySeveral-v0", "action space"),
    ],
)
def test_spaces_that_do_not_fit_are_refused(env, says):
    with pytest.raises(UserError, match=says):
        spaces_of(make_envs(env, 1))


@pytest.mark.parametrize(
    "env, vectorization",
    [("NoSuch-v0", "auto"), ("nosuchmodule:A-v0", "auto"), ("Pendulum-v1", "vector")],
)
def test_environments_that_cannot_be_made_are_named(env, vectorization):
    with pytest.raises(UserError, match=env):
        make_envs(env, 2, vectorization)


def test_an_observation_that_is_not_finite_is_named_with_environment_and_step():
    with pytest.raises(UserError, match=r"Environment 0 .*not finite in step 3: \[3.0, nan\]"):
        rollouts("TinyBroken-v0")(0, None)
    with pytest.raises(UserError, match="Environment 1 .* from its reset"):
        checked([[0.0], [np.inf]], 0)


def test_observations_are_seen_in_single_precision():
    assert seen(np.array([[1e3]]), None).dtype == np.float32
    assert abs(seen(np.array([[1e9]]), nothing_seen(1))) == 10
