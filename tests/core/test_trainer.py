"""The exact step, and fit, evaluate and predict around it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from core import Loss, MeshOptions, Trainer, TrainOptions, UserError, make_mesh
from core.errors import NotFinite
from core.mesh import row_shards
from core.optimizer import AdamWOptions
from core.report import ReportOptions
from core.trainer import microbatches
from tests import toy

QUIET = ReportOptions(quiet=True)


def mesh(data=1, fsdp=1, tensor=1):
    devices = jax.devices()[: data * fsdp * tensor]
    return make_mesh(MeshOptions(data, fsdp, tensor), devices)


def options(**kwargs):
    return TrainOptions(report=QUIET, **kwargs)


def toy_trainer(mesh, optimizer=None, **kwargs):
    """With plain SGD, a step's change of the parameters is the gradient times the rate."""
    optimizer = optimizer or optax.sgd(0.01)
    opts = options(batch_size=16, **kwargs)
    return Trainer(
        toy.collate, toy.loss, toy.predict, toy.init, optimizer, mesh, toy.examples(3), options=opts
    )


def value_trainer(on=None, batch_size=8, microbatches=1, loss=None, optimizer=None, **kwargs):
    """The loss of a row is the value planted in it, times a parameter of 1."""

    def collate(examples):
        return {"value": np.asarray(examples, np.float32)}

    def planted(params, batch, key):
        return Loss(params["one"] * batch["value"])

    def predict(params, batch, keys):
        return batch["value"]

    return Trainer(
        collate,
        loss or planted,
        predict,
        {"one": np.ones((), np.float32)},
        optimizer or optax.sgd(0.0),
        on or mesh(),
        [0.0],
        options=options(batch_size=batch_size, microbatches=microbatches, **kwargs),
    )


def close(a, b, tolerance=1e-12):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def after(trainer, steps, data):
    """Parameters and last metrics after some steps, on the host."""
    result = trainer.fit(data)
    assert result["steps"] == steps
    return jax.device_get(trainer.state.params), result["train"]


MESHES = [dict(data=8), dict(fsdp=8), dict(data=2, fsdp=4), dict(data=3), dict(data=2, tensor=2)]


@functools.cache
def one_device_reference():
    return after(toy_trainer(mesh(), steps=3), 3, toy.examples(40))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_devices_do_not_change_loss_or_gradient(x64, sizes):
    trainer = toy_trainer(mesh(**sizes), steps=3)
    params, metrics = after(trainer, 3, toy.examples(40))
    wanted_params, wanted_metrics = one_device_reference()
    close(params, wanted_params)
    rate = "examples_per_second"
    close({**metrics, rate: 0}, {**wanted_metrics, rate: 0})
    assert metrics["weight"] < 16 * 6 and jax.tree.leaves(params)[0].dtype == np.float64


def test_fsdp_splits_parameters_and_optimizer_state_but_no_scanned_axis():
    trainer = toy_trainer(mesh(fsdp=8), optax.adam(1e-3))
    assert trainer.inferred.specs["layers"] == P(None, "fsdp")

    def share_split(tree):
        leaves = jax.tree.leaves(tree)
        whole = sum(leaf.nbytes for leaf in leaves)
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        return (whole - held) / (whole * 7 / 8)

    assert share_split(trainer.state.params) > 0.9
    assert share_split(trainer.state.opt_state) > 0.9
    trainer.fit(toy.examples(20))
    assert share_split(trainer.state.params) > 0.9, "the step must keep the shardings"


def without_dropout(params, batch, key):
    return toy.loss(params, batch, None)


def in_microbatches(sizes, microbatches):
    opts = options(batch_size=16, microbatches=microbatches)
    trainer = Trainer(
        toy.collate,
        without_dropout,
        None,
        toy.init,
        optax.sgd(0.01),
        mesh(**sizes),
        toy.examples(3),
        options=opts,
    )
    # 36 rows: the last step has only 4, so most of its microbatches are empty.
    return after(trainer, 3, toy.examples(36))


one_batch_reference = functools.cache(lambda: in_microbatches({}, 1))


@pytest.mark.parametrize(
    "sizes, microbatches",
    [({}, 2), ({}, 16), (dict(data=8), 2), (dict(data=8), 16), (dict(data=2, fsdp=4), 4)],
)
def test_microbatches_do_not_change_loss_or_gradient(x64, sizes, microbatches):
    close(in_microbatches(sizes, microbatches), one_batch_reference())


