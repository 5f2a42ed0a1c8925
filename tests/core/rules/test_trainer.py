"""Shardings from a trainer's loss to the folder of its run, and to what reads from it."""

import json
from functools import partial

import jax
import optax
import pytest

from algorithms.lm import lm
from algorithms.lm.model import ModelConfig, build
from core import MeshOptions, Trainer, TrainOptions, make_mesh
from core.decode import Sampling
from core.report import ReportOptions
from core.rules import families
from core.signals import Ended

EXAMPLES = [{"tokens": list(range(n, n + 9)), "bytes": [1.0] * 8} for n in range(8)]
CONFIG = ModelConfig(layers=1, dim=16, heads=4, kv_heads=2, hidden=24)


def trainer(folder=None, init=None, loss=True, tensor=4, optimizer=None, **options):
    model, fresh = build(CONFIG, 32)
    return Trainer(
        partial(lm.collate, block=8),
        partial(lm.loss, model=model) if loss else None,
        partial(lm.predict, model=model, length=3, sampling=Sampling(temperature=0.0)),
        init or fresh,
        (optimizer or optax.adafactor(1e-2)) if loss else None,
        make_mesh(MeshOptions(data=8 // tensor, tensor=tensor)),
        EXAMPLES[:1],
        options=TrainOptions(batch_size=8, report=ReportOptions(quiet=True), **options),
        folder=folder,
    )


def test_what_was_inferred_from_the_loss_serves_what_has_none(tmp_path, monkeypatch, capsys):
    one = trainer(tmp_path)
    one.fit(EXAMPLES)
    assert "Heads 2 do not divide by 4: tensor 2 would." in capsys.readouterr().err
    kept = json.loads((tmp_path / "sharding.json").read_text())["fsdp 1, tensor 4"]
    assert kept["specs"]["layers/down"] == "-,tensor" and kept["mesh"]["data"] == 2
    trained = one.inferred.specs
    # From its own equations, which are made unknown here, it would infer others.
    monkeypatch.setattr(families, "FAMILIES", {})
    again = trainer(init=tmp_path, loss=False)
    assert again.inferred.specs == trained
    assert again.state.params["layers"]["down"].sharding.is_equivalent_to(
        one.state.params["layers"]["down"].sharding, 3
    )
    elsewhere = trainer(init=tmp_path, loss=False, tensor=2)
    kept = "as in the run that made these weights"
    reasons = [one.inferred.reasons["layers/o"] for one in (again, elsewhere)]
    assert reasons[0] == kept != reasons[1]


def test_predictions_do_not_depend_on_the_mesh(tmp_path):
    trainer(tmp_path).fit(EXAMPLES)
    prompts = [{"tokens": [1, 2]}, {"tokens": [5]}]
    answers = [trainer(init=tmp_path, loss=False, tensor=n).predict(prompts) for n in (1, 2, 4)]
    assert len({str(answer) for answer in answers}) == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_explaining_ends_before_any_weight_is_made(as_json, tmp_path):
    def init(key):
        raise AssertionError("no weights are needed")

    model, fresh = build(CONFIG, 32)
    shapes = jax.eval_shape(fresh, jax.random.key(0))

    class Weights:
        def shapes(self):
            return shapes

        def load(self, shardings):
            raise AssertionError("nor are any read")

    with pytest.raises(Ended) as ended:
        trainer(tmp_path / "none", Weights(), explain=not as_json, explain_json=as_json)
    text = str(ended.value)
    if as_json:
        rows = {row["path"]: row for row in json.loads(text)["parameters"]}
        assert rows["layers/o"]["role"] == "row"
    else:
        assert "layers/o" in text and "The mesh is data 2, fsdp 1, tensor 4." in text
    assert not (tmp_path / "none").exists()


def test_a_walk_that_fails_is_said_and_the_run_goes_on(monkeypatch, capsys):
    def broken(walk, eqn, ins):
        raise KeyError("dimension_numbers")

    right = trainer(tensor=1).fit(EXAMPLES)["train"]["loss"]
    monkeypatch.setitem(families.FAMILIES, "dot_general", broken)
    loss = trainer().fit(EXAMPLES)["train"]["loss"]
    assert loss == pytest.approx(right, rel=1e-5)
    assert "Nothing is split over tensor: the walk ended at dot_general" in capsys.readouterr().err
