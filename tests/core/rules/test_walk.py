"""Which axes the equations make one dimension, and what splitting one would cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from core.mesh import AXES
from core.rules import infer
from core.rules.factors import expand, fresh, regroup, size, unify
from core.rules.walk import Walk


def walked(fn, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return Walk(jax.make_jaxpr(fn)(*arrays), len(arrays))


def same(fn, *shapes):
    """{(argument, dim)} of the axes of these arguments, in groups of one dimension."""
    walk = walked(fn, *shapes)
    assert not walk.failed and not walk.unknown
    groups = {}
    for i, axes in enumerate(walk.params):
        for d, axis in enumerate(axes):
            groups.setdefault(tuple(map(id, expand(axis))), set()).add(f"{i}.{d}")
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def groups(*texts):
    return {frozenset(text.split()) for text in texts}


INDEX = np.zeros((6, 3), int)


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (lambda a, b: a @ b, [(2, 3), (3, 5)], groups("0.1 1.0")),
        (lambda a, b: a + b.T, [(2, 3), (3, 2)], groups("0.0 1.1", "0.1 1.0")),
        (
            lambda a, b: jnp.einsum("xij,xjk->xik", a, b),
            [(2, 3, 4), (2, 4, 5)],
            groups("0.0 1.0", "0.2 1.1"),
        ),
        (lambda a, b: a.reshape(2, 3, 5) * b[None], [(2, 15), (3, 5)], groups()),
        (lambda a, b: a * b[0], [(5,), (1, 5)], groups("0.0 1.1")),
        (lambda a, b: jnp.stack([a, b]), [(5, 3), (5, 3)], groups("0.0 1.0", "0.1 1.1")),
        (lambda a, b: jnp.concatenate([a, b], 1), [(5, 3), (5, 4)], groups("0.0 1.0")),
        (lambda a, b: jnp.sort(a, 1) + b, [(5, 3), (5, 3)], groups("0.0 1.0", "0.1 1.1")),
        (lambda a, b: jnp.where(a.sum(0) > 0, b, 0), [(5, 3), (3,)], groups("0.1 1.0")),
        # Read and written at indices, which have an axis in common with the array.
        (
            lambda a, b: jnp.take_along_axis(a, (b > 0).astype(int), 1),
            [(8, 20), (8, 5)],
            groups("0.0 1.0"),
        ),
        (lambda a, b: a[INDEX] * b, [(9, 4), (6, 3, 4)], groups("0.1 1.2")),
        (lambda a, b: a.at[INDEX[:, 0]].add(b), [(9, 4), (6, 4)], groups("0.1 1.1")),
        (lambda a, b: lax.dynamic_update_slice(a, b, (1, 0)), [(9, 4), (2, 4)], groups("0.1 1.1")),
        # Loops: what goes in, what comes out and what goes round are one.
        (
            lambda a, w: lax.scan(lambda h, _: (h @ w, None), a, None, length=3)[0],
            [(2, 4), (4, 4)],
            groups("0.1 1.0 1.1"),
        ),
        (
            lambda a, w: lax.while_loop(lambda h: h.sum() < 3, lambda h: h @ w, a),
            [(2, 4), (4, 4)],
            groups("0.1 1.0 1.1"),
        ),
        (
            lambda a, b: lax.cond(a.sum() > 0, lambda: a, lambda: b),
            [(2, 4), (2, 4)],
            groups("0.0 1.0", "0.1 1.1"),
        ),
        (
            lambda a, w: lax.map(lambda row: row @ w, a),
            [(7, 4), (4, 5)],
            groups("0.1 1.0"),
        ),
    ],
)
def test_axes_that_equations_make_one_dimension(fn, shapes, expected):
    assert same(fn, *shapes) == expected


def events(fn, *shapes):
    """{(kind, size): bytes}, of all that are alike together."""
    found = {}
    for event in walked(fn, *shapes).events:
        key = (event.kind, size(event.axis))
        found[key] = found.get(key, 0) + event.bytes
    return found


def test_costs_are_the_bytes_of_what_is_made_times_the_turns_of_a_loop():
    made = 2 * 5 * 4
    assert events(lambda a, w: a @ w, (2, 3), (3, 5)) == {
        ("contract", 3): made,
        ("column", 2): made,  # both are parameters here
        ("column", 5): made,
    }
    turns = events(lambda x, w: lax.scan(lambda h, w: (h @ w, None), x, w)[0], (2, 3), (7, 3, 3))
    assert turns["contract", 3] == 7 * 2 * 3 * 4
    nested = lambda x, w: lax.scan(  # noqa: E731
        lambda h, _: (lax.scan(lambda h, w: (h @ w, None), h, w)[0], None), x, None, length=5
    )[0]
    assert events(nested, (2, 3), (7, 3, 3))["contract", 3] == 5 * 7 * 2 * 3 * 4


def specs(fn, params, batch=(4, 6), tensor=4):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    batch = jax.ShapeDtypeStruct(batch, jnp.float32)
    return infer(fn, params, batch, AbstractMesh((1, 1, tensor), AXES))


def test_dimension_that_meets_itself_on_one_value_is_not_split():
    def fn(params, batch):  # length times length
        scores = jax.nn.softmax(params["positions"] @ params["positions"].T, -1)
        return (scores @ params["positions"]).sum() * batch.sum()

    found = specs(fn, {"positions": (64, 3)})
    assert found.specs["positions"] == P()
    # The other dimension does not divide, which is what to say of it.
    assert found.problems == ["Units 3 do not divide by 4: tensor 3 would."]


def test_dimension_that_ends_as_the_minor_part_of_another_costs_a_gather():
    def fn(params, batch, merged):
        x = (batch @ params["w"]).reshape(4, 8, 5)
        x = x.reshape(32, 5) if merged else x.reshape(4, 40)
        return jnp.tanh(x).sum()

    apart, merged = (specs(lambda p, b, m=m: fn(p, b, m), {"w": (8, 40)}, (4, 8)) for m in (0, 1))
    assert apart.specs["w"] == P(None, "tensor")
    assert merged.specs["w"] == P("tensor")  # by what goes in instead


def test_small_parameter_in_no_product_is_left_whole():
    def fn(params, batch):
        return ((batch * params["scale"][None]) ** 2).sum() + (batch[:, :8] @ params["w"]).sum()

    found = specs(fn, {"scale": (64,), "w": (8, 512)}, (4, 64))
    assert found.specs == {"scale": P(), "w": P(None, "tensor")}
    assert found.reasons["scale"].endswith("are in no product, and in few parameters")


def test_factors_line_up_across_splits():
    (a,), (b,), (c,) = fresh([12]), fresh([12]), fresh([12])
    assert [size(x) for x in regroup(a, [3, 4])] == [3, 4]
    assert unify(a, b) and [f.size for f in expand(b)] == [3, 4]
    assert regroup(c, [2, 6]) is not None
    assert not unify(b, c), "3 x 4 and 2 x 6 have no factors in common"
    assert regroup(fresh([6])[0], [4]) is None
    assert regroup((), [3]) is None
