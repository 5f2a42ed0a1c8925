"""The three functions and `adapt`: by hand, against plain loops, and what must not matter."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.test_util import check_grads

from algorithms.maml import maml
from algorithms.maml.data import Tasks, sinusoid
from algorithms.maml.model import ModelConfig, build
from core import MeshOptions, Trainer, TrainOptions, make_mesh
from core.report import ReportOptions

SHAPE, WAYS = (8, 8, 1), 3
SMALL = ModelConfig(filters=4)


def learner(rate=0.3, steps=2, **more):
    return partial(maml.adapt, optimizer=optax.sgd(rate), steps=steps, **more)


def image_task(seed, shots=1, queries=2):
    rng = np.random.default_rng(seed)
    labels = [np.repeat(np.arange(WAYS, dtype=np.int32), each) for each in (shots, queries)]
    x = [rng.normal(size=(len(y), *SHAPE)).astype(np.float32) for y in labels]
    return {"support_x": x[0], "support_y": labels[0], "query_x": x[1], "query_y": labels[1]}


def image_functions(config=SMALL, **more):
    """The loss, the predict function and the weights of a small network for images."""
    model, init = build(config, SHAPE, WAYS)
    bound = {"model": model, "objective": maml.classification, "learner": learner(**more)}
    params = init(jax.random.key(0))
    return partial(maml.loss, **bound), partial(maml.predict, **bound), params


def sine_functions(rate=0.01, **more):
    model, init = build(SMALL, (1,), 1)
    bound = {"model": model, "objective": maml.regression, "learner": learner(rate, **more)}
    return partial(maml.loss, **bound), partial(maml.predict, **bound), init(jax.random.key(1))


def sines(number):
    return Tasks(partial(sinusoid, shots=3, queries=4), number, 0, "train")


def double(tree):
    """Floating-point numbers in double precision, where that is on."""
    return jax.tree.map(lambda x: x.astype(float) if x.dtype.kind == "f" else x, tree)


def test_one_step_on_a_parabola_worked_by_hand(x64):
    """t = 2 steps to 1.25, where the slope is 0.75; dt'/dt = 1 - 0.5 = 0.5, or 1 to first order."""

    def parabola(t):
        return jnp.square(t - 0.5) / 2

    def outer(t, **more):
        return parabola(maml.adapt(parabola, t, optax.sgd(0.5), 1, **more))

    t = jnp.asarray(2.0)
    assert jax.grad(outer)(t) == 0.375
    assert jax.grad(outer)(t, remat=True) == 0.375
    assert jax.grad(outer)(t, first_order=True) == 0.75
    assert maml.adapt(parabola, t, optax.sgd(0.5), 1) == 1.25


@pytest.mark.parametrize("nothing", [{"rate": 0.0}, {"steps": 0}], ids=str)
def test_without_inner_steps_the_loss_is_the_plain_query_loss(nothing, x64):
    loss, predict, params = image_functions(**nothing)
    batch = maml.collate([image_task(seed) for seed in range(3)])
    model, _ = build(SMALL, SHAPE, WAYS)
    out, answers = jax.jit(lambda p: (loss(p, batch, None), predict(p, batch, None)))(params)
    network = jax.jit(lambda x: nnx.merge(model, params)(x))
    for row in range(3):
        logits = network(batch["query_x"][row])
        probability = jax.nn.softmax(logits)[np.arange(6), batch["query_y"][row]]
        np.testing.assert_allclose(out.values[row], -np.mean(np.log(probability)), rtol=1e-6)
        right = np.mean(np.argmax(logits, 1) == batch["query_y"][row])
        np.testing.assert_allclose(out.metrics["accuracy"][row], right)
    np.testing.assert_allclose(answers[2], logits, rtol=1e-6)


def test_the_meta_gradient_is_the_derivative_of_the_loss(x64):
    loss, _, params = sine_functions()
    batch = maml.collate([sines(2)[0], sines(2)[1]])
    check_grads(
        jax.jit(lambda p: jnp.sum(loss(p, batch, None).values)),
        (double(params),),
        order=1,
        modes=["rev"],
        eps=1e-6,
        rtol=1e-6,
    )


def test_any_optimizer_of_optax_steps_as_in_a_plain_loop(x64):
    weights = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}

    def loss(p):
        return jnp.sum(jnp.sin(p["a"])) * jnp.sum(p["b"] ** 2)

    optimizer = optax.adam(0.1)
    state, looped = optimizer.init(weights), weights
    for _ in range(4):
        updates, state = optimizer.update(jax.grad(loss)(looped), state)
        looped = optax.apply_updates(looped, updates)
    found = maml.adapt(loss, weights, optimizer, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, looped)
    assert found["b"].dtype == float


