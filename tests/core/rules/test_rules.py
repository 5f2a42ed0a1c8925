import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from core import MeshOptions, UserError, make_mesh
from core.rules import SMALL, infer, parse_overrides
from core.rules.walk import Walk

# W: [L, D, D] stacked layers, X: [D] what goes through them. All sizes differ.
L, G, D = 6, 4, 5
W, X = np.zeros((L, D, D), np.float32), np.zeros(D, np.float32)


def walked(fn, *params):
    """The scanned dimensions of each argument of a function of parameters."""
    return Walk(jax.make_jaxpr(fn)(*params), len(params)).frozen_dims()


def layers(w, x=X, **options):
    """x through layers one by one, the leading dimension of w."""
    step = lambda h, w: (jnp.tanh(h @ w.reshape(D, D).astype(h.dtype)), None)  # noqa: E731
    return lax.scan(step, x, w, **options)[0].sum()


@jax.custom_vjp
def with_vjp(w):
    return layers(w)


with_vjp.defvjp(lambda w: (with_vjp(w), w), lambda w, g: (g * jnp.ones_like(w),))


@jax.custom_jvp
def with_jvp(w):
    return layers(w)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0].sum()))


@jax.custom_vjp
def straight_through(w):
    return w * 1


straight_through.defvjp(lambda w: (w, None), lambda _, g: (g,))


def in_while(w):
    least = w[0, 0, 0]  # a constant of the condition
    more = lambda c: (c[0] + 1, c[1] + layers(w))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < least, more, (0, 0.0))[1]


def in_cond(w):
    return lax.cond(w.sum() > 0, lambda w: w.sum(), lambda w: layers(w), w)


def in_switch(w):
    return lax.switch(0, [jnp.sum, layers, jnp.sum], w)


def carried_whole(w):
    """A scan of another kind, through which w is carried, and in which it is walked."""
    return lax.scan(lambda w, _: (w * 2, layers(w)), w, None, length=3)[1].sum()


def constant_of_a_scan(w):
    return lax.scan(lambda total, _: (total + layers(w), None), 0.0, None, length=3)[0].sum()


def barrier(w):
    return layers(lax.optimization_barrier((X, w))[1])


FROM_ONE_LEAF = {
    "as it is": layers,
    "reversed": lambda w: layers(w, reverse=True),
    "unrolled": lambda w: layers(w, unroll=3),
    "a loop over slices": lambda w: sum(jnp.tanh(w[i]).sum() for i in range(L)),
    "a loop over dynamic slices": lambda w: lax.fori_loop(
        0, L, lambda i, x: x + lax.dynamic_index_in_dim(w, i).sum(), 0.0
    ),
    "unstacked": lambda w: sum(x.sum() for x in jnp.unstack(w)),
    "cast": lambda w: layers(w.astype(jnp.bfloat16)),
    "rounded": lambda w: layers(lax.reduce_precision(w, 8, 7)),
    "scaled": lambda w: layers(w * 0.5),
    "masked": lambda w: layers(jnp.where(w > 0, w, 0.0)),
    "updated": lambda w: layers(w - 0.1 * (1 + w)),
    "no gradient": lambda w: layers(lax.stop_gradient(w)),
    "sliced": lambda w: layers(w[1:4]),
    "flipped": lambda w: layers(jnp.flip(w, 0)),
    "dynamic slice": lambda w: layers(lax.dynamic_slice_in_dim(w, 1, 3)),
    "other dimensions swapped": lambda w: layers(w.transpose(0, 2, 1)),
    "other dimensions merged": lambda w: layers(w.reshape(L, D * D)),
    "dimension added": lambda w: layers(w[:, None]),
    "dimension added and removed": lambda w: layers(jnp.squeeze(w[None], 0)),
    "groups of layers": lambda w: lax.scan(
        lambda h, w: (h + layers(w), None), 0.0, w.reshape(2, L // 2, D, D)
    )[0],
    "barrier": barrier,
    "jit": jax.jit(layers),
    "jit of a view": lambda w: layers(jax.jit(lambda w: w.astype(jnp.bfloat16))(w)),
    "remat": jax.checkpoint(layers),
    "remat of the body": lambda w: lax.scan(
        jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), X, w
    )[0].sum(),
    "custom_vjp": with_vjp,
    "custom_vjp of a view": lambda w: layers(straight_through(w)),
    "custom_jvp": with_jvp,
    "while": in_while,
    "cond": in_cond,
    "switch": in_switch,
    "in the body of a scan, as a constant": constant_of_a_scan,
    "in the body of a scan, as carry": carried_whole,
    "gradient": jax.grad(layers),
    "value and gradient of all": jax.value_and_grad(
        jax.jit(lambda w: with_vjp(w) + in_cond(w * 2) + jax.checkpoint(layers)(w))
    ),
    "vmap over inputs": lambda w: jax.vmap(layers, (None, 0))(w, np.zeros((3, D), np.float32)),
    "map": lambda w: lax.map(lambda w: w.sum(), w).sum(),
    "associative use beside it": lambda w: layers(w) + w.sum(),
    "printed": lambda w: (jax.debug.print("{}", w), layers(w))[1],
}


