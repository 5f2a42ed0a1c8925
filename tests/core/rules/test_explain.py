import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from core import MeshOptions, make_mesh
from core.rules import explain, families, infer
from tests.core.rules.models import GATED, MODELS, NORMS, attention_shapes, decoder, self_attention
from tests.core.rules.test_models import as_others_write  # noqa: F401


def mesh(tensor=1, fsdp=1):
    return make_mesh(MeshOptions(data=1, tensor=tensor, fsdp=fsdp), jax.devices()[: tensor * fsdp])


def of(model, tensor, fsdp=1):
    """What is inferred for a model, with its explanation as text."""
    found = infer(
        lambda params, batch: model.loss(params, batch, None),
        model.params(),
        model.batch_shapes(),
        on := mesh(tensor, fsdp),
    )
    rows = explain.rows(found, model.params(), on)
    return found, rows, explain.table(rows, found.problems, on)


def heads(number, kv=None):
    kv = kv or number
    layer = attention_shapes(number, kv) | GATED | NORMS
    return decoder(layer, partial(self_attention, heads=number, kv=kv))


@pytest.mark.parametrize(
    ("model", "tensor", "problem", "whole"),
    [
        (heads(8, 2), 4, "Heads 2 do not divide by 4: tensor 2 would.", {"k", "v"}),
        (heads(52), 8, "Heads 52 do not divide by 8: tensor 2, 4 would.", {"q", "k", "v", "o"}),
        (heads(12), 8, "Heads 12 do not divide by 8: tensor 2, 3, 4, 6 would.", set("qkvo")),
        (heads(7), 4, "Heads 7 do not divide by 4: nor by anything smaller.", set("qkvo")),
    ],
)
def test_heads_that_do_not_divide_are_said_and_left_whole(model, tensor, problem, whole):
    found, rows, text = of(model, tensor)
    assert found.problems == [problem]
    assert problem in text
    reasons = {row.path.split("/")[-1]: row for row in rows if row.path.startswith("layers")}
    for name, row in reasons.items():
        assert (row.spec == "") == (name in whole or name.startswith("norm")), name
        if name in whole:
            said = problem[0].lower() + problem[1:-1]
            assert row.reason == f"replicated over tensor: {said}"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("vocab", "padded"), [(50257, 50260), (151669, 151672)])
def test_vocabulary_that_does_not_divide_is_said_with_what_to_pad_it_to(vocab, padded, tied):
    found, rows, text = of(decoder(attention_shapes() | GATED | NORMS, vocab=vocab, tied=tied), 4)
    for problem in found.problems:
        assert problem.endswith(f"padded to {padded} they would (--pad-vocab).")
    assert len(found.problems) == (1 if tied else 2)  # embedding and head
    assert {row.path for row in rows if row.spec == "" and "norm" not in row.path} == (
        {"embed"} if tied else {"embed", "head"}
    )
    # It is what a device has most of, so it stands first among what is whole.
    assert re.search(r"Whole on every device: .*\n +\S+ [KM]iB  (embed|head): ", text)


def test_all_that_does_not_divide_is_in_one_message():
    layer = attention_shapes(12, 12) | GATED | NORMS
    found, _, text = of(decoder(layer, partial(self_attention, heads=12, kv=12), vocab=101), 8)
    pad = "do not divide by 8: nor by anything smaller; padded to 104 they would (--pad-vocab)."
    assert sorted(found.problems) == [
        "Heads 12 do not divide by 8: tensor 2, 3, 4, 6 would.",
        f"Outputs 101 {pad}",
        f"Vocabulary 101 {pad}",
    ]
    assert text.endswith("\n".join(found.problems))


def test_a_router_called_gate_is_no_gate():
    from tests.core.rules.models import mixture

    called, other = (of(mixture("dense", name), 4)[0] for name in ("gate", "router"))
    assert called.roles["layers/0/gate"] == other.roles["layers/0/router"] == "replicated"
    assert called.specs["layers"][0]["w1"] == P("tensor")
    assert called.roles["layers/0/w1"] == called.roles["layers/0/w2"] == "expert"


