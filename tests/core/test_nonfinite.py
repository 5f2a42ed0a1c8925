"""A loss or gradient that is not finite: nothing is spoilt, it is named, and can be run again."""

import dataclasses
import json
import signal
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from core import Loss, MeshOptions, Trainer, TrainOptions, UserError, make_mesh
from core.checkpoint import FOLDER, steps
from core.data import order
from core.report import ReportOptions, read_rows
from core.run import Run, RunOptions, Shared, launch
from core.signals import Ended, Stopped
from core.step import step_key
from tests.core.test_resume import bits, rows
from tests.core.test_signals import interrupt

BAD = 13  # of the examples


def collate(examples):
    x = np.asarray([example["x"] for example in examples], np.float32)
    return {"x": x, "id": np.asarray([example["id"] for example in examples])}


def loss(params, batch, key):
    """Infinite in the bad row."""
    factor = jnp.where(batch["id"][:, None] == BAD, jnp.inf, 1)
    value = batch["x"] * params["a"]["w"] + params["b"]
    if key is not None:
        value += jax.random.normal(key, value.shape) * 0.1
    return Loss(value**2 * factor)


def loss_with_a_bad_gradient(params, batch, key):
    """In the bad row the square root of 0, whose slope is infinite."""
    factor = jnp.where(batch["id"][:, None] == BAD, 0.0, 1)
    return Loss(jnp.sqrt(params["a"]["w"] * factor) + params["b"] ** 2)


def trainer(folder, fn=loss, optimizer=None, sizes=(2, 1), **options):
    given = {"batch_size": 4, "steps": 12, "save_every": 5} | options
    return Trainer(
        collate,
        fn,
        None,
        {"a": {"w": np.ones((1, 3))}, "b": np.zeros((1, 3))},
        optimizer or optax.adam(optax.linear_schedule(0.1, 0, 12)),
        make_mesh(MeshOptions(*sizes), jax.devices()[: sizes[0]]),
        examples(2),
        options=TrainOptions(**given, report=ReportOptions(log_every=4, quiet=True)),
        folder=folder,
    )


def examples(number=20):
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=3) ** 2 + 0.1, "id": i} for i in range(number)]


def first_bad_step(seed=0):
    """The step, counted from 1, that has the bad example, and its rows."""
    rows = order(seed, 0, 20).reshape(5, 4)
    step = int(np.flatnonzero((rows == BAD).any(1))[0])
    return step + 1, rows[step]


def seed_with_bad_step(step):
    return next(seed for seed in range(99) if first_bad_step(seed)[0] == step)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_step_the_tensor_and_the_row_are_named(tmp_path, microbatches):
    seed = seed_with_bad_step(3)
    listed = ", ".join(str(row) for row in first_bad_step(seed)[1])
    one = trainer(tmp_path, seed=seed, microbatches=microbatches)
    with pytest.raises(UserError) as error:
        one.fit(examples())
    assert str(error.value).startswith(
        "Step 3 (epoch 0) was not finite. Done once more, it has loss inf and norm of the gradient "
        "inf. The first of 3 tensors that are not finite is the gradient of a/w. Of the rows of "
        f"the step, {listed}, the loss is not finite in row {BAD}. To run that step again: replay "
        f"{tmp_path}. No update was applied from there on."
    )


def test_a_gradient_alone_is_named_and_the_rows_of_the_step(tmp_path):
    with pytest.raises(UserError) as error:
        trainer(tmp_path, loss_with_a_bad_gradient, seed=seed_with_bad_step(2)).fit(examples())
    assert "Step 2 (epoch 0)" in str(error.value)
    assert "The first tensor that is not finite is the gradient of a/w" in str(error.value)
    assert ", each has a finite loss." in str(error.value)


def test_a_sum_that_overflows_is_named():
    def big(params, batch, key):
        return Loss(batch["x"] * params["a"]["w"] * 1e25 * (batch["id"][:, None] == BAD))

    with pytest.raises(UserError, match="The first tensor that is not finite is the norm of the g"):
        trainer(None, big).fit(examples())


