"""The contract of design and README, for every package: three functions, independent rows."""

import ast
import functools
import importlib
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from core import MeshOptions, Trainer, TrainOptions, make_mesh
from core.contract import check_loss, check_outputs, check_signatures, weighted_sums
from core.report import ReportOptions
from tests.algorithms.cases import CASES

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("algorithms/*/train.py"))

case_of = functools.cache(lambda name: CASES[name]())
packages = pytest.mark.parametrize("name", PACKAGES)


def batch_of(name, examples):
    batch = case_of(name).collate(examples)
    return {key: jnp.asarray(value) for key, value in batch.items()} | {
        "row_mask": jnp.ones(len(examples), bool)
    }


def test_every_package_has_a_case():
    assert PACKAGES == sorted(CASES) and PACKAGES


@packages
def test_the_three_functions_are_of_the_module_and_take_the_agreed_arguments(name):
    module = importlib.import_module(f"algorithms.{name}.{name}")
    for function, arguments in {
        "collate": ["examples"],
        "loss": ["params", "batch", "key"],
        "predict": ["params", "batch", "keys"],
    }.items():
        parameters = inspect.signature(getattr(module, function)).parameters.values()
        positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        assert positional == arguments
    case = case_of(name)
    check_signatures(case.collate, case.loss, case.predict)


@packages
def test_batches_have_fixed_shapes_with_and_without_targets(name):
    case = case_of(name)
    shapes = []
    for examples in (case.examples[:2], case.examples[2:4], case.questions[:2]):
        batch = case.collate(examples)
        shapes.append({key: (value.shape, value.dtype) for key, value in batch.items()})
        assert all(isinstance(v, np.ndarray) and len(v) == 2 for v in batch.values())
    assert shapes[0] == shapes[1]
    assert shapes[2].items() <= shapes[0].items()


@packages
def test_losses_and_outputs_lead_with_the_rows(name):
    case, rows = case_of(name), len(case_of(name).examples)
    batch = batch_of(name, case.examples)
    for key in (None, jax.random.key(0)):
        check_loss(case.loss(case.params, batch, key), rows)
    keys = jax.random.split(jax.random.key(1), rows)
    check_outputs(case.predict(case.params, batch_of(name, case.questions), keys), rows)


@packages
def test_changing_one_row_changes_only_its_values(name, x64):
    case = case_of(name)
    if case.whole_batch:
        pytest.skip("its loss looks across rows, and says so")
    changed = [case.examples[1], *case.examples[1:]]

    def values(examples):
        out = case.loss(case.params, batch_of(name, examples), None)
        weights = 1.0 if out.weights is None else out.weights
        return jax.vmap(lambda v, w: jnp.ravel(v)[None] @ jnp.ravel(w).astype(v.dtype))(
            out.values, jnp.broadcast_to(weights, out.values.shape)
        )

    before, after = values(case.examples), values(changed)
    np.testing.assert_allclose(before[1:], after[1:], rtol=1e-12)
    assert abs(before[0] - after[0]) > 1e-6
    np.testing.assert_allclose(after[0], after[1], rtol=1e-12)


@packages
def test_outputs_depend_on_the_row_and_its_key_alone(name, x64):
    case = case_of(name)
    keys = jax.random.split(jax.random.key(2), len(case.questions))
    predict = jax.jit(case.predict)
    params = jax.tree.map(lambda x: x.astype(float), case.params)  # double precision here
    whole = predict(params, batch_of(name, case.questions), keys)
    for row in (0, 3):
        alone = predict(params, batch_of(name, case.questions[row : row + 1]), keys[row, None])
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(a[0], b[row], rtol=1e-12)


@packages
def test_the_loss_is_pure(name):
    case = case_of(name)
    batch = batch_of(name, case.examples)
    copy = dict(batch)

    def total(key):
        return float(weighted_sums(case.loss(case.params, batch, key), batch["row_mask"])["loss"])

    assert total(None) == total(None)
    assert total(jax.random.key(3)) == total(jax.random.key(3))
    assert batch.keys() == copy.keys() and all(batch[key] is copy[key] for key in batch)


@packages
def test_tensor_parallelism_needs_no_configuration_and_changes_nothing(name, x64):
    case, out = case_of(name), []
    params = jax.tree.map(lambda x: x.astype(float), case.params)
    for sizes in (MeshOptions(1, 1, 1), MeshOptions(2, 1, 4)):
        devices = jax.devices()[: sizes.data * sizes.fsdp * sizes.tensor]
        trainer = Trainer(
            case.collate,
            case.loss,
            case.predict,
            params,
            optax.sgd(0.1),
            make_mesh(sizes, devices),
            case.examples[:1],
            options=TrainOptions(batch_size=4, report=ReportOptions(quiet=True)),
            whole_batch=case.whole_batch,
        )
        loss = trainer.fit(case.examples[:4])["train"]["loss"]
        outputs = [jax.tree.leaves(one) for one in trainer.predict(case.questions[:3])]
        out.append([loss, jax.device_get(trainer.state.params), outputs])
    for one, other in zip(*map(jax.tree.leaves, out), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-11, atol=1e-12)
    specs = jax.tree.leaves(trainer.inferred.specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    assert any("tensor" in spec for spec in specs)


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def test_the_core_imports_no_algorithm_and_no_algorithm_another():
    for path in [*ROOT.glob("core/**/*.py"), *ROOT.glob("algorithms/**/*.py")]:
        found = [module for module in imports_of(path) if module.startswith("algorithms")]
        assert not found, f"{path} imports {found}; inside a package, imports are relative"
