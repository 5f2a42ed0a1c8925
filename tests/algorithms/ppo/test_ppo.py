"""The three functions of PPO, by hand and against SciPy and plain gradients."""

import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from algorithms.ppo import ppo
from algorithms.ppo.model import Categorical, Gaussian, build
from core import MeshOptions, Trainer, TrainOptions, UserError, make_mesh
from core.contract import weighted_sums
from core.report import ReportOptions

SIZE, ACTIONS = 3, 4


@functools.cache
def networks(discrete):
    model, init = build(SIZE, ACTIONS, discrete, 8)
    return model, jax.device_get(jax.jit(init)(jax.random.key(0)))


def agent(discrete=True):
    """Parameters, and loss and predict bound to a model; the policy is far from uniform."""
    model, params = networks(discrete)
    params = jax.tree.map(lambda x: jnp.asarray(x, float), params)
    params["policy"][2]["kernel"] *= 100
    bound = dict(model=model, clip=0.2, value_weight=0.0, entropy_weight=0.0)
    return params, partial(ppo.loss, **bound), jax.jit(partial(ppo.predict, model=model))


def rollout(rows, params, predict, seed=0):
    """Rows as a rollout of these parameters gives them, with random advantages and targets."""
    rng = np.random.default_rng(seed)
    observation = rng.normal(size=(rows, SIZE))
    keys = jax.random.split(jax.random.key(seed), rows)
    out = predict(params, {"observation": observation}, keys)
    arrays = {name: np.asarray(array) for name, array in out.items()}
    drawn = {name: rng.normal(size=rows) for name in ("advantage", "target")}
    rest = {"weight": np.ones(rows), "mean_return": np.full(rows, 7.0)}
    return arrays | drawn | rest | {"observation": observation}


def masked(examples):
    batch = {name: jnp.asarray(array) for name, array in examples.items()}
    return batch | {"row_mask": jnp.ones(len(batch["weight"]), bool)}


# Time step       0     1     2     after the last
# environment 0   goes on; terminates; the action is ignored
#   reward        1     3     0
#   value         4     2     8     6
#   d             1 + 2/2 - 4 = -2;  3 + 0 - 2 = 1
#   advantage     -2 + 1/4 = -7/4;   1
# environment 1   truncated, its final observation has the value 4; ignored; goes on
#   reward        2     0     5
#   value         3     4     1     10
#   d             2 + 4/2 - 3 = 1;         ;  5 + 10/2 - 1 = 9
#   advantage     1;                       ;  9
def test_advantages_are_those_worked_by_hand():
    values = jnp.array([[4.0, 3], [2, 4], [8, 1], [6, 10]])
    rewards = jnp.array([[1.0, 2], [3, 0], [0, 5]])
    terminated = jnp.array([[0, 0], [1, 0], [0, 0]], bool)
    truncated = jnp.array([[0, 1], [0, 0], [0, 0]], bool)

    def advantages(rewards):
        flags = (terminated, truncated)
        return ppo.gae(rewards, values[:-1], values[1:], *flags, gamma=0.5, decay=0.5)

    real = np.array([[1, 1], [1, 0], [0, 1]], bool)
    found = advantages(rewards)
    np.testing.assert_array_equal(found[real], [-1.75, 1, 1, 9])
    # What an ignored transition has in it touches no other.
    other = advantages(jnp.where(real, rewards, 1e3))
    np.testing.assert_array_equal(other[real], found[real])


@pytest.mark.parametrize("also_terminated", [False, True])
def test_a_cut_episode_goes_on_with_its_final_value_and_not_with_the_next_episode(also_terminated):
    # V = 1 now and of the final observation, V = 100 where the next episode starts.
    values = jnp.array([[1.0], [1.0], [100.0]])
    flags = jnp.array([[also_terminated], [False]]), jnp.array([[True], [False]])
    found = ppo.gae(jnp.zeros((2, 1)), values[:2], values[1:], *flags, gamma=1.0, decay=0.95)
    # Termination wins: nothing follows, so the value of 1 was too much.
    assert found[0, 0] == (-1 if also_terminated else 0)


