import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from core import Loss, MeshOptions, UserError, make_mesh
from core.contract import weighted_sums
from core.optimizer import AdamWOptions
from core.step import initial_state, learning_rate, make_step, summed_gradients


@pytest.mark.parametrize(
    ("options", "total", "rates"),
    [
        (AdamWOptions(2.0, "constant"), 3, [2, 2, 2]),
        (AdamWOptions(2.0, "linear"), 4, [2, 1.5, 1, 0.5]),
        (AdamWOptions(2.0, "cosine"), 4, [2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5]),
        (AdamWOptions(4.0, "constant", warmup=3), 5, [1, 2, 3, 4, 4]),
        (AdamWOptions(4.0, "linear", warmup=1), 5, [2, 4, 3, 2, 1]),
        (AdamWOptions(3.0, "linear", warmup=2), 3, [1, 2, 3]),
        (AdamWOptions(4.0, warmup=3), 7, [1, 2, 3, 4, 2 + 2**0.5, 2, 2 - 2**0.5]),  # cosine
        (AdamWOptions(0.0), 1, [0]),
        (AdamWOptions(), 1, [1e-3]),
    ],
)
def test_rate_of_every_step_of_a_run(options, total, rates):
    rate = options.rate(total)
    np.testing.assert_allclose([rate(step) for step in range(total)], rates, rtol=1e-6)
    if options.schedule != "constant":  # nothing is left at the end, and after it
        np.testing.assert_allclose([rate(total), rate(2 * total)], 0, atol=1e-6)


@pytest.mark.parametrize(("warmup", "total"), [(5, 5), (6, 5), (0, 0)])
def test_warmup_that_fills_the_run_is_refused(warmup, total):
    says = f"warmup {warmup} is not shorter than the run of {total} steps"
    with pytest.raises(UserError, match=says):
        AdamWOptions(warmup=warmup).build(total)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"learning_rate": -1e-3}, "learning_rate -0.001 is out of range: it must be at least 0"),
        ({"learning_rate": float("nan")}, "learning_rate nan is out of range"),
        ({"learning_rate": float("inf")}, "learning_rate inf is out of range"),
        ({"warmup": -1}, "warmup -1 is out of range"),
        ({"eps": -1.0}, "eps -1.0 is out of range"),
        ({"weight_decay": -0.1}, "weight_decay -0.1 is out of range"),
        ({"b1": 1.0}, "b1 1.0 is out of range: it must be at least 0 and below 1"),
        ({"b1": float("nan")}, "b1 nan is out of range"),
        ({"b2": -0.1}, "b2 -0.1 is out of range"),
    ],
)
def test_options_out_of_range_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        AdamWOptions(**options)


# In a step


def sums(params, rows, key):
    """A loss of every parameter, whose gradient changes from step to step."""
    values = sum(((rows["x"] - p) ** 2 * (i + 1)).sum(-1) for i, p in enumerate(params.values()))
    return weighted_sums(Loss(values), rows["row_mask"])


def trained(optimizer, params, steps):
    """States and metrics of a few steps."""
    whole = NamedSharding(make_mesh(), PartitionSpec())
    shardings = jax.tree.map(lambda _: whole, params)
    state = initial_state(params, optimizer, shardings, whole)
    step = jax.jit(make_step(summed_gradients(sums, lambda grads: grads), optimizer, 0, 0.0, 1))
    out = []
    for number in range(steps):
        x = np.random.default_rng(number).normal(size=(2, 4, 3))
        batch = {"x": x.astype(params["a"].dtype), "row_mask": np.ones((2, 4), bool)}
        state, metrics = step(state, batch)
        out.append((state, metrics, batch["x"].reshape(8, 3)))
    return out


