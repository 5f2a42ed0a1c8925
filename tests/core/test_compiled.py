"""A step of one's own, of several optimizer steps: counted, logged, saved and gone on with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from core import MeshOptions, Trainer, TrainOptions, UserError, make_mesh
from core.checkpoint import FOLDER, steps
from core.report import ReportOptions, read_rows
from tests import toy
from tests.core.test_resume import bits

BATCH = toy.collate(toy.examples(8))
ROWS = {name: x[None] for name, x in BATCH.items()} | {"row_mask": np.ones((1, 8), bool)}


def made(folder=None, devices=1, **options):
    given = {"steps": 12, "batch_size": 8, "report": ReportOptions(log_every=4, quiet=True)}
    return Trainer(
        toy.collate,
        toy.loss,
        toy.predict,
        toy.init,
        optax.adam(0.05),
        make_mesh(MeshOptions(), jax.devices()[:devices]),
        toy.examples(2),
        options=TrainOptions(**given | options),
        folder=folder,
    )


def thrice(trainer, bad=-1):
    """Three steps on targets that are shifted by how many were done; from step `bad` on, by NaN."""

    def iteration(carry):
        state, extra = carry

        def step(carry, _):
            state, shift = carry
            shift = jnp.where(state.step + 1 == bad, jnp.nan, shift)
            state, metrics = trainer.step(state, ROWS | {"y": ROWS["y"] + shift})
            return (state, shift + 0.1), metrics["loss"]

        (state, shift), losses = jax.lax.scan(step, (state, extra["shift"]), None, length=3)
        return (state, {"shift": shift}), {"loss": losses[-1], "weight": jnp.float32(8)}

    return iteration


EXTRA = {"shift": np.float32(0)}


def test_steps_are_those_of_the_trainer():
    trainer, other = made(), made()
    result = trainer.fit(step=thrice(trainer), extra=EXTRA)
    state, shift = other.state, jnp.float32(0)
    for _ in range(12):
        state, metrics = jax.jit(other.step)(state, ROWS | {"y": ROWS["y"] + shift})
        shift += 0.1
    assert result["steps"] == 12
    assert result["train"]["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        trainer.state.params,
        state.params,
    )
    assert trainer.extra["shift"] == pytest.approx(1.2) and EXTRA["shift"] == 0


def test_what_is_due_within_an_iteration_comes_after_it(tmp_path):
    trainer = made(tmp_path, eval_every=5, save_every=5, keep=9)
    trainer.fit(valid=toy.examples(4), step=thrice(trainer), extra=EXTRA)
    rows = [(row["step"], row["split"]) for row in read_rows(tmp_path / "metrics.jsonl")]
    trained = [(step, "train") for step in (6, 9, 12)]
    assert sorted(rows) == sorted([*trained, (6, "valid"), (12, "valid")])
    assert steps(tmp_path / FOLDER) == [6, 12]


def test_an_iteration_may_be_a_single_step(tmp_path):
    trainer = made(tmp_path, steps=4, report=ReportOptions(log_every=1, quiet=True))

    def once(carry):
        state, metrics = trainer.step(carry[0], ROWS)
        return (state, carry[1]), {name: metrics[name] for name in ("loss", "weight")}

    trainer.fit(step=once)
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["examples_per_second"] > 0


class Killed(BaseException):
    pass


@pytest.mark.parametrize("devices", [1, 8])
def test_a_run_that_was_interrupted_ends_as_if_not(tmp_path, devices):
    whole = made(devices=devices)
    result = whole.fit(step=thrice(whole), extra=EXTRA)
    one, count = made(tmp_path, save_every=3), 0

    def figures(metrics):
        nonlocal count
        count += 1
        if count == 3:
            raise Killed
        return metrics

    one.figures = figures
    with pytest.raises(Killed):
        one.fit(step=thrice(one), extra=EXTRA)
    again = made(tmp_path, devices=devices, save_every=3)
    ended = again.fit(step=thrice(again), extra=EXTRA)
    if devices == 1:
        assert bits((again.state, again.extra)) == bits((whole.state, whole.extra))
    assert ended["train"]["loss"] == pytest.approx(result["train"]["loss"], rel=1e-5)
    assert float(again.extra["shift"]) == float(whole.extra["shift"])


def test_stacked_states_are_stepped_side_by_side(tmp_path, x64):
    trainer, single = made(tmp_path), made()
    single.fit(step=thrice(single), extra=EXTRA)
    trainer.state = jax.tree.map(lambda x: jnp.stack([x, x * 0 if x.ndim else x]), trainer.state)

    def both(carry):
        carry, metrics = jax.vmap(thrice(trainer))(carry)
        return carry, jax.tree.map(jnp.mean, metrics)

    result = trainer.fit(step=both, extra={"shift": np.zeros(2, np.float32)})
    assert result["steps"] == 12
    for one, two in zip(*map(jax.tree.leaves, (single.state, trainer.state)), strict=True):
        np.testing.assert_allclose(two[0], one, rtol=1e-12, atol=1e-12)
    finished = made(tmp_path)
    finished.state = jax.tree.map(lambda x: jnp.stack([x, x]), finished.state)
    finished.fit(step=both, extra={"shift": np.zeros(2, np.float32)})
    assert bits(finished.state) == bits(trainer.state), "restored, and no step more"


def test_a_step_that_is_not_finite_stops_the_run_and_is_named(tmp_path):
    trainer = made(tmp_path, save_every=3)
    with pytest.raises(UserError, match="Step 8 was not finite. Its batch was made within a compi"):
        trainer.fit(step=thrice(trainer, bad=8), extra=EXTRA)
    assert steps(tmp_path / FOLDER) == [6]
    trainer = made(on_nonfinite="skip")
    trainer.fit(step=thrice(trainer, bad=12), extra=EXTRA)
    assert int(trainer.state.skipped) == 1


def returns(what):
    """An iteration that returns something of (carry, metrics of a step)."""

    def build(trainer):
        def iteration(carry):
            state, metrics = trainer.step(carry[0], ROWS)
            return what((state, carry[1]), {"loss": metrics["loss"]})

        return iteration

    return build


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (returns(lambda carry, metrics: carry[0]), "returned a TrainState"),
        (returns(lambda carry, metrics: (carry, 1.0)), "with a dict of metrics"),
        (returns(lambda carry, metrics: (carry[0], metrics)), "at .* it takes"),
        (
            returns(lambda carry, metrics: ((carry[0], {"shift": jnp.zeros(2)}), metrics)),
            r"at \[1\]\['shift'\] it takes float32\[\] and returns float32\[2\]",
        ),
        (
            returns(lambda carry, metrics: ((carry[0], {}), metrics)),
            r"it takes float32\[\] and returns nothing",
        ),
        (
            returns(lambda carry, metrics: (carry, {"loss": jnp.zeros(3)})),
            r"the metric 'loss' of shape \[3\]; it must be a single number",
        ),
        (lambda trainer: lambda carry: (carry, {"loss": jnp.zeros(())}), "did no optimizer step"),
    ],
)
def test_a_step_of_the_wrong_kind_is_refused(build, says):
    trainer = made()
    with pytest.raises(UserError, match=says):
        trainer.fit(step=build(trainer), extra=EXTRA)


def test_what_does_not_go_together_is_refused():
    trainer = made()
    with pytest.raises(UserError, match="either training data or a step"):
        trainer.fit()
    with pytest.raises(UserError, match="either training data or a step"):
        trainer.fit(toy.examples(8), step=thrice(trainer), extra=EXTRA)
    trainer = made(steps=0)
    with pytest.raises(UserError, match="set steps"):
        trainer.fit(step=thrice(trainer), extra=EXTRA)