@pytest.mark.parametrize("fn", FROM_ONE_LEAF.values(), ids=FROM_ONE_LEAF)
def test_stacked_leaf_is_found_on_the_way_to_its_scan(fn):
    assert walked(fn, W) == [{0}]


@pytest.mark.parametrize(
    ("fn", "shape", "dims"),
    [
        (lambda w: layers(w.transpose(1, 0, 2)), (D, L, D), {1}),
        (lambda w: layers(jnp.moveaxis(w, -1, 0)), (D, D, L), {2}),
        (lambda w: layers(w.reshape(D, D, L).T), (D, D * L), set()),
        (lambda w: layers(w.reshape(D * D, L).T.reshape(L, D, D)), (D, D, L), {2}),
        (lambda w: layers(w[0]), (1, L, D, D), {1}),
        (lambda w: layers(w.reshape(L, D, D)), (1, L, D * D), {1}),
        (jax.vmap(layers), (G, L, D, D), {1}),
        (jax.vmap(layers, 2), (L, D, G, D), {0}),
        (lambda w: jax.vmap(lambda w: layers(w.transpose(2, 0, 1)))(w), (G, D, D, L), {3}),
        # The outer scan walks along axis 0, the inner one along what was axis 1.
        (lambda w: lax.map(layers, w).sum(), (G, L, D, D), {0, 1}),
        (lambda w: lax.map(lambda w: layers(w.transpose(2, 0, 1)), w), (G, D, D, L), {0, 3}),
        (
            lambda w: lax.map(lambda w: layers(w.swapaxes(0, 1)), w.swapaxes(0, 1)),
            (D, G, L, D),
            {1, 2},
        ),
    ],
)
def test_scanned_dimension_is_the_parameters_own(fn, shape, dims):
    assert walked(fn, np.zeros(shape, np.float32)) == [dims]


@pytest.mark.parametrize(
    "fn",
    [
        lambda w: w.sum(),
        lambda w: lax.scan(lambda h, _: (h + w.sum(), None), 0.0, None, length=3)[0],
        lambda w: lax.scan(lambda w, _: (w * 2, None), w, None, length=3)[0].sum(),
        lambda w: lax.fori_loop(0, 3, lambda i, w: w * 2, w).sum(),
        lambda w: lax.map(lambda x: x.sum(), w @ w).sum(),  # activations are no view of w
        lambda w: lax.map(lambda x: x.sum(), w.sum(0)).sum(),
        lambda w: lax.map(lambda x: x.sum(), w[None]).sum(),  # one step, with all of w
        lambda w: lax.map(lambda x: x.sum(), jnp.broadcast_to(w.sum(), (7, 3))).sum(),
        # What a loop gives back is another thing than what it took.
        lambda w: layers(lax.scan(lambda w, _: (w.swapaxes(1, 2), None), w, None, length=2)[0]),
        lambda w: lax.map(jnp.sum, jnp.broadcast_to(w, (3, L, D, D))).sum(),
    ],
)
def test_leaf_that_no_scan_walks_along_is_not_marked(fn):
    assert walked(fn, W) == [set()]


def test_leaves_are_told_apart_and_constants_are_none_of_them():
    constant = jnp.ones((L, D, D))

    def fn(unused, stacked, both, whole):
        def layer(h, at):
            w, c, b = at
            return jnp.tanh(h @ w @ c) + b * whole.sum() + both.sum(), None

        return lax.scan(layer, X, (stacked, constant, both))[0].sum()

    dims = walked(fn, W, W, np.zeros((L, D), np.float32), W)
    assert dims == [set(), {0}, {0}, set()]


def test_batch_that_is_scanned_marks_no_parameter():
    closed = jax.make_jaxpr(lambda w, x: layers(x) + w.sum())(W, W)
    assert Walk(closed, 1).frozen_dims() == [set()]


# FSDP


class Shape(jax.ShapeDtypeStruct):
    def __init__(self, *shape, dtype=jnp.float32):
        super().__init__(shape, dtype)


def mesh(fsdp=4, tensor=1):
    return make_mesh(MeshOptions(fsdp=fsdp, tensor=tensor))


def loss(params, batch):
    """Uses all leaves, and scans those called layers."""
    total = sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(params))
    walk = [] if not isinstance(params, dict) else params.get("stacked", [])
    return total + sum(lax.map(jnp.sum, w).sum() for w in jax.tree.leaves(walk))