def test_only_floating_parameters_learn_and_unused_ones_are_named_once():
    weights = {"used": jnp.ones(2), "count": jnp.arange(2), "idle": jnp.ones(3)}

    def loss(p):
        return jnp.sum(p["used"] * p["count"])

    def outer(trained):
        given = weights | trained
        return jnp.sum(maml.adapt(loss, given, optax.sgd(0.1), 2)["used"] ** 2)

    trained = {"used": weights["used"], "idle": weights["idle"]}
    with pytest.warns(UserWarning, match="leave idle alone: not used") as told:
        grads = jax.grad(outer)(trained)
    assert len(told) == 1
    assert not grads["idle"].any() and grads["used"].any()
    with pytest.warns(UserWarning):
        found = maml.adapt(loss, weights, optax.sgd(0.1), 2)
    np.testing.assert_array_equal(found["count"], weights["count"])
    np.testing.assert_allclose(found["used"], [1, 0.8], rtol=1e-6)


def test_steps_too_small_for_16_bits_are_not_lost():
    start = {"t": jnp.ones((), jnp.bfloat16)}
    found = maml.adapt(lambda p: -p["t"], start, optax.sgd(1e-3), 100)
    assert found["t"].dtype == jnp.bfloat16
    assert abs(float(found["t"]) - 1.1) < 0.01  # each step alone would round to nothing


def meta_gradient(config=SMALL, **more):
    loss, _, params = image_functions(config, **more)
    batch = maml.collate([image_task(seed) for seed in range(2)])
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(loss(p, batch, None).values)))
    return gradient(double(params))


def test_neither_remat_nor_the_kind_of_convolution_changes_a_gradient(x64):
    wanted = meta_gradient(ModelConfig(filters=4, convolution="patches"))
    got = meta_gradient(ModelConfig(filters=4, convolution="direct"), remat=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, wanted)


def temporaries(steps, remat):
    """Bytes that a compiled meta-gradient needs besides its arguments and results."""
    loss, _, params = sine_functions(steps=steps, remat=remat)
    points = jnp.zeros((1, 1000, 1))
    batch = dict.fromkeys((*maml.INPUTS, "query_y"), points)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(loss(p, batch, None).values)))
    return gradient.lower(params).compile().memory_analysis().temp_size_in_bytes


def test_with_remat_memory_hardly_grows_with_the_steps():
    assert temporaries(20, True) < 1.3 * temporaries(1, True)
    assert temporaries(20, False) > 4 * temporaries(1, False), "else the test would show nothing"


def test_with_the_supports_statistics_an_answer_depends_on_no_other_query(x64):
    task = image_task(0)
    others = task | {"query_x": np.concatenate([task["query_x"][:2], image_task(1)["query_x"][2:]])}
    backwards = task | {"query_x": task["query_x"][::-1]}
    batch = maml.collate([task, others, backwards])
    for statistics in ("support", "batch"):
        _, predict, params = image_functions(ModelConfig(filters=4, statistics=statistics))
        plain, replaced, turned = jax.jit(predict)(double(params), batch, None)
        np.testing.assert_allclose(turned, plain[::-1], rtol=1e-9)
        moved = np.abs(replaced[:2] - plain[:2]).max()
        assert moved < 1e-12 if statistics == "support" else moved > 1e-3


def trainer(sizes, microbatches, tasks=8, functions=image_functions):
    loss, predict, params = functions()
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return Trainer(
        maml.collate,
        loss,
        predict,
        double(params),
        optax.sgd(1e-3),
        make_mesh(MeshOptions(**sizes), devices),
        [image_task(0) if functions is image_functions else sines(1)[0]],
        options=TrainOptions(
            batch_size=tasks, microbatches=microbatches, report=ReportOptions(quiet=True)
        ),
    )


def trained(sizes, microbatches):
    one = trainer(sizes, microbatches, functions=sine_functions)
    metrics = one.fit(sines(12))["train"]  # the second step has four tasks
    return jax.device_get(one.state.params), metrics["loss"], np.stack(one.predict(sines(5)))


def test_neither_devices_nor_microbatches_change_the_result(x64):
    wanted = trained({"data": 1}, 1)
    for sizes, parts in [({"data": 8}, "auto"), ({"data": 2, "fsdp": 2}, 2), ({"data": 1}, "auto")]:
        got = trained(sizes, parts)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_no_task_moves_between_devices():
    """The step of 16 tasks on 8 devices sums over them, and moves nothing else."""
    one = trainer({"data": 8}, "auto", tasks=16)
    assert one.layout.microbatches == 2
    arrays = maml.collate([image_task(seed) for seed in range(16)])
    batch = one.layout.batch({k: x[one.layout.place(np.arange(16))] for k, x in arrays.items()}, 16)
    compiled = one.step_jit.lower(one.state, batch).compile().as_text()
    found = set(
        re.findall(r"\b(all-\w+|collective-\w+|reduce-scatter|ragged-all-to-all)\(", compiled)
    )
    assert found == {"all-reduce"}
