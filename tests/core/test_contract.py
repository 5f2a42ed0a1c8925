import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import Loss, UserError, at_least_float32
from core.contract import check_loss, check_outputs, check_signatures, weighted_sums
from core.step import averages

# The three functions


def collate(examples):
    return {}


def loss(params, batch, key):
    return Loss(jnp.zeros(1))


def predict(params, batch, keys):
    return None


class Model:
    def __call__(self, params, batch, key):
        return loss(params, batch, key)

    def method(self, params, batch, key):
        return loss(params, batch, key)


def with_model_first(model, params, batch, key):
    return loss(params, batch, key)


def with_model_last(params, batch, key, model):
    return loss(params, batch, key)


def with_model_by_keyword(params, batch, key, *, model, rate=0.1):
    return loss(params, batch, key)


def with_defaults(params, batch, key=None, rate=0.1):
    return loss(params, batch, key)


def with_the_rest(params, batch, key, *args, **kwargs):
    return loss(params, batch, key)


def positional_only(params, batch, key, /):
    return loss(params, batch, key)


@pytest.mark.parametrize(
    "fn",
    [
        loss,
        lambda params, batch, key: loss(params, batch, key),
        partial(loss),
        partial(with_model_first, None),
        partial(with_model_last, model=None),
        partial(with_model_by_keyword, model=None),
        partial(partial(with_model_by_keyword, rate=1.0), model=None),
        with_defaults,
        with_the_rest,
        positional_only,
        Model(),
        Model().method,
        jax.jit(loss),
        jax.checkpoint(loss),
    ],
)
def test_function_that_takes_the_three_arguments_by_position_is_accepted(fn):
    check_signatures(collate, fn, None)
    assert isinstance(fn({}, {}, None), Loss)  # as the core calls it


@pytest.mark.parametrize(
    ("fn", "takes"),
    [
        (lambda params, batch: 0, "(params, batch)"),
        (lambda params, batch, rng: 0, "(params, batch, rng)"),
        (lambda batch, params, key: 0, "(batch, params, key)"),
        (lambda params, batch, key, train: 0, "(params, batch, key, train)"),
        (lambda params, batch, rate=1, key=None: 0, "(params, batch, rate=..., key=...)"),
        (lambda params, batch, *, key: 0, "(params, batch, *, key)"),
        (lambda *args: 0, "()"),
        (lambda params, batch, **kwargs: 0, "(params, batch)"),
        (with_model_last, "(params, batch, key, model)"),
        (with_model_by_keyword, "(params, batch, key, *, model, rate=...)"),
        # The core's call by position would give params to model.
        (partial(with_model_first, model=0), "(*, model=..., params, batch, key)"),
        (partial(loss, None), "(batch, key)"),
        (partial(loss, key=None), "(params, batch, *, key=...)"),
        (Model.method, "(self, params, batch, key)"),
    ],
)
def test_function_with_other_arguments_is_refused(fn, takes):
    says = f"loss takes {takes}; it must take exactly loss(params, batch, key), by position. Bind"
    with pytest.raises(UserError, match=re.escape(says)):
        check_signatures(collate, fn, predict)


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        ((collate, None, None), "A trainer needs a loss or a predict function, and got neither."),
        ((lambda rows: 0, loss, predict), "collate takes (rows); it must take exactly collate(exa"),
        ((collate, None, loss), "predict takes (params, batch, key); it must take exactly predict"),
        ((collate, predict, None), "loss takes (params, batch, keys); it must take exactly loss("),
        ((None, loss, None), "collate is a NoneType; it must be a function collate(examples)."),
        ((collate, 3, None), "loss is a int; it must be a function loss(params, batch, key)."),
    ],
)
def test_each_of_the_functions_is_checked(functions, says):
    with pytest.raises(UserError, match=re.escape(says)):
        check_signatures(*functions)


def test_one_of_loss_and_predict_is_enough():
    check_signatures(collate, loss, None)
    check_signatures(collate, None, predict)
    check_signatures(collate, loss, predict)


# What they return


def zeros(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "out",
    [
        Loss(zeros(4)),
        Loss(zeros(4, 3, 2, dtype=jnp.bfloat16), zeros(4)),
        Loss(zeros(4, 3, 2), zeros(4, 3, dtype=bool), {"hit": zeros(4, 3, 2, dtype=bool)}),
        Loss(jnp.zeros((4, 3)), jnp.zeros((4, 3), jnp.int32)),
    ],
)
def test_loss_as_agreed_is_accepted(out):
    check_loss(out, 4)


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (zeros(), "loss returned a ShapeDtypeStruct; it must return core.Loss(values, weights,"),
        ((zeros(4), {}), "loss returned a tuple; it must"),
        (Loss(zeros()), "loss returned values of shape [] for a batch of 4 rows; its leading axis"),
        (Loss(zeros(3, 4)), "values of shape [3, 4] for a batch of 4 rows"),
        (Loss(zeros(4, dtype=jnp.int32)), "loss returned values of type int32, through which no"),
        (Loss(zeros(4, 3), zeros(3)), "weights of shape [3] for values of shape [4, 3]; weights"),
        (Loss(zeros(4), zeros(4, 1)), "weights of shape [4, 1] for values of shape [4]"),
        (Loss(zeros(4, 3), zeros(4, 1)), "weights of shape [4, 1] for values of shape [4, 3]"),
        (
            Loss(zeros(4, 3), metrics={"ok": zeros(4, 3), "hit": zeros(4)}),
            "loss returned the metric 'hit' of shape [4]; it must have the shape of values, [4, 3]",
        ),
        *(
            (
                Loss(zeros(4), metrics={name: zeros(4)}),
                f"loss returned a metric named {name!r}, which is the core's own name.",
            )
            for name in ("loss", "weight", "grad_norm", "learning_rate", "first_bad", "skipped")
        ),
    ],
)
def test_loss_not_as_agreed_is_refused(out, says):
    with pytest.raises(UserError, match=re.escape(says)):
        check_loss(out, 4)