def test_the_state_before_is_saved_and_the_run_goes_on_from_there_if_told_to(tmp_path):
    """Stop, then skip: the same numbers as with skip from the beginning."""
    seed = seed_with_bad_step(4)
    stopped = trainer(tmp_path / "a", seed=seed)
    with pytest.raises(UserError, match="Step 4 "):
        stopped.fit(examples())
    assert steps(tmp_path / "a" / FOLDER) == [3]
    assert int(stopped.state.step) == 3 and int(stopped.state.first_bad) == 0

    again = trainer(tmp_path / "a", seed=seed)
    with pytest.raises(UserError, match="Step 4 "):  # the same command meets the same step
        again.fit(examples())
    on = trainer(tmp_path / "a", seed=seed, on_nonfinite="skip")
    on.fit(examples())

    skipping = trainer(tmp_path / "b", seed=seed, on_nonfinite="skip")
    skipping.fit(examples())
    assert bits(on.state) == bits(skipping.state)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


def test_a_step_that_is_skipped_changes_nothing_but_the_count(tmp_path):
    seed = seed_with_bad_step(2)
    one = trainer(tmp_path, seed=seed, on_nonfinite="skip", steps=5, optimizer=optax.adam(0.1))
    states, inner = [], one.step_jit

    def watched(state, batch):
        new = inner(state, batch)
        states.append(jax.device_get(new[0]))
        return new

    one.step_jit = watched
    one.fit(examples())
    first, second, third = states[:3]
    assert [int(state.step) for state in states] == [1, 2, 3, 4, 5]
    assert bits((second.params, second.opt_state)) == bits((first.params, first.opt_state))
    assert bits(third.params) != bits(second.params)
    assert [int(state.skipped) for state in states] == [0, 1, 1, 1, 1]
    assert int(states[-1].opt_state[0].count) == 4, "so a schedule waits, too"
    assert [row["skipped"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 1]


def test_rows_of_a_run_that_stops_have_no_count_of_skipped_steps(tmp_path):
    trainer(tmp_path).fit([e for e in examples() if e["id"] != BAD])
    assert all("skipped" not in row for row in read_rows(tmp_path / "metrics.jsonl"))


@pytest.mark.parametrize(("in_a_row", "max_skipped", "stops"), [(3, 3, True), (3, 4, False)])
def test_skipping_ends_after_so_many_in_a_row(tmp_path, in_a_row, max_skipped, stops):
    data = [example | {"id": 0} for example in examples()]
    for row in order(0, 0, 20).reshape(5, 4)[1 : 1 + in_a_row, 0]:
        data[row]["id"] = BAD
    one = trainer(tmp_path, on_nonfinite="skip", max_skipped=max_skipped, steps=5, save_every=1)
    if not stops:
        assert one.fit(data)["train"]["skipped"] == 3
        return
    with pytest.raises(
        UserError, match=r"^Step 2 \(epoch 0\) was not finite, nor the 2 after it\."
    ):
        one.fit(data)
    assert steps(tmp_path / FOLDER)[-1] == 3 and int(one.state.skipped) == 0


def test_a_row_of_skipped_steps_is_too_long_for_stop(tmp_path):
    data = [example | {"id": BAD} for example in examples()]
    skipping = {"on_nonfinite": "skip", "max_skipped": 99, "save_every": 3, "steps": 12}
    one = trainer(tmp_path, **skipping)
    interrupt(one, signal.SIGTERM, step=6)
    with pytest.raises(Stopped):
        one.fit(data)
    with pytest.raises(UserError, match="was not finite"):
        trainer(tmp_path, **skipping | {"on_nonfinite": "stop"}).fit(data)


def test_a_bad_state_is_never_saved_nor_evaluated_nor_given_to_a_source(tmp_path):
    seed = seed_with_bad_step(4)

    def source(epoch, params):
        assert epoch == 0, "it is not asked for another epoch"
        return examples()

    one = trainer(tmp_path / "a", seed=seed, save_every=99)
    one.options = dataclasses.replace(one.options, report=ReportOptions(log_every=99, quiet=True))
    with pytest.raises(UserError, match=r"Step 4 \(epoch 0\)"):
        one.fit(source)
    assert steps(tmp_path / "a" / FOLDER) == [], "within an epoch there is no checkpoint of it"

    for name, more in (("b", {"save_every": 5}), ("c", {"eval_every": 5, "save_every": 9})):
        one = trainer(tmp_path / name, seed=seed, **more)
        quiet = ReportOptions(log_every=99, quiet=True)
        one.options = dataclasses.replace(one.options, report=quiet)
        with pytest.raises(UserError, match=r"Step 4 \(epoch 0\)"):
            one.fit(examples(), examples(3))
        assert steps(tmp_path / name / FOLDER) == [3]
        assert not [
            r for r in read_rows(tmp_path / name / "metrics.jsonl") if r["split"] == "valid"
        ]


def test_the_batch_is_written_and_run_again(tmp_path):
    seed = seed_with_bad_step(3)
    _, ids = first_bad_step(seed)
    with pytest.raises(UserError, match=f"To run that step again: replay {tmp_path}"):
        trainer(tmp_path, seed=seed).fit(examples())
    with np.load(tmp_path / "nonfinite" / "batch.npz") as batch:
        np.testing.assert_array_equal(batch["id"], ids)
    finding = json.loads((tmp_path / "nonfinite" / "finding.json").read_text())
    assert finding["step"] == 3 and finding["rows"] == ids.tolist()
    for sizes in ((2, 1), (4, 1)):
        with pytest.raises(Ended, match=f"Step 3 of {tmp_path}, .* has loss .* in row {BAD}"):
            trainer(None, seed=seed, sizes=sizes, replay=str(tmp_path)).fit(examples())
    # The very parameters and key of that step.
    said = {}

    def mended(params, batch, key):
        if key is not None:
            data = (params["a"]["w"], jax.random.key_data(key))
            jax.debug.callback(lambda w, key: said.update(w=w, key=key), *data)
        return Loss(batch["x"] * params["a"]["w"])

    with pytest.raises(Ended, match="has loss .* and all of it is finite"):
        one = trainer(None, mended, seed=seed, sizes=(1, 1), replay=str(tmp_path))
        one.fit(examples())
    two_steps = trainer(None, seed=seed, steps=2)
    two_steps.fit(examples())
    np.testing.assert_array_equal(said["w"], two_steps.state.params["a"]["w"])
    key = jax.random.fold_in(step_key(seed, 2), 0)
    np.testing.assert_array_equal(said["key"], jax.random.key_data(key))
    with pytest.raises(UserError, match="has 4 rows, more than batch_size 2"):
        trainer(None, replay=str(tmp_path), batch_size=2).fit(examples())


def test_a_row_of_skipped_steps_that_began_in_an_earlier_epoch_of_a_source(tmp_path):
    """What is done again is the first of those steps whose examples are still at hand."""

    def source(epoch, params):
        return [example | {"id": BAD if epoch else 0} for example in examples()]

    one = trainer(tmp_path, on_nonfinite="skip", max_skipped=8, steps=30)
    seen = []
    one.options = dataclasses.replace(one.options, report=ReportOptions(log_every=1, quiet=True))
    with pytest.raises(UserError) as error:
        one.fit(lambda epoch, params: seen.append(epoch) or source(epoch, params))
    assert seen == [0, 1, 2]
    assert str(error.value).startswith(
        "Step 6 was not finite, nor the 7 after it. Done once more, step 11 (epoch 2) has loss inf"
    )
    listed = ", ".join(str(row) for row in order(0, 2, 20)[:4])
    assert f"Of the rows of the step, {listed}, " in str(error.value)
    finding = json.loads((tmp_path / "nonfinite" / "finding.json").read_text())
    assert finding["step"] == 11 and int(one.state.step) == 5
    with pytest.raises(Ended, match="Step 11 of"):
        trainer(None, replay=str(tmp_path)).fit(examples())


def test_a_bad_step_in_a_later_epoch_of_a_source_is_found_there(tmp_path):
    def source(epoch, params):
        return [e | {"id": BAD if epoch and e["id"] == BAD else 0} for e in examples()]

    step = int(np.flatnonzero(order(0, 1, 20) == BAD)[0]) // 4
    with pytest.raises(UserError, match=rf"^Step {5 + step + 1} \(epoch 1\).* in row {BAD}\."):
        trainer(tmp_path).fit(source)


def test_weights_that_are_not_finite_are_named_by_row(tmp_path):
    def weighted(params, batch, key):
        return Loss((batch["x"] * params["a"]["w"]) ** 2, jnp.where(batch["id"] == BAD, jnp.nan, 1))

    with pytest.raises(UserError, match=f"the loss is not finite in row {BAD}"):
        trainer(tmp_path, weighted).fit(examples())


def test_the_row_is_found_with_the_key_of_its_microbatch(tmp_path):
    """A loss that is not finite only where the key of the second microbatch is given."""
    seed = 3
    second = jax.random.key_data(jax.random.fold_in(step_key(seed, 0), 1))

    def keyed(params, batch, key):
        bad = False if key is None else (jax.random.key_data(key) == second).all()
        value = (batch["x"] * params["a"]["w"]) ** 2
        return Loss(jnp.where(bad, jnp.inf, value))

    listed = ", ".join(str(row) for row in order(seed, 0, 20)[2:4])
    with pytest.raises(UserError, match=rf"^Step 1 .* is not finite in row {listed}\."):
        trainer(tmp_path, keyed, seed=seed, microbatches=2).fit(examples())


class Weights(NamedTuple):
    a: dict
    b: dict


@pytest.mark.parametrize(
    "init",
    [Weights({"w": np.ones((1, 3))}, {}), [{"w": np.ones((1, 3))}, {3: np.ones(2)}]],
    ids=["named tuple", "integer key"],
)
def test_any_pytree_of_parameters_is_replayed(tmp_path, init):
    def fn(params, batch, key):
        w = params[0]["w"]
        return Loss(batch["x"] * w * jnp.where(batch["id"][:, None] == BAD, jnp.inf, 1))

    def one(folder, init, **options):
        mesh = make_mesh(devices=jax.devices()[:1])
        options = TrainOptions(batch_size=4, report=ReportOptions(quiet=True), **options)
        args = (collate, fn, None, init, optax.sgd(0.1), mesh, examples(2))
        return Trainer(*args, options=options, folder=folder)

    with pytest.raises(UserError, match="To run that step again"):
        one(tmp_path, init).fit(examples())
    with pytest.raises(Ended, match=f"row {BAD}"):
        one(None, init, replay=str(tmp_path)).fit(examples())
    more = [{"w": np.ones((1, 3))}, {"new": np.ones(2)}]
    with pytest.raises(UserError, match="cannot be restored: its params do not fit .*new is miss"):
        one(None, more, replay=str(tmp_path)).fit(examples())


def test_skipped_steps_are_news_once(tmp_path, capsys):
    seed = seed_with_bad_step(2)
    skipping = {"on_nonfinite": "skip", "seed": seed, "save_every": 4}
    one = trainer(tmp_path, **skipping)
    interrupt(one, signal.SIGTERM, step=8)
    with pytest.raises(Stopped):
        one.fit(examples())
    assert "2 steps so far were not finite" in capsys.readouterr().err
    trainer(tmp_path, **skipping).fit(examples())
    assert "2 steps so far" not in capsys.readouterr().err


def test_without_a_bad_step_there_is_nothing_to_replay(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} has no step to replay: .*nonfinite"):
        trainer(None, replay=str(tmp_path)).fit(examples())


def test_types_that_numpy_lacks_are_replayed(tmp_path):
    def narrow(examples):
        return {"x": collate(examples)["x"].astype(jnp.bfloat16), "id": collate(examples)["id"]}

    one = trainer(tmp_path)
    one.collate = narrow
    with pytest.raises(UserError, match="was not finite"):
        one.fit(examples())
    again = trainer(None, replay=str(tmp_path))
    seen = []
    layout, original = again.layout, again.layout.batch
    layout.batch = lambda arrays, rows: seen.append(arrays["x"].dtype) or original(arrays, rows)
    with pytest.raises(Ended):
        again.fit(examples())
    assert seen == [jnp.bfloat16]


@dataclasses.dataclass(frozen=True)
class Config:
    """A script."""

    rate: float = 0.1
    """Learning rate."""
    run: Shared = RunOptions(
        batch_size=4, steps=12, save_every=5, report=ReportOptions(log_every=4, quiet=True)
    )


def main(config):
    run = Run("toy", config)
    run.save("note", lambda path: path.touch())
    one = Trainer(
        collate,
        loss,
        None,
        {"a": {"w": np.ones((1, 3))}, "b": np.zeros((1, 3))},
        optax.sgd(config.rate),
        run.mesh,
        examples(2),
        options=config.run,
        folder=run.folder,
    )
    run.finish(one.fit(examples()))


def test_a_script_replays_with_the_options_of_the_run(tmp_path, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["script.py", "--hosts.address", "none", *arguments])
        try:
            launch(Config, main)
        except SystemExit as exit:
            return exit.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    code, _, err = call("--folder", "x", "--rate", "0.01", "--microbatches", "2")
    assert code == 2 and "error: Step" in err and "replay x" in err
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "x").rglob("*")}
    code, out, err = call("--replay", "x")
    assert (
        (code, err) == (0, "")
        and "Step " in out
        and " of x, done once more" in out
        and f"row {BAD}" in out
    )
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "x").rglob("*")} == before
    assert not (tmp_path / "runs").exists()
    code, _, err = call("--replay", "y")
    assert code == 2 and "y is not the folder of a run" in err
    code, out, err = call(
        "--folder", "x", "--rate", "0.01", "--microbatches", "2", "--on-nonfinite", "skip"
    )
    assert code == 0 and (tmp_path / "x" / "summary.json").exists()