@pytest.mark.parametrize(
    "batch_size, sizes, parts",
    [(16, {}, 16), (16, dict(data=8), 2), (16, dict(data=2, fsdp=4), 2), (12, dict(data=8), 2)]
    + [(4, dict(data=8), 1), (25, dict(data=2), 25), (6, dict(data=2, tensor=4), 3)],
    ids=str,
)
def test_auto_microbatches_give_a_cpu_device_one_row_at_most(batch_size, sizes, parts):
    layout = value_trainer(mesh(**sizes), batch_size, "auto").layout
    assert layout.microbatches == parts and layout.width == row_shards(mesh(**sizes))


def test_auto_microbatches_are_one_on_an_accelerator(monkeypatch):
    monkeypatch.setattr("core.trainer.is_cpu", lambda mesh: False)
    assert microbatches(TrainOptions(microbatches="auto"), mesh()) == 1
    assert microbatches(TrainOptions(microbatches=4), mesh()) == 4


def test_auto_microbatches_change_no_number_and_are_kept_as_such(x64):
    close(in_microbatches(dict(data=8), "auto"), one_batch_reference())
    assert TrainOptions(microbatches="auto").settings()["microbatches"] == "auto"


@pytest.mark.parametrize("sizes, k", [({}, 1), ({}, 2), (dict(data=2), 1), (dict(data=8), 2)])
def test_a_token_counts_the_same_wherever_it_is(sizes, k):
    """11 tokens at 2.0 and 101 at 1.0: 123 / 112, and not the mean of two means (1.5)."""

    def loss(params, batch, key):
        cost, tokens = batch["row"][:, 0], batch["row"][:, 1]
        weights = jnp.arange(101)[None] < tokens[:, None]
        return Loss(params["one"] * jnp.broadcast_to(cost[:, None], weights.shape), weights)

    trainer = Trainer(
        lambda examples: {"row": np.asarray(examples, np.float32)},
        loss,
        None,
        {"one": np.ones(())},
        optax.sgd(0.0),
        mesh(**sizes),
        [(0.0, 0)],
        options=options(batch_size=2, microbatches=k),
    )
    data = [(2.0, 11), (1.0, 101)]
    assert trainer.evaluate(data)["loss"] == pytest.approx(123 / 112, rel=1e-6)
    assert trainer.fit(data)["train"]["loss"] == pytest.approx(1.0982, abs=5e-5)


def test_a_batch_without_weight_has_loss_and_gradient_zero():
    def loss(params, batch, key):
        return Loss(params["one"] * batch["value"], jnp.zeros_like(batch["value"]))

    trainer = value_trainer(loss=loss, optimizer=optax.sgd(1.0))
    metrics = trainer.fit([3.0] * 8)["train"]
    assert metrics["loss"] == metrics["grad_norm"] == metrics["weight"] == 0
    assert trainer.state.params["one"] == 1


@pytest.mark.parametrize("k", [1, 2])
def test_the_step_moves_no_batch_data_between_devices(k):
    trainer = toy_trainer(mesh(data=8), microbatches=k)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=trainer.layout.sharding),
        trainer.layout.batch(toy.collate(toy.examples(16)), 16),
    )
    text = trainer.step_jit.lower(trainer.state, batch).compile().as_text()
    assert "all-reduce" in text, "gradients are summed over the devices"
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)