def spec_and_reason(leaf, fsdp=4):
    """Of a leaf that no scan walks along."""
    inferred = infer(loss, {"w": leaf}, None, mesh(fsdp))
    return inferred.specs["w"], inferred.reasons["w"]


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((64, 128), P(None, "fsdp")),
        ((128, 64), P("fsdp")),
        ((64, 64, 64), P("fsdp")),  # the first of equals
        ((63, 64, 128), P(None, None, "fsdp")),
        ((1023, 8), P(None, "fsdp")),  # the largest that divides, not the largest
        ((1022, 8), P(None, "fsdp")),
        ((4096,), P("fsdp")),
        ((4, 1, 1024), P(None, None, "fsdp")),
    ],
)
def test_largest_divisible_dimension_is_split(shape, spec):
    got, reason = spec_and_reason(Shape(*shape))
    assert got == spec
    where = len(spec) - 1
    assert reason == f"split over fsdp on dimension {where}, its largest that divides by 4"


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((), f"fewer than {SMALL} elements"),
        ((0, 4096), f"fewer than {SMALL} elements"),
        ((SMALL - 4,), f"fewer than {SMALL} elements"),
        ((1023, 7), "no dimension of (1023, 7) divides by 4"),
    ],
)
def test_what_is_not_split_says_why(shape, reason):
    assert spec_and_reason(Shape(*shape)) == (P(), f"replicated: {reason}")


def test_one_device_along_fsdp_splits_nothing():
    reason = "replicated: the mesh has one device along fsdp"
    assert spec_and_reason(Shape(4096, 4096), fsdp=1) == (P(), reason)


@pytest.mark.parametrize(
    ("shape", "spec", "reason"),
    [
        (
            (4096, 8),
            P(None, "fsdp"),
            "split over fsdp on dimension 1, its largest that divides by 4 (not free: dimension 0)",
        ),
        ((4096, 7), P(), "no dimension of (4096, 7) divides by 4 (not free: dimension 0)"),
        ((4096,), P(), "no dimension of (4096,) divides by 4 (not free: dimension 0)"),
    ],
)
def test_scanned_dimension_is_never_split(shape, spec, reason):
    inferred = infer(loss, {"stacked": Shape(*shape)}, None, mesh())
    assert inferred.specs == {"stacked": spec}
    assert inferred.reasons["stacked"].removeprefix("replicated: ") == reason


def test_every_leaf_has_a_spec_in_the_structure_of_the_parameters_and_a_reason():
    params = {
        "a/b": Shape(64, 64),
        "a": {"b": Shape(4096)},  # the same path as the user writes it
        "list": [Shape(8, 4096, dtype=jnp.int32), (Shape(2),)],
        "stacked": {"x": Shape(4, 64, 128, dtype=jnp.bfloat16)},
        "none": None,
    }
    inferred = infer(loss, params, None, mesh())
    assert inferred.specs == {
        "a/b": P("fsdp"),
        "a": {"b": P("fsdp")},
        "list": [P(None, "fsdp"), (P(),)],
        "stacked": {"x": P(None, None, "fsdp")},
        "none": None,
    }
    assert set(inferred.reasons) == {"a/b", "list/0", "list/1/0", "stacked/x"}


@pytest.mark.parametrize("names", [("embed", "layers", "out"), ("x", "k", "w1"), ("c", "b", "a")])
def test_names_mean_nothing(names):
    def fn(params, batch):
        embed, stack, out = (params[name] for name in names)
        h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch @ embed, stack)[0]
        return (h @ out).sum()

    shapes = Shape(16, 1024), Shape(1024, 1024, 1024), Shape(1024, 8)
    inferred = infer(fn, dict(zip(names, shapes, strict=True)), Shape(2, 16), mesh())
    assert [inferred.specs[name] for name in names] == [P(None, "fsdp"), P(None, "fsdp"), P("fsdp")]