def adamw(param, gradients, rates, options, decay):
    """The algorithm as it is written in the paper (Loshchilov and Hutter, 2019)."""
    m = v = 0.0
    for t, (grad_of, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        grad = grad_of(param)
        m = options.b1 * m + (1 - options.b1) * grad
        v = options.b2 * v + (1 - options.b2) * grad**2
        m_hat, v_hat = m / (1 - options.b1**t), v / (1 - options.b2**t)
        param = param - rate * (m_hat / (np.sqrt(v_hat) + options.eps) + decay * param)
    return param


def test_steps_are_those_of_the_paper_and_the_logged_rate_is_the_applied_one(x64):
    options = AdamWOptions(0.6, "linear", warmup=2, b1=0.8, b2=0.7, eps=0.01, weight_decay=0.3)
    params = {"a": jnp.array([[1.0, -2.0, 3.0]]), "b": jnp.array([[0.5, 0.0, -1.0]])}
    optimizer = options.build(6, lambda params: {"a": True, "b": False})
    run = trained(optimizer, params, 6)
    rates = [float(metrics["learning_rate"]) for _, metrics, _ in run]
    np.testing.assert_allclose(rates, [0.2, 0.4, 0.6, 0.45, 0.3, 0.15], rtol=1e-6)
    for i, (name, param) in enumerate(params.items()):
        gradients = [
            lambda p, x=x, i=i: (2 * (i + 1) * (p - x)).mean(0, keepdims=True) for _, _, x in run
        ]
        decay = options.weight_decay if name == "a" else 0
        expected = adamw(np.asarray(param), gradients, rates, options, decay)
        np.testing.assert_allclose(run[-1][0].params[name], expected, rtol=1e-12)


def test_all_parameters_decay_where_nothing_is_said_and_none_by_default():
    def after(**options):
        optimizer = AdamWOptions(0.5, "constant", **options).build(1)
        params = {"w": jnp.full(2, 8.0), "b": jnp.full((), 8.0)}
        updates, _ = optimizer.update(
            jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
        )
        return [float(x.ravel()[0]) for x in jax.tree.leaves(optax.apply_updates(params, updates))]

    assert after(weight_decay=0.25) == [7, 7]  # 8 - 0.5 * 0.25 * 8
    assert after() == [8, 8]


@pytest.mark.parametrize("frozen_first", [True, False])
def test_frozen_parameter_with_weight_decay_stays_the_same_to_the_bit(frozen_first):
    names = ("a", "b") if frozen_first else ("b", "a")
    params = {"a": jnp.array([[1.1, -2.2, 3.3]]), "b": jnp.array([[0.7, 1e-30, -1.0]])}
    labels = dict(zip(names, ("frozen", "trained"), strict=True))
    inner = AdamWOptions(0.1, "linear", weight_decay=0.5).build(4)
    optimizer = optax.multi_transform({"trained": inner, "frozen": optax.set_to_zero()}, labels)
    run = trained(optimizer, params, 3)
    state, metrics, _ = run[-1]
    frozen, moved = names
    assert np.asarray(state.params[frozen]).tobytes() == np.asarray(params[frozen]).tobytes()
    assert np.all(np.asarray(state.params[moved]) != np.asarray(params[moved]))
    np.testing.assert_allclose(metrics["learning_rate"], 0.05, rtol=1e-6)  # the third of four


def test_an_optimizer_without_a_kept_rate_has_none_to_log():
    assert learning_rate(optax.adam(0.1).init({"a": jnp.ones(2)})) == {}


def test_a_parameter_named_learning_rate_is_not_taken_for_it():
    params = {"learning_rate": jnp.ones(()), "hyperparams": {"learning_rate": jnp.ones(3)}}
    assert learning_rate(optax.adam(0.1).init(params)) == {}
    state = optax.inject_hyperparams(optax.adam)(0.25).init(params)
    assert learning_rate(state) == {"learning_rate": 0.25}


# What an optimizer keeps, and how it lies: as its parameter, or as what is left of its dimensions.
PLACES = {"kernel": PartitionSpec("fsdp", "tensor"), "square": PartitionSpec("tensor", "fsdp")}
PLACES |= {"bias": PartitionSpec("tensor"), "layers": PartitionSpec(None, "fsdp", "tensor")}
SHAPES = {"kernel": (8, 16), "square": (8, 8), "bias": (16,), "layers": (3, 8, 16)}


def kept(optimizer, params):
    """{path: spec} of what is kept for parameters that lie at `PLACES`."""
    mesh = make_mesh(MeshOptions(fsdp=2, tensor=4))
    shardings = {name: NamedSharding(mesh, PLACES[name]) for name in params}
    params = jax.device_put(params, shardings)
    whole = NamedSharding(mesh, PartitionSpec())
    state = initial_state(params, optimizer, shardings, whole).opt_state
    flat = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): tuple(x.sharding.spec) for path, x in flat}


def weights():
    return {name: jnp.ones(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    "make",
    [optax.adamw, optax.lion, optax.lamb, optax.adafactor, optax.rprop, optax.novograd, optax.sgd],
)
def test_moments_lie_as_their_parameters(make):
    places = kept(optax.chain(optax.clip_by_global_norm(1.0), make(1e-3)), weights())
    for path, spec in places.items():
        for name in SHAPES:
            if path.endswith(f".mu['{name}']") or path.endswith(f".trace['{name}']"):
                assert spec == tuple(PLACES[name]), path
    assert places.get("[1][0].mu['bias']", ("tensor",)) == ("tensor",)


def test_factored_moments_lie_as_what_is_left_of_their_parameters():
    places = kept(optax.adafactor(1e-3, min_dim_size_to_factor=4), weights())
    assert places["[0].v_row['kernel']"] == ("fsdp",)
    assert places["[0].v_col['kernel']"] == ("tensor",)
    assert places["[0].v_row['layers']"] == (None, "fsdp")
    assert places["[0].v_col['layers']"] == (None, "tensor")
    assert places["[0].v['bias']"] == ("tensor",)
    # Of a square one it cannot be told which dimension is gone: a vector is kept whole.
    assert places["[0].v_row['square']"] == places["[0].v_col['square']"] == ()


def test_a_list_for_each_parameter_and_a_memory_of_several_steps():
    params = {name: weights()[name] for name in ("kernel", "bias")}
    places = kept(optax.sm3(1e-3), params)
    assert places["[0].mu['kernel'][0]"] == ("fsdp",)
    assert places["[0].mu['kernel'][1]"] == ("tensor",)
    places = kept(optax.lbfgs(), params)
    assert places["[0].diff_params_memory['kernel']"] == (None, "fsdp", "tensor")


def test_parts_of_an_optimizer_see_their_parameters_alone():
    labels = {"kernel": "a", "square": "b", "bias": "b", "layers": "a"}
    parts = optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(1e-3, 0.9)}, labels)
    places = kept(optax.inject_hyperparams(lambda learning_rate: parts)(1e-3), weights())
    moments = {path: spec for path, spec in places.items() if "mu[" in path or "trace[" in path}
    assert len(moments) == 4
    for path, spec in moments.items():
        (name,) = [name for name in SHAPES if path.endswith(f"['{name}']")]
        assert spec == tuple(PLACES[name])


def test_a_single_array_as_parameters():
    mesh = make_mesh(MeshOptions(fsdp=8))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    params, whole = (
        jax.device_put(jnp.ones((16, 2)), sharding),
        NamedSharding(mesh, PartitionSpec()),
    )
    state = initial_state(params, optax.adam(1e-3), sharding, whole).opt_state
    assert state[0].mu.sharding.spec == PartitionSpec("fsdp")
    assert state[0].count.sharding.spec == PartitionSpec()