@pytest.mark.parametrize("number", [1, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("sizes, k", [({}, 1), (dict(data=3), 2), (dict(data=4, fsdp=2), 4)])
def test_evaluation_weighs_and_prediction_returns_exactly_all(number, sizes, k):
    trainer = value_trainer(mesh(**sizes), microbatches=k)
    values = [float(2**i) for i in range(number)]
    metrics = trainer.evaluate(values)
    assert metrics == {"loss": sum(values) / number, "weight": number}
    assert trainer.predict(values) == values


def test_nothing_to_predict_is_no_output():
    assert value_trainer().predict([]) == []


@pytest.mark.parametrize("number", [511, 512, 513])
def test_many_batches_lose_no_example(number):
    metrics = value_trainer(mesh(data=8), batch_size=16).evaluate(list(range(number)))
    assert metrics == {"loss": (number - 1) / 2, "weight": number}


def test_padding_rows_repeat_a_real_row_and_have_no_gradient():
    """A row of zeros would give log(0), and through `where` a gradient of zero times infinity."""

    def loss(params, batch, key):
        return Loss(jnp.log(params["one"] * batch["value"]))

    trainer = value_trainer(mesh(data=8), loss=loss, optimizer=optax.sgd(1.0))
    metrics = trainer.fit([np.e] * 3)["train"]
    assert metrics["loss"] == pytest.approx(1)
    assert metrics["weight"] == 3
    assert float(trainer.state.params["one"]) == pytest.approx(0, abs=1e-6), "1 - d log(x e) / dx"


def test_fewer_examples_than_a_batch_train():
    trainer = value_trainer(optimizer=optax.sgd(0.5), epochs=2)
    assert trainer.fit([1.0, 2.0, 3.0])["steps"] == 2
    assert float(trainer.state.params["one"]) == pytest.approx(1 - 0.5 * 2 * 2)


def test_schedules_and_logs_count_optimizer_steps(tmp_path):
    optimizer = AdamWOptions(1.0, "linear").build(8)
    trainer = value_trainer(microbatches=4, optimizer=optimizer, steps=8)
    rates = []

    def step(state, batch, inner=trainer.step_jit):
        state, metrics = inner(state, batch)
        rates.append(float(metrics["learning_rate"]))
        return state, metrics

    trainer.step_jit = step
    assert trainer.fit([1.0] * 8)["train"]["learning_rate"] == 0.125
    assert rates == [1 - n / 8 for n in range(8)]


def test_the_logged_rate_is_the_applied_one(x64):
    rate = optax.linear_schedule(0.5, 0.1, 4)
    trainer = value_trainer(
        optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=rate), steps=1
    )
    before = 1.0
    for _ in range(4):
        logged = trainer.fit([1.0] * 8)["train"]["learning_rate"]
        now = float(trainer.state.params["one"])
        assert before - now == pytest.approx(logged, rel=1e-6)
        before = now


@functools.cache
def one_free_step():
    trainer = toy_trainer(mesh(), seed=3)
    start = jax.device_get(trainer.state.params)
    return start, *after(trainer, 1, toy.examples(16))


@pytest.mark.parametrize("sizes", [{}, dict(data=8), dict(fsdp=8)], ids=str)
def test_the_norm_is_clipped_on_the_whole_tree(x64, sizes):
    data = toy.examples(16)
    start, end, metrics = one_free_step()
    clipped = toy_trainer(mesh(**sizes), seed=3, clip_norm=0.1)
    after(clipped, 1, data)  # changes the parameters by 0.01 times the gradient
    change = jax.tree.map(lambda new, old: new - old, clipped.state.params, start)
    assert metrics["grad_norm"] > 0.2
    assert float(optax.tree.norm(change)) == pytest.approx(0.001)
    full = jax.tree.map(lambda new, old: new - old, end, start)
    close(change, jax.tree.map(lambda x: x * 0.1 / metrics["grad_norm"], full), 1e-10)


def test_a_gradient_below_the_limit_is_left_alone(x64):
    start, end, metrics = one_free_step()
    clipped = toy_trainer(mesh(), seed=3, clip_norm=2 * metrics["grad_norm"])
    params, _ = after(clipped, 1, toy.examples(16))
    close(params, end)


def test_each_microbatch_draws_its_own_dropout():
    def loss(params, batch, key):
        drawn = 0.0 if key is None else jax.random.uniform(key)
        return Loss(params["one"] * jnp.full_like(batch["value"], drawn))

    alike = [
        value_trainer(loss=loss, microbatches=k).fit([1.0] * 8)["train"]["loss"] for k in (1, 8)
    ]
    first = float(
        jax.random.uniform(
            jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), 0), 0)
        )
    )  # seed, stream, step, microbatch
    assert alike[0] == pytest.approx(first) and abs(alike[1] - first) > 1e-3


def test_the_step_gives_its_memory_back():
    trainer = toy_trainer(mesh(data=2))
    before = jax.tree.leaves(trainer.state.params)
    trainer.fit(toy.examples(16))
    assert all(leaf.is_deleted() for leaf in before)


def test_the_step_compiles_once():
    trainer = toy_trainer(mesh(data=4), optax.adam(1e-3), epochs=3)
    trainer.fit(toy.examples(37))
    assert trainer.step_jit._cache_size() == 1