def test_tables_that_share_a_name_and_leaves_of_all_kinds():
    params = {
        "encoder": {"embedding": jax.ShapeDtypeStruct((64, 24), jnp.float32)},
        "decoder": {"embedding": jax.ShapeDtypeStruct((62, 24), jnp.float32)},
        "unused": jax.ShapeDtypeStruct((64, 64), jnp.float32),
        "empty": jax.ShapeDtypeStruct((0, 24), jnp.float32),
        "scale": jax.ShapeDtypeStruct((), jnp.float32),
        "buckets": jax.ShapeDtypeStruct((64,), jnp.int32),
        "none": None,
    }

    def fn(params, batch):
        x = params["encoder"]["embedding"][params["buckets"][batch]]
        x = x + jnp.concatenate([params["empty"], params["decoder"]["embedding"]])[batch % 62]
        return (x @ params["encoder"]["embedding"].T * params["scale"]).sum()

    found = infer(fn, params, jax.ShapeDtypeStruct((2, 5), jnp.int32), mesh(4))
    assert found.specs["encoder"]["embedding"] == P("tensor")
    assert found.specs["decoder"]["embedding"] == P()
    assert found.specs["empty"] == found.specs["scale"] == P()
    assert found.specs["unused"] == P("tensor")  # it costs nothing to split
    assert not found.factors.failed


opaque = Primitive("opaque_to_everyone")
opaque.def_abstract_eval(lambda x, y: x)


