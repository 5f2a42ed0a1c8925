"""Which dimensions of which parameters are walked along one by one, read from the traced function.

Layers stacked on a leading axis are fed to `lax.scan`, or to a loop that is unrolled: splitting
that axis would put whole layers on single devices and gather each at its turn, so it is never
split. Nothing here looks at a name; a parameter is followed through casts, slices, elementwise
arithmetic, transposes, reshapes and the calls (jit, remat, custom derivatives, cond, while, scan)
that it is passed to.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

# A value that is a mere view of a parameter: the parameter's index, and the parameter's dimension
# (None where it is no longer one) that each dimension of the value is.
View = tuple[int, tuple[int | None, ...]]

# Equations whose result has the dimensions of their operand, in its order.
KEEP = {"convert_element_type", "copy", "reduce_precision", "stop_gradient", "sharding_constraint"}
KEEP |= {"neg", "add", "sub", "mul", "div", "select_n", "slice", "dynamic_slice", "rev"}
RESHAPE = {"reshape", "squeeze", "broadcast_in_dim"}


def scanned_dims(closed: ClosedJaxpr, parameters: int) -> list[set[int]]:
    """For each of the first `parameters` arguments, the dimensions that a scan walks along."""
    invars = closed.jaxpr.invars[:parameters]
    views: list[View | None] = [(i, tuple(range(len(_shape(v))))) for i, v in enumerate(invars)]
    found: list[set[int]] = [set() for _ in invars]
    _walk(closed.jaxpr, views + [None] * (len(closed.jaxpr.invars) - parameters), found)
    return found


def _walk(jaxpr: Jaxpr, inputs: Sequence[View | None], found: list[set[int]]) -> list[View | None]:
    env: dict[Var, View | None] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> View | None:
        return None if isinstance(atom, Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        if not any(ins):
            continue
        outs: Sequence[View | None] = ()
        for body, args in _bodies(eqn, ins, found):
            outs = _walk(body, args, found)
        _note_single_slices(eqn, ins, found)
        # What a loop returns is no view of what went in; what a plain call returns may be.
        if eqn.primitive.name in ("scan", "while", "cond"):
            continue
        env.update(zip(eqn.outvars, outs or _views(eqn, ins), strict=False))
    return [read(v) for v in jaxpr.outvars]


def _bodies(
    eqn: Any, ins: list[View | None], found: list[set[int]]
) -> Iterator[tuple[Jaxpr, list[View | None]]]:
    """The functions that an equation calls, each with the views that are its arguments."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        first = params["num_consts"] + params["num_carry"]
        for view in ins[first:]:
            if view is not None and view[1][0] is not None:
                found[view[0]].add(view[1][0])
        slices = [None if view is None else (view[0], view[1][1:]) for view in ins[first:]]
        yield params["jaxpr"].jaxpr, ins[:first] + slices
    elif name == "while":
        yield params["body_jaxpr"].jaxpr, ins[params["cond_nconsts"] :]
    elif name == "cond":
        for branch in params["branches"]:
            yield branch.jaxpr, ins[1:]
    else:
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            body = params.get(key)
            body = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            if isinstance(body, Jaxpr) and len(body.invars) == len(ins):
                yield body, ins


def _note_single_slices(eqn: Any, ins: list[View | None], found: list[set[int]]) -> None:
    """A scan that is unrolled takes its layers by slices of one."""
    name, view, shape = eqn.primitive.name, ins[0], _shape(eqn.invars[0])
    dims: list[int] = []
    if name == "unstack":
        dims = [eqn.params["axis"]]
    elif name in ("slice", "dynamic_slice"):
        out = _shape(eqn.outvars[0])
        dims = [d for d, n in enumerate(shape) if out[d] == 1 < n]
        dims = dims if len(dims) == 1 else []  # several: a single element, no layer
    if view is not None:
        found[view[0]].update(n for n in (view[1][d] for d in dims) if n is not None)


def _views(eqn: Any, ins: list[View | None]) -> list[View | None]:
    """What an equation without a body returns, as views of parameters."""
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return ins
    view = next((v for v in ins if v and v[1]), None)
    if view is None or len(eqn.outvars) != 1:
        return [None] * len(eqn.outvars)
    old, shape = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if name in KEEP:
        return [view]
    if name == "transpose":
        return [(view[0], tuple(view[1][d] for d in eqn.params["permutation"]))]
    if name in RESHAPE and math.prod(old) == math.prod(shape):
        # What starts where a dimension did, in row-major order, is it or its major part.
        starts = {math.prod(old[:d]): view[1][d] for d in range(len(old))}
        dims = [starts.get(math.prod(shape[:d])) if n > 1 else None for d, n in enumerate(shape)]
        return [(view[0], tuple(dims))]
    return [None]


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))