def test_the_step_is_pure_and_runs_under_scan_and_vmap(x64):
    trainer, data = toy_trainer(mesh()), toy.examples(16)
    batch = trainer.layout.batch(toy.collate(data), 16)
    start = trainer.state
    by_hand = trainer.step(trainer.step(start, batch)[0], batch)[0]
    scanned, _ = jax.lax.scan(lambda s, _: trainer.step(s, batch), start, length=2)
    close(scanned.params, by_hand.params)
    pair = jax.tree.map(lambda x: jnp.stack([x, x]), start)
    mapped, metrics = jax.vmap(trainer.step, in_axes=(0, None))(pair, batch)
    close(jax.tree.map(lambda x: x[1], mapped.params), trainer.step(start, batch)[0].params)
    assert metrics["loss"].shape == (2,)


def test_the_callers_parameters_stay_the_callers():
    params = {"one": jnp.ones(())}
    trainer = Trainer(
        lambda examples: {"value": np.asarray(examples, np.float32)},
        lambda params, batch, key: Loss(params["one"] * batch["value"]),
        None,
        params,
        optax.sgd(0.1),
        mesh(),
        [1.0],
        options=options(batch_size=8),
    )
    trainer.fit([1.0] * 8)
    assert float(params["one"]) == 1 and float(trainer.state.params["one"]) < 1


def test_integers_stay_untouched_and_weights_single_under_bfloat16():
    seen = {}

    def loss(params, batch, key):
        seen.update({name: x.dtype for name, x in (params | batch).items()})
        return Loss(jnp.sum(params["w"]) * batch["value"] * params["steps"])

    params = {"w": np.ones(4), "steps": np.int32(3), "flag": np.array(True)}
    trainer = Trainer(
        lambda examples: {
            "value": np.asarray(examples, np.float32),
            "id": np.arange(len(examples)) + 2**24 + 1,
        },
        loss,
        None,
        params,
        optax.adamw(0.1, weight_decay=0.5),
        mesh(data=2),
        [1.0],
        options=options(batch_size=8, compute_dtype="bfloat16"),
    )
    trainer.fit([1.0] * 8)
    assert seen == {
        "w": jnp.bfloat16,
        "steps": jnp.int32,
        "flag": bool,
        "value": jnp.float32,
        "id": jnp.int32,
        "row_mask": bool,
    }
    state = trainer.state
    assert state.params["w"].dtype == jnp.float32 and float(state.params["w"][0]) < 1
    assert int(state.params["steps"]) == 3 and bool(state.params["flag"])
    assert {x.dtype for x in jax.tree.leaves(state.opt_state)} == {
        jnp.float32.dtype,
        jnp.int32.dtype,
    }


def test_dropout_depends_on_seed_and_step_alone(x64):
    data = toy.examples(16)

    weights = toy.init(jax.random.key(0))

    def losses(seed):
        trainer = Trainer(
            toy.collate,
            toy.loss,
            None,
            weights,
            optax.sgd(0.0),
            mesh(),
            data[:1],
            options=options(batch_size=16, seed=seed),
        )
        return [trainer.fit(data)["train"]["loss"] for _ in range(2)]

    first, again, other = losses(1), losses(1), losses(2)
    assert first == again
    assert first[0] != first[1] and first[0] != other[0]


def test_every_epoch_visits_each_example_once_in_its_own_order():
    seen = []

    def collate(examples):
        seen.append([int(e) for e in examples])
        return {"value": np.asarray(examples, np.float32)}

    def orders(**kwargs):
        trainer = Trainer(
            collate,
            lambda params, batch, key: Loss(params["one"] * batch["value"]),
            None,
            {"one": np.ones(())},
            optax.sgd(0.0),
            mesh(),
            [0.0],
            options=options(batch_size=5, epochs=2, **kwargs),
        )
        seen.clear()
        trainer.fit(list(range(20)))
        rows = sum(seen, [])
        return rows[:20], rows[20:]

    one, two = orders()
    assert sorted(one) == sorted(two) == list(range(20))
    assert one != two and one != list(range(20))
    assert (one, two) == orders()
    assert one != orders(seed=1)[0]