@pytest.mark.parametrize("out", [zeros(4), {"a": zeros(4, 2), "b": [zeros(4, 0)]}, None])
def test_outputs_that_lead_with_the_rows_are_accepted(out):
    check_outputs(out, 4)


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (zeros(3, 4), "predict returned an array of shape [3, 4] for a batch of 4 rows; its leadi"),
        (zeros(), "predict returned an array of shape [] for"),
        ({"a": zeros(4), "b": [zeros(4), zeros(1)]}, "an array['b'][1] of shape [1] for a batch"),
    ],
)
def test_outputs_that_do_not_lead_with_the_rows_are_refused(out, says):
    with pytest.raises(UserError, match=re.escape(says)):
        check_outputs(out, 4)


# Reduction


def slow_sums(out, mask):
    """By the definition, one element after the other."""
    sums = dict.fromkeys(("loss", "weight", *out.metrics), 0.0)
    for at in np.ndindex(out.values.shape):
        if not mask[at[0]]:
            continue
        weight = 1.0 if out.weights is None else float(out.weights[at[: out.weights.ndim]])
        sums["weight"] += weight
        for name, array in {"loss": out.values, **out.metrics}.items():
            sums[name] += weight * float(array[at])
    return sums


@pytest.mark.parametrize(
    ("shape", "weighed", "dtype"),
    [
        ((5,), None, float),
        ((5,), 1, float),
        ((5, 4), None, float),
        ((5, 4), 1, bool),
        ((5, 4), 2, bool),
        ((5, 4), 2, np.int32),
        ((5, 4, 3), 1, float),
        ((5, 4, 3), 2, float),
        ((5, 4, 3), 3, float),
        ((5, 5, 5), 2, float),
    ],
)
@pytest.mark.parametrize("mask", [(1, 1, 1, 1, 1), (1, 0, 1, 1, 0), (0, 0, 0, 0, 0)])
def test_sums_equal_a_loop_over_the_elements(x64, shape, weighed, dtype, mask):
    rng, mask = np.random.default_rng(0), np.array(mask, bool)
    values, metric = rng.normal(size=(2, *shape))
    weights = None if weighed is None else (3 * rng.random(shape[:weighed])).astype(dtype)
    out = Loss(values, weights, {"m": metric, "hit": metric > 0})
    expected = slow_sums(out, mask)
    for array in (values, metric, *([weights] if dtype is float and weighed else [])):
        array[~mask] = np.nan  # padding is cut out, whatever it holds
    sums = jax.jit(weighted_sums)(jax.tree.map(jnp.asarray, out), jnp.asarray(mask))
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        assert (sums[name].dtype, sums[name].shape) == (jnp.float64, ())
        np.testing.assert_allclose(sums[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_half_precision_is_summed_in_single(dtype):
    # Sums in half precision would stop at 256 (bfloat16) or overflow (float16).
    values = jnp.full((3, 30_000), 1, dtype)
    sums = weighted_sums(Loss(values, None, {"m": values * 2}), jnp.array([True, True, False]))
    assert {name: (x.dtype, float(x)) for name, x in sums.items()} == {
        "loss": (jnp.float32, 60_000),
        "weight": (jnp.float32, 60_000),
        "m": (jnp.float32, 120_000),
    }


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.float32),
        (jnp.float64, jnp.float64),
        (bool, jnp.float32),
        (jnp.int32, jnp.float32),
    ],
)
def test_single_precision_is_the_least(x64, dtype, wide):
    assert at_least_float32(jnp.ones(2, dtype)).dtype == wide


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gradient_flows_through_values_of_real_rows_only(bad):
    values = jnp.array([[1.0, 2.0], [bad, bad], [3.0, 4.0]])
    weights = jnp.array([2.0, bad, 3.0])

    def total(values, weights, metric):
        out = weighted_sums(Loss(values, weights, {"m": metric}), jnp.array([True, False, True]))
        return sum(out.values())

    gradients = jax.grad(total, (0, 1, 2))(values, weights, values)
    np.testing.assert_array_equal(gradients[0], [[2, 2], [0, 0], [3, 3]])
    for gradient in gradients[1:]:
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@pytest.mark.parametrize("parts", [1, 2])
def test_tokens_weigh_the_same_in_rows_of_any_length(parts):
    """11 tokens at 2.0 and 101 at 1.0 average (22 + 101) / 112, not 1.5."""
    lengths, costs = np.array([11, 101]), np.array([2.0, 1.0])
    weights = np.arange(101) < lengths[:, None]
    out = Loss(jnp.asarray(np.tile(costs[:, None], 101), jnp.float32), jnp.asarray(weights))
    total = {}
    for rows in np.split(np.arange(2), parts):
        part = weighted_sums(jax.tree.map(lambda x, r=rows: x[r], out), jnp.ones(len(rows), bool))
        total = {name: total.get(name, 0) + value for name, value in part.items()}
    means = averages(total)
    assert float(means["weight"]) == 112
    np.testing.assert_allclose(means["loss"], 123 / 112, rtol=1e-6)
    assert round(float(means["loss"]), 4) == 1.0982
