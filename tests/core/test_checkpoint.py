"""What is saved comes back to the bit, in another process and on another mesh."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from core import Loss, MeshOptions, Trainer, TrainOptions, UserError, make_mesh
from core.checkpoint import FOLDER, Best, Checkpoints, Saved, like
from core.report import ReportOptions
from tests import toy

ROOT = Path(__file__).parents[2]


def trainer(init=toy.init, folder=None, sizes=(8, 1), optimizer=None, **kwargs):
    mesh = make_mesh(MeshOptions(*sizes), jax.devices()[: math.prod(sizes)])
    options = TrainOptions(batch_size=16, report=ReportOptions(quiet=True), **kwargs)
    return Trainer(
        toy.collate,
        toy.loss,
        toy.predict,
        init,
        optimizer or optax.adam(0.01),
        mesh,
        toy.examples(2),
        options=options,
        folder=folder,
    )


def loss_of_saved(folder):
    return trainer(folder).evaluate(toy.examples(21, seed=1))["loss"]


def test_a_new_process_evaluates_to_the_same_bit(tmp_path):
    one = trainer(folder=tmp_path)
    one.fit(toy.examples(40))
    wanted = one.evaluate(toy.examples(21, seed=1))["loss"]
    code = (
        "import tests.conftest; from tests.core.test_checkpoint import loss_of_saved as f; "
        f"print(float(f({str(tmp_path)!r})).hex())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float.fromhex(run.stdout.split()[-1]) == wanted


@pytest.mark.parametrize("sizes", [(1, 1), (1, 8), (2, 4), (1, 3)])
def test_weights_open_on_another_mesh(tmp_path, sizes):
    one = trainer(folder=tmp_path, sizes=(1, 8))
    one.fit(toy.examples(16))
    other = trainer(tmp_path, sizes=sizes)
    for old, new in zip(*(jax.tree.leaves(t.state.params) for t in (one, other)), strict=True):
        np.testing.assert_array_equal(old, new)
    split = other.state.params["layers"].sharding
    assert split.mesh.shape["fsdp"] == sizes[1]
    assert split.spec == (P(None, "fsdp") if sizes[1] in (4, 8) else P())


def planted(folder, values, **kwargs):
    """A run whose evaluation gives these values, one after each step."""
    values = iter(values)

    def score(outputs, examples):
        return {"planted": next(values)}

    one = Trainer(
        lambda examples: {"value": np.asarray(examples, np.float32)},
        lambda params, batch, key: Loss(params["one"] * batch["value"]),
        lambda params, batch, keys: batch["value"],
        {"one": np.ones(())},
        optax.sgd(1.0),
        make_mesh(devices=jax.devices()[:1]),
        [1.0],
        options=TrainOptions(batch_size=1, report=ReportOptions(quiet=True), **kwargs),
        folder=folder,
    )
    return one, score


def kept(folder):
    return sorted(int(name) for name in os.listdir(folder / FOLDER))


@pytest.mark.parametrize(
    "mode, keep, best, steps",
    [("max", 1, 2, [2, 5]), ("min", 1, 3, [3, 5]), ("min", 2, 3, [3, 4, 5]), ("max", 9, 2, None)],
)
def test_the_best_and_the_latest_are_kept(tmp_path, mode, keep, best, steps):
    values = [3.0, 5.0, 1.0, float("nan"), 4.0]
    one, score = planted(tmp_path, values, epochs=5, keep=keep)
    result = one.fit([1.0], [1.0], score, best=("planted", mode))
    assert kept(tmp_path) == (steps or [1, 2, 3, 4, 5])
    assert Saved(tmp_path).step == result["best"]["step"] == best
    assert result["best"]["planted"] == values[best - 1]
    assert Saved(tmp_path, "last").step == 5
    whole = {"one": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
    assert float(Saved(tmp_path).load(whole)["one"]) == 1 - best, "it falls by 1 with each step"


def test_the_best_is_saved_where_no_save_is_due(tmp_path):
    values = [1.0, 5.0, 5.0, 0.0, 0.0]  # of steps 2, 4, 6, 8 and 9
    one, score = planted(tmp_path, values, steps=9, eval_every=2, save_every=3)
    result = one.fit([1.0], [1.0], score, best=("planted", "max"))
    assert result["best"]["step"] == Saved(tmp_path).step == 4, "the first of equals"
    assert kept(tmp_path) == [4, 9]


def test_any_pytree_of_arrays_is_saved(tmp_path):
    class Pair(NamedTuple):
        a: jax.Array
        b: tuple

    for number, params in enumerate([Pair(np.ones(2), (np.ones(3),)), {0: np.ones(2)}, np.ones(2)]):
        params = jax.tree.map(jax.numpy.asarray, params)
        checkpoints = Checkpoints(tmp_path / str(number), keep=1)
        checkpoints.save(1, params, {"step": jax.numpy.int32(1)}, {}, None)
        checkpoints.close()
        target = like(params), like({"step": jax.numpy.int32(1)})
        restored, _, _ = checkpoints.restore(*target, pytest.fail)
        assert jax.tree.structure(restored) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, restored, params)


def test_without_evaluations_the_latest_is_the_best(tmp_path):
    one, _ = planted(tmp_path, [], epochs=3, keep=2)
    one.fit([1.0])
    assert kept(tmp_path) == [2, 3] and Saved(tmp_path).step == 3


def test_saves_follow_their_own_interval(tmp_path):
    one, _ = planted(tmp_path, [], steps=7, save_every=3, keep=9)
    one.fit([1.0])
    assert kept(tmp_path) == [3, 6, 7], "and the end"


def test_a_save_copies_before_the_step_donates(tmp_path):
    params = {"w": jax.numpy.arange(1000.0)}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, params, {"step": jax.numpy.int32(1)}, {}, None)
    jax.jit(lambda p: {"w": p["w"] * 0}, donate_argnums=0)(params)
    checkpoints.close()
    loaded = Saved(tmp_path).load({"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])})
    np.testing.assert_array_equal(loaded["w"], np.arange(1000.0))


def test_no_checkpoint_is_said(tmp_path):
    with pytest.raises(UserError, match="holds no checkpoints: give the folder of a run"):
        trainer(tmp_path)
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(UserError, match="no finished checkpoint"):
        trainer(str(tmp_path))


def test_a_metric_that_is_no_number_is_never_the_best():
    assert math.isnan(Best("a", "max").score({"a": float("nan")}))
    assert Best("a", "min").score({"a": 2.0}) == -2.0


def test_a_parameter_without_elements_is_refused_before_training(tmp_path):
    one = Trainer(
        lambda examples: {"x": np.asarray(examples, np.float32)},
        lambda params, batch, key: Loss(params["w"] * batch["x"]),
        None,
        {"w": np.ones(()), "none": np.ones((0, 3))},
        optax.sgd(0.1),
        make_mesh(devices=jax.devices()[:1]),
        [1.0],
        folder=tmp_path,
    )
    with pytest.raises(UserError, match=r"none.* has the shape \[0, 3\], .*cannot be saved"):
        one.fit([1.0])