def test_a_source_is_asked_once_the_epoch_before_is_over():
    asked = []

    def source(epoch, params):
        asked.append((epoch, float(params["one"])))
        return {"value": np.full(4 + epoch, 1.0, np.float32)}

    trainer = Trainer(
        lambda examples: examples,
        lambda params, batch, key: Loss(params["one"] * batch["value"]),
        None,
        {"one": np.ones(())},
        optax.sgd(0.125),
        mesh(data=2),
        {"value": np.ones(1)},
        options=options(batch_size=2, epochs=3),
    )
    assert trainer.fit(source)["steps"] == 2 + 3 + 3
    assert asked == [(0, 1.0), (1, 1 - 2 / 8), (2, 1 - 5 / 8)]


def test_steps_end_a_run_in_the_middle_of_an_epoch():
    assert value_trainer(steps=5).fit([1.0] * 24)["steps"] == 5


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_that_is_not_finite_stops_before_it_spoils_the_weights(microbatches):
    trainer = value_trainer(
        optimizer=optax.adam(0.5), batch_size=2, microbatches=microbatches, steps=40
    )
    data = [1.0] * 9 + [np.nan]
    with pytest.raises(NotFinite, match=r"^Step [1-5] \(epoch 0\) was not finite.* in row 9"):
        trainer.fit(data)
    assert np.isfinite(jax.device_get(jax.tree.leaves(trainer.state))).all()


def test_keys_of_prediction_depend_on_the_position_alone():
    data = toy.examples(19)
    small = toy_trainer(mesh()).predict(data)
    trainer = Trainer(
        toy.collate,
        toy.loss,
        toy.predict,
        toy.init,
        None,
        mesh(data=8),
        data[:1],
        options=options(batch_size=5),
    )
    for a, b in zip(small, trainer.predict(data), strict=True):
        np.testing.assert_array_equal(a["sample"], b["sample"])
        np.testing.assert_allclose(a["mean"], b["mean"], atol=1e-5)
    assert len({float(out["sample"][0]) for out in small}) == 19


@pytest.mark.parametrize("rows", [1, 8, 13])
def test_predict_step_pads_and_returns_all_rows(rows):
    trainer = toy_trainer(mesh(data=8))
    batch = toy.collate(toy.examples(rows))
    keys = jax.random.split(jax.random.key(7), rows)
    out = trainer.predict_step(trainer.state.params, batch, keys)
    wanted = toy.predict(trainer.state.params, batch, keys)
    np.testing.assert_array_equal(out["sample"], wanted["sample"])
    np.testing.assert_allclose(out["mean"], wanted["mean"], atol=1e-5)


def test_score_sees_all_outputs_in_order_and_decides_the_best():
    data, calls = [3.0, 1.0, 2.0], []

    def score(outputs, examples):
        calls.append(outputs)
        return {"sum": float(sum(outputs)) + len(calls), "same": float(outputs == examples)}

    trainer = value_trainer(epochs=3, batch_size=2)
    result = trainer.fit([1.0] * 4, data, score, best=("sum", "min"))
    assert result["valid"] == {"loss": 2.0, "weight": 3, "sum": 9.0, "same": 1.0}
    assert result["best"] == {"loss": 2.0, "weight": 3, "sum": 7.0, "same": 1.0, "step": 2}


def test_a_loss_over_the_whole_batch_sees_it_at_once():
    def loss(params, batch, key):
        real = batch["row_mask"]
        mean = jnp.sum(jnp.where(real, batch["value"], 0)) / jnp.sum(real)
        return Loss(params["one"] * (batch["value"] - mean) ** 2)

    def trainer(sizes, k=1):
        return Trainer(
            lambda examples: {"value": np.asarray(examples, np.float32)},
            loss,
            None,
            {"one": np.ones(())},
            optax.sgd(0.0),
            mesh(**sizes),
            [0.0],
            options=options(batch_size=8, microbatches=k),
            whole_batch=True,
        )

    for sizes in ({}, dict(data=8)):
        assert trainer(sizes).evaluate([1.0, 2.0, 6.0])["loss"] == pytest.approx(14 / 3)
    with pytest.raises(UserError, match="1 microbatch instead of 2"):
        trainer({}, 2)


def broken(**functions):
    return Trainer(
        functions.get("collate", toy.collate),
        functions.get("loss", toy.loss),
        functions.get("predict", toy.predict),
        functions.get("init", toy.init),
        optax.sgd(1.0),
        mesh(),
        toy.examples(2),
        options=options(batch_size=4),
    )