def test_advantages_are_normalised_over_the_real_rows(x64):
    rng = np.random.default_rng(0)
    advantage, real = rng.normal(3, 5, size=9), np.array([1, 1, 0, 1, 0, 1, 1, 1, 0], bool)
    found = ppo.normalized(jnp.asarray(np.where(real, advantage, np.nan)), jnp.asarray(real))
    among = advantage[real]
    wanted = (among - among.mean()) / (among.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(found[real], wanted, rtol=1e-12)
    assert not found[~real].any()


@pytest.mark.parametrize("number", [0, 1, 5])
def test_equal_advantages_and_a_single_one_become_zero(number):
    real = jnp.arange(6) < number
    assert not ppo.normalized(jnp.full(6, 0.1), real).any()


def test_padding_and_ignored_transitions_change_nothing(x64):
    params, loss, predict = agent()
    examples = rollout(6, params, predict)
    more = {name: np.concatenate([array, array[:3]]) for name, array in examples.items()}
    more["weight"][6:8], more["advantage"][6:8], more["target"][6:8] = 0, 1e3, -1e3
    batch = masked(more)
    batch["row_mask"] = batch["row_mask"].at[8].set(False)

    def mean(batch):
        out = jax.jit(partial(loss, value_weight=0.5))(params, batch, None)
        sums = weighted_sums(out, batch["row_mask"])
        return {name: float(total / sums["weight"]) for name, total in sums.items()}

    assert mean(batch) == pytest.approx(mean(masked(examples)), rel=1e-12)


@pytest.mark.parametrize("discrete", [True, False])
def test_at_ratio_one_the_gradient_is_the_policy_gradient(discrete, x64):
    params, loss, predict = agent(discrete)
    examples = rollout(16, params, predict)
    batch = masked(examples)
    advantage = ppo.normalized(batch["advantage"], batch["row_mask"])
    out = jax.jit(loss)(params, batch, None)
    np.testing.assert_allclose(out.values, -advantage, rtol=1e-12)
    np.testing.assert_allclose(out.metrics["approx_kl"], 0, atol=1e-12)
    assert not out.metrics["clip_fraction"].any()

    def surrogate(params):
        model = loss.keywords["model"]
        policy, _ = ppo.nnx.merge(model, params)(batch["observation"])
        return -jnp.mean(policy.log_prob(batch["action"]) * advantage)

    found = jax.jit(jax.grad(lambda p: jnp.mean(loss(p, batch, None).values)))(params)
    wanted = jax.jit(jax.grad(surrogate))(params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    assert jnp.abs(found["policy"][0]["kernel"]).max() > 1e-3


@pytest.mark.parametrize(
    "ratio, sign, flows", [(1.5, 1, False), (0.5, -1, False), (1.5, -1, True), (0.5, 1, True)]
)
def test_no_gradient_flows_where_the_ratio_is_clipped(ratio, sign, flows, x64):
    params, loss, predict = agent()
    examples = rollout(2, params, predict)
    examples["advantage"] = np.array([1.0, -1.0]) * sign
    examples["log_prob"] = examples["log_prob"] - math.log(ratio)

    def first(params):
        out = loss(params, masked(examples), None)
        return out.values[0], out.metrics

    gradient, metrics = jax.jit(jax.grad(first, has_aux=True))(params)
    assert any(g.any() for g in jax.tree.leaves(gradient)) == flows
    assert metrics["clip_fraction"].tolist() == [1, 1]
    np.testing.assert_allclose(metrics["approx_kl"], ratio - 1 - math.log(ratio), rtol=1e-9)


def test_clipped_values_cost_the_larger_of_two_errors():
    params, loss, predict = agent()
    examples = rollout(2, params, predict)
    value = examples["value"].copy()
    # Values rose by 1, and by 0.1: only the first is cut to 0.2. Targets are 2 and 0 above.
    examples["value"], examples["target"] = value - np.float32([1, 0.1]), value + np.float32([2, 0])
    for clip_values, wanted in ((False, [4.0, 0.0]), (True, [2.8**2, 0.0])):
        out = jax.jit(partial(loss, clip_values=clip_values))(params, masked(examples), None)
        np.testing.assert_allclose(out.metrics["value_loss"], np.divide(wanted, 2), atol=1e-6)


def test_the_explained_variance_is_that_of_the_targets_also_where_they_hardly_vary():
    params, loss, predict = agent()
    examples = rollout(32, params, predict)
    rng = np.random.default_rng(1)
    examples["target"] = (100 + 1e-3 * rng.normal(size=32)).astype(np.float32)
    examples["value"] = (examples["target"] + 5e-4 * rng.normal(size=32)).astype(np.float32)
    out = jax.jit(loss)(params, masked(examples), None)
    metrics = {name: float(metric.mean()) for name, metric in out.metrics.items()}
    residual = examples["target"].astype(float) - examples["value"]
    wanted = 1 - residual.var() / examples["target"].astype(float).var()
    assert ppo.summarize(metrics)["explained_variance"] == pytest.approx(wanted, abs=1e-3)
    nothing = {"target_variance": 0.0, "residual_variance": 0.0}
    assert math.isnan(ppo.summarize(nothing)["explained_variance"])


def test_gaussian_log_probabilities_and_entropies_are_scipys(x64):
    rng = np.random.default_rng(0)
    mean, action, log_std = rng.normal(size=(5, 3)), rng.normal(size=(5, 3)), rng.normal(size=3)
    policy = Gaussian(jnp.asarray(mean), jnp.asarray(log_std))
    normal = scipy.stats.norm(mean, np.exp(log_std))
    np.testing.assert_allclose(policy.log_prob(action), normal.logpdf(action).sum(1), rtol=1e-12)
    np.testing.assert_allclose(policy.entropy(), normal.entropy().sum(1), rtol=1e-12)


def test_categorical_log_probabilities_and_entropies_are_scipys(x64):
    logits = np.random.default_rng(0).normal(size=(5, 4))
    policy, action = Categorical(jnp.asarray(logits)), np.array([0, 3, 1, 2, 2])
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(policy.log_prob(action), np.log(p[np.arange(5), action]), rtol=1e-12)
    np.testing.assert_allclose(policy.entropy(), scipy.stats.entropy(p, axis=1), rtol=1e-12)


def test_extreme_actions_and_logits_stay_finite():
    policy = Gaussian(jnp.zeros((2, 1)), jnp.array([-10.0]))
    action = jnp.array([[1e10], [-1e10]])
    assert jnp.isfinite(policy.log_prob(action)).all()
    gradient = jax.grad(lambda m: Gaussian(m, policy.log_std).log_prob(action).sum())(policy.mean)
    assert jnp.isfinite(gradient).all()
    sure = Categorical(jnp.array([[1e4, 0.0, -1e4]]))
    assert sure.entropy() == 0 and jnp.isfinite(sure.log_prob(jnp.array([2]))).all()


@pytest.mark.parametrize("discrete", [True, False])
def test_samples_follow_the_distribution_that_is_said(discrete):
    params, _, predict = agent(discrete)
    batch = {"observation": jnp.broadcast_to(jnp.array([[0.5, -1.0, 2.0]]), (4000, SIZE))}
    out = predict(params, batch, jax.random.split(jax.random.key(0), 4000))
    if discrete:
        share = np.bincount(out["action"], minlength=ACTIONS) / 4000
        said = np.exp(out["log_prob"])
        np.testing.assert_allclose(share[np.asarray(out["action"])], said, atol=0.03)
    else:
        model, _ = networks(discrete)
        mode = ppo.predict(params, batch, None, model=model, greedy=True)["action"][0]
        np.testing.assert_allclose(out["action"].mean(0), mode, atol=0.07)
        np.testing.assert_allclose(out["action"].std(0), 1, atol=0.05)


def test_a_new_policy_is_nearly_uniform_and_layers_are_orthogonal():
    model, init = build(SIZE, ACTIONS, True, 8)
    params = jax.jit(init)(jax.random.key(3))
    for name, gain in (("policy", 0.01), ("value", 1.0)):
        for layer, scale in zip(params[name].values(), (2**0.5, 2**0.5, gain), strict=True):
            singular = jnp.linalg.svd(layer["kernel"], compute_uv=False)
            np.testing.assert_allclose(singular, scale, rtol=1e-5)


def trainer(devices, params, loss, predict, rows=12):  # padded where devices are eight
    return Trainer(
        ppo.collate,
        loss,
        predict,
        params,
        optax.adam(1e-2, eps=1e-5),
        make_mesh(MeshOptions(), jax.devices()[:devices]),
        rollout(1, params, predict),
        options=TrainOptions(
            batch_size=rows, epochs=2, clip_norm=0.5, report=ReportOptions(quiet=True)
        ),
        summarize=ppo.summarize,
        whole_batch=True,
    )


def test_one_device_equals_eight(x64):
    params, loss, predict = agent()
    examples = rollout(48, params, predict)
    examples["weight"][::5] = 0
    examples["advantage"][::5] = 1e3
    ends = []
    for devices in (1, 8):
        one = trainer(devices, params, partial(loss, value_weight=0.5), predict)
        metrics = one.fit(examples)["train"]
        ends.append((jax.device_get(one.state.params), metrics["loss"]))
    for a, b in zip(*(jax.tree.leaves(end) for end in ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_the_rows_must_be_seen_at_once():
    params, loss, predict = agent()
    with pytest.raises(UserError, match="looks across the rows"):
        Trainer(
            ppo.collate,
            loss,
            predict,
            params,
            optax.sgd(0.1),
            make_mesh(MeshOptions()),
            rollout(1, params, predict),
            options=TrainOptions(batch_size=8, microbatches=2),
            whole_batch=True,
        )