def test_nothing_is_split_through_an_equation_that_is_not_known_and_it_is_named():
    def fn(params, batch):
        hidden = batch @ params["up"]
        return (opaque.bind(hidden, hidden) @ params["down"]).sum()

    shapes = {"up": (4, 64), "down": (64, 4)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    found = infer(fn, params, batch, mesh(4))
    assert dict(found.factors.unknown) == {"opaque_to_everyone": 1}
    assert "Nothing is split through opaque_to_everyone, which is not known." in found.problems
    hidden, other = (found.factors.params[i][d] for i, d in ((0, 0), (1, 1)))
    assert not {*hidden} & {*other}


fused_attention = Primitive("dot_product_attention_fwd_wrapper")
fused_attention.multiple_results = True
fused_attention.def_abstract_eval(lambda q, k, v, bias: (q, bias))


def test_fused_attention_is_known_by_its_signature():
    def fn(params, batch):
        q, k, v = ((batch @ params[name]).reshape(2, 6, 8, 5) for name in "qkv")
        out, _ = fused_attention.bind(q, k, v, batch)
        return ((batch + out.reshape(2, 6, 40) @ params["o"]) @ params["out"]).sum()

    shapes = {"q": (24, 40), "k": (24, 40), "v": (24, 40), "o": (40, 24), "out": (24, 3)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    found = infer(fn, params, jax.ShapeDtypeStruct((2, 6, 24), jnp.float32), mesh(4))
    assert found.specs == dict.fromkeys("qkv", P(None, "tensor")) | {"o": P("tensor"), "out": P()}
    assert found.reasons["q"] == "dimension 1 is heads 8, split over tensor"


def test_where_the_walk_fails_fsdp_is_left_and_the_equation_named(monkeypatch):
    def broken(walk, eqn, ins):
        raise KeyError("dimension_numbers")

    monkeypatch.setitem(families.FAMILIES, "dot_general", broken)
    shapes = {"kernel": (3, 3, 16, 64), "out": (64, 128)}

    def fn(params, batch):
        x = jax.lax.conv_general_dilated(
            batch, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (x.mean((1, 2)) @ params["out"]).sum()

    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((4, 6, 6, 16), jnp.float32)
    found = infer(fn, params, batch, mesh(2, 4))
    assert found.specs == {"kernel": P(), "out": P(None, "fsdp")}
    (problem,) = found.problems
    assert problem.startswith("Nothing is split over tensor: the walk ended at dot_general (KeyErr")


@pytest.mark.parametrize("name", ["llama, scanned and recomputed", "t5", "maml", "mamba"])
def test_each_equation_is_visited_once(name):
    model = MODELS[name]()
    fn = lambda params, batch: model.loss(params, batch, None)  # noqa: E731
    closed = jax.make_jaxpr(fn)(model.params(), model.batch_shapes())

    def number(jaxpr):
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        # Only the function itself of a custom derivative, not what computes the derivative.
        bodies = [
            body
            for eqn in inner.eqns
            for key in ("jaxpr", "call_jaxpr", "body_jaxpr", "cond_jaxpr", "branches")
            if (body := eqn.params.get(key)) is not None
        ]
        flat = [b for body in bodies for b in (body if isinstance(body, tuple) else [body])]
        return len(inner.eqns) + sum(map(number, flat))

    found = infer(fn, model.params(), model.batch_shapes(), mesh(4))
    assert found.factors.equations == number(closed)


def test_rows_fold_like_layers_and_count_bytes():
    model = MODELS["llama"](layers=3)
    _, rows, text = of(model, 4, 2)
    by_path = {row.path: row for row in rows}
    up = by_path["layers/*/up"]
    assert (up.count, up.shape, up.role, up.spec) == (3, (24, 64), "column", "-,tensor")
    assert (up.bytes, up.bytes_per_device) == (3 * 24 * 64 * 4, 3 * 24 * 64)
    assert sum(row.count for row in rows) == len(jax.tree.leaves(model.params()))
    total = sum(4 * int(np.prod(x.shape)) for x in jax.tree.leaves(model.params()))
    assert sum(row.bytes for row in rows) == total
    assert "layers/*/up (3)" in text and "The mesh is data 1, fsdp 2, tensor 4." in text


def test_json_holds_all_that_the_table_shows():
    found, rows, _ = of(MODELS["too few key heads"](), 4)
    out = json.loads(json.dumps(explain.as_json(rows, found.problems, mesh(4))))
    assert out["mesh"] == {"data": 1, "fsdp": 1, "tensor": 4}
    assert out["problems"] == found.problems
    assert [row["path"] for row in out["parameters"]] == [row.path for row in rows]
    assert {"role", "spec", "bytes", "bytes_per_device", "reason"} <= set(out["parameters"][0])


def test_shardings_are_kept_for_each_mesh_and_taken_up_again(tmp_path):
    model = MODELS["llama"]()
    for tensor in (4, 2):
        found, *_ = of(model, tensor)
        explain.save(tmp_path, found, model.params(), mesh(tensor))
    kept = explain.load(tmp_path, mesh(2))
    assert kept["layers/0/q"] == P(None, ("tensor",)) and kept["norm1"] == P()
    assert explain.load(tmp_path, mesh(2, 2)) == {}
    assert explain.load(tmp_path / "nowhere", mesh(2)) == {}
    # A function that says nothing of its parameters gets the shardings of one that did.
    fn = lambda params, batch: jnp.float32(0)  # noqa: E731
    again = infer(fn, model.params(), model.batch_shapes(), mesh(2), None, kept)
    assert again.specs["layers"][1]["o"] == P(("tensor",))
    assert again.reasons["embed"] == "as in the run that made these weights"
    # Those of another model, or of one of other sizes, are none of this one.
    for other in ({"embed": kept["embed"]}, kept | {"norm1": P(None, "tensor")}):
        anew = infer(fn, model.params(), model.batch_shapes(), mesh(2), None, other)
        assert anew.reasons["embed"] != again.reasons["embed"]
    given = infer(fn, model.params(), model.batch_shapes(), mesh(2), {"o$": P()}, kept)
    assert given.specs["layers"][1]["o"] == P() and given.specs["embed"] == P(("tensor",))


@pytest.mark.parametrize(
    "text",
    ["", "[1, 2]", "{", '{"fsdp 1, tensor 2": 3}', '{"fsdp 1, tensor 2": {"specs": {"a": 1}}}'],
)
def test_file_of_shardings_that_is_damaged_is_made_anew(text, tmp_path):
    (tmp_path / explain.FILE).write_text(text)
    assert explain.load(tmp_path, mesh(2)) == {}
    model = MODELS["perceptron"]()
    found, *_ = of(model, 2)
    explain.save(tmp_path, found, model.params(), mesh(2))
    assert explain.load(tmp_path, mesh(2))