@pytest.mark.parametrize(
    "functions, message",
    [
        (dict(loss=lambda params, batch, rng: None), r"loss takes \(params, batch, rng\)"),
        (
            dict(loss=lambda params, batch, key: Loss(batch["labels"])),
            r"loss failed at .*test_trainer.py, line \d+, with KeyError: .*x: float32\[4, 16\]",
        ),
        (
            dict(loss=lambda params, batch, key: Loss(batch["x"] @ batch["y"])),
            r"loss failed at .*, with TypeError: dot_general requires",
        ),
        (dict(loss=lambda params, batch, key: Loss(jnp.mean(batch["x"]))), "leading axis must be"),
        (dict(predict=lambda params, batch, keys: batch["x"][0]), r"predict returned .*\[16\]"),
        (dict(init=lambda key: {"in": jnp.ones(3)["a"]}), r"init failed at .*, line \d+, with"),
        (dict(collate=lambda examples: [1]), "collate returned a list"),
        (dict(collate=lambda examples: {"x": np.ones(3)}), r"leading axis 4"),
    ],
)
def test_broken_functions_are_named_at_once(functions, message):
    with pytest.raises(UserError, match=message):
        broken(**functions)


def test_a_folder_with_a_finished_run_is_left_as_it_is(tmp_path):
    trainer = value_trainer(steps=2)
    trainer.folder = tmp_path
    result = trainer.fit([1.0] * 8)
    rows = (tmp_path / "metrics.jsonl").read_text()
    again = value_trainer(steps=2)
    again.folder = tmp_path
    second = again.fit([1.0] * 8)
    assert second["steps"] == 2 and second["train"] == result["train"]
    assert float(again.state.params["one"]) == float(trainer.state.params["one"])
    assert (tmp_path / "metrics.jsonl").read_text() == rows


@pytest.mark.parametrize(
    ("score", "best", "says"),
    [
        (lambda outputs, examples: 3, None, "score returned 3; it must be a dict of numbers"),
        (lambda outputs, examples: {"a": "b"}, None, "score returned {'a': 'b'}"),
        (None, "loss", "best='loss' must be a metric and"),
    ],
)
def test_scores_and_best_are_checked(score, best, says):
    with pytest.raises(UserError, match=says):
        value_trainer().fit([1.0], [1.0], score, best=best)


def test_scores_may_be_arrays(tmp_path):
    trainer = value_trainer()
    trainer.folder = tmp_path
    result = trainer.fit([1.0], [1.0], lambda o, e: {"a": jnp.float32(2)}, best=("a", "max"))
    assert result["best"]["a"] == 2.0 and isinstance(result["best"]["a"], float)


def test_what_a_trainer_lacks_is_said():
    trainer = Trainer(
        toy.collate, None, toy.predict, toy.init, None, mesh(), toy.examples(2), options=options()
    )
    with pytest.raises(UserError, match="only predicts: to fit, give it a loss"):
        trainer.fit(toy.examples(4))
    with pytest.raises(UserError, match="only predicts: to evaluate"):
        trainer.evaluate(toy.examples(4))
    trainer = value_trainer()
    with pytest.raises(UserError, match="training data: there are no examples"):
        trainer.fit([])
    with pytest.raises(UserError, match="evaluation data: there are no examples"):
        trainer.evaluate([])
    with pytest.raises(UserError, match="give `valid` too"):
        trainer.fit([1.0], best=("loss", "min"))
    with pytest.raises(
        UserError, match="metric 'bleu', which the evaluation does not have; it has"
    ):
        trainer.fit([1.0], [1.0], best=("bleu", "max"))
    with pytest.raises(UserError, match='"min" or "max"'):
        trainer.fit([1.0], [1.0], best=("loss", "least"))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(batch_size=0), "batch_size 0"),
        (dict(microbatches=-1), "microbatches -1"),
        (dict(clip_norm=float("nan")), "clip_norm nan"),
        (dict(steps=-3), "steps -3"),
    ],
)
def test_options_out_of_range_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        TrainOptions(**wrong)
    with pytest.raises(UserError, match="seed .* must be at least 0 and below 2147483648"):
        TrainOptions(seed=2**63)
    with pytest.raises(UserError, match="compute_dtype float8 is not supported"):
        value_trainer(compute_dtype="float8")
    with pytest.raises(UserError, match="needs double precision: set JAX_ENABLE_X64=1"):
        value_trainer(compute_dtype="float64")