def test_parameters_of_flax_layers_under_scan_and_remat():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.Linear(64, 64, rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def forward(x, layer):
        return jnp.tanh(layer(x))

    model = nnx.eval_shape(lambda: nnx.Dict(layers=make(jax.random.split(jax.random.key(0), 8))))
    graph, params = nnx.split(model)

    def fn(params, batch):
        return forward(batch, nnx.merge(graph, params)["layers"]).sum()

    inferred = infer(fn, params, Shape(4, 64), mesh(), {"bias": P("fsdp")})
    kernel, bias = sorted(inferred.reasons, key=lambda name: "bias" in name)
    assert inferred.reasons[kernel].startswith("split over fsdp on dimension 1")
    assert inferred.reasons[bias] == "given by the override 'bias'"
    specs = jax.tree.leaves(inferred.specs)
    assert sorted(map(str, specs)) == sorted(map(str, (P("fsdp"), P(None, "fsdp"))))
    assert jax.tree.structure(inferred.specs) == jax.tree.structure(params)


# Overrides

PARAMS = {
    "embed": Shape(64, 128),
    "layers": {"q": Shape(8, 64), "k": Shape(8, 62)},
    "scale": Shape(),
}


@pytest.mark.parametrize(
    ("overrides", "specs"),
    [
        ({}, [..., ..., ..., ...]),
        ({"embed": P("tensor")}, [P("tensor"), ..., ..., ...]),
        ({"layers/": P("fsdp")}, [..., P("fsdp"), P("fsdp"), ...]),
        ({"rs/q$": P(None, ("fsdp", "tensor"))}, [..., ..., P(None, ("fsdp", "tensor")), ...]),
        ({".": P()}, [P(), P(), P(), P()]),
        ({"layers": P("fsdp"), "k": P("tensor")}, [..., P("tensor"), P("fsdp"), ...]),  # the last
        ({"embed": P(None, None)}, [P(None, None), ..., ..., ...]),
    ],
)
def test_override_wins_where_it_matches_and_nowhere_else(overrides, specs):
    inferred = infer(loss, PARAMS, None, mesh(4, 2), overrides)
    without, got = (
        [specs["embed"], *jax.tree.leaves(specs["layers"]), specs["scale"]]
        for specs in (infer(loss, PARAMS, None, mesh(4, 2)).specs, inferred.specs)
    )
    assert without[0] == P("tensor", "fsdp")
    assert got == [old if new is ... else new for old, new in zip(without, specs, strict=True)]
    for spec, reason in zip(got, inferred.reasons.values(), strict=True):
        assert reason.startswith(("replicated", "dimension 0 is units", "given by the override"))
        NamedSharding(mesh(4, 2), spec)


@pytest.mark.parametrize(
    ("overrides", "faults"),
    [
        ({"ebmed": P()}, ["'ebmed' matches no parameter; the nearest paths are embed, "]),
        ({"layers/(": P()}, ["'layers/(' is not a regular expression: missing ), unterminated"]),
        ({"scale": P("fsdp")}, ["scale has 0 dimensions, and P", " names 1"]),
        ({"embed": P("model")}, ["embed: 'model' is no axis of the mesh, data, fsdp, tensor"]),
        ({"k": P(None, "fsdp")}, ["layers/k: dimension 1 of (8, 62) does not divide by 4"]),
        ({"embed": P(("fsdp", "fsdp"))}, ["embed: 'fsdp' stands twice in P"]),
        ({"embed": P("fsdp", "fsdp")}, ["embed: 'fsdp' stands twice in P"]),
        (
            {"xyz": P(), "embed": P("a"), "layers": P(None, "fsdp", None)},
            [
                "'xyz' matches no parameter",
                "'a' is no axis",
                "layers/q has 2 dimensions, and",
                "layers/k has 2 dimensions, and",
            ],
        ),
        ({"k": P("x", "fsdp")}, ["'x' is no axis", "dimension 1 of (8, 62) does not divide"]),
    ],
)
def test_overrides_that_do_not_fit_are_all_named_in_one_message(overrides, faults):
    with pytest.raises(UserError) as caught:
        infer(loss, PARAMS, None, mesh(4, 2), overrides)
    text = str(caught.value)
    assert text.startswith("These sharding overrides do not fit: ") and text.endswith(".")
    for fault in faults:
        assert fault in text


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("embed=tensor,-", {"embed": P("tensor", None)}),
        ("a/b$=-,fsdp+tensor", {"a/b$": P(None, ("fsdp", "tensor"))}),
        ("a=b=fsdp", {"a=b": P("fsdp")}),
        ("(?=q)q=-, tensor", {"(?=q)q": P(None, "tensor")}),
        ("scale=", {"scale": P()}),
    ],
)
def test_overrides_are_read_from_text(text, overrides):
    assert parse_overrides((text,)) == overrides
    assert parse_overrides((text, "other=-")) == overrides | {"other": P(None)}
    assert parse_overrides(()) == {}


@pytest.mark.parametrize(
    "text",
    ["embed", "", "=fsdp", "a:fsdp", "a=fsdp,,-", "a=,", "a=fsdp+", "a=-+fsdp", "a=data fsdp"],
)
def test_text_that_is_no_override_is_refused(text):
    says = f"The override {text!r} is not of the form REGEX=AXIS,AXIS,...: one entry per"
    with pytest.raises(UserError, match=re.escape(says)):
        parse_overrides(("a=fsdp", text))
