"""Walks the equations of a traced function once, and finds which axes are the same dimension.

Parameters need no special case: casts, transposes, reshapes, the stacked inputs of a scan and
lookups are ordinary equations. What an equation does to the axes of its operands is in `families`,
by kinds of equations and not one by one; here are those that call other functions. An equation
that nobody knows breaks every axis that goes into it: nothing is split through it.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from core.rules import families
from core.rules.factors import Axes, Axis, Factor, expand, fresh, unify

# They have a function inside, whose axes are not those of the operands.
OPAQUE = {"shard_map", "pallas_call", "ffi_call", "custom_partitioning", "core_map", "mpmd_map"}


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """What a variable stands for."""

    axes: Axes
    param: int | None = None
    """The index of the parameter that it is a mere view of, cast or updated."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """What would cost communication, or save computation, were an axis split."""

    kind: str
    """contract: summed over by a product; lookup: indexed; reduce: summed or compared along; merge:
    made a minor part of a longer axis; break: cut, sorted, or otherwise needed whole; column: kept
    of a parameter by a product; batch: of several products side by side; attend: the same, of
    activations alone."""
    axis: Axis
    bytes: int
    """Of what would have to be moved, or of what the product makes."""
    param: int | None


class Walk:
    """What is known of a function after its equations were walked.

    Args:
      closed: the traced function.
      parameters: how many of its arguments, the first ones, are parameters.
    """

    def __init__(self, closed: ClosedJaxpr, parameters: int):
        self.events: list[Event] = []
        self.values: list[Axes] = []  # of every variable
        self.frozen: list[Axis] = []  # never split: walked by a scan, or windows of convolutions
        self.pieces: list[tuple[Axis, Axis]] = []  # cut out of an axis, and that axis
        self.fused: list[Axis] = []  # the numbers of parts that fused weights are cut into
        self.grouped: list[Axis] = []  # the numbers of groups of grouped convolutions
        self.unknown: Counter[str] = Counter()
        self.equations = 0
        self.failed = ""  # the equation at which the walk ended before its time
        self._at: Any = closed
        self._trips = 1
        invars: Any = closed.jaxpr.invars
        shapes = [tuple(v.aval.shape) for v in invars]
        arguments = [
            Value(fresh(shape), i if i < parameters else None) for i, shape in enumerate(shapes)
        ]
        self.params = [value.axes for value in arguments[:parameters]]
        try:
            self.run(closed, arguments)
        except Exception as error:
            self.failed = (
                f"{getattr(self._at, 'primitive', 'the start')} ({type(error).__name__}: {error})"
            )

    def run(self, jaxpr: Any, arguments: Sequence[Value]) -> list[Value]:
        """The values that a function returns for these arguments."""
        consts = [Value(fresh(getattr(c, "shape", ()))) for c in getattr(jaxpr, "consts", ())]
        inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
        env = dict(zip([*inner.constvars, *inner.invars], [*consts, *arguments], strict=True))
        self.values += [value.axes for value in env.values()]

        def read(atom: Any) -> Value:
            constant: bool = isinstance(atom, Literal)
            return Value(fresh(atom.aval.shape)) if constant else env[atom]

        caller, cuts = self._at, families.partitions(inner)
        for eqn in inner.eqns:
            self._at, self.equations = eqn, self.equations + 1
            ins = [read(v) for v in eqn.invars]
            outs = self._called(eqn, ins)
            if outs is None:
                param = families.view_of(eqn, ins)
                axes = self._followed(eqn, ins, cuts)
                outs = [Value(tuple(map(tuple, out)), param) for out in axes]
                self.values += [value.axes for value in outs]
            env.update(zip(eqn.outvars, outs, strict=True))
        self._at = caller
        return [read(v) for v in inner.outvars]

    def frozen_factors(self) -> set[Factor]:
        """The first factor of each axis that is never split, and of what it was cut out of."""
        frozen = {factor for axis in self.frozen for factor in expand(axis)[:1]}
        for piece, axis in reversed(self.pieces):
            if frozen & {*expand(piece)[:1]}:
                frozen |= {*expand(axis)[:1]}
        return frozen

    def frozen_dims(self) -> list[set[int]]:
        """By parameter, the dimensions that are never split."""
        frozen = self.frozen_factors()
        return [
            {d for d, axis in enumerate(axes) if frozen & {*expand(axis)[:1]}}
            for axes in self.params
        ]

    def note(self, kind: str, axis: Axis, param: int | None = None, atom: Any = None) -> None:
        """An event of the equation at hand, with the bytes of this atom or of the likely one."""
        if axis:
            atoms = self._at.invars if kind == "break" else self._at.outvars
            nbytes = families.bytes_of(atoms[0] if atom is None else atom)
            self.events.append(Event(kind, axis, nbytes * self._trips, param))

    def same(self, one: Axis, other: Axis) -> None:
        """Two axes of one size are the same dimension."""
        if one and other and not unify(one, other):
            for axis in (one, other):
                self.note("break", axis)

    def broken(self, eqn: Any, ins: Sequence[Value]) -> list[Axes]:
        """The results of an equation through which nothing is followed."""
        for atom, value in zip(eqn.invars, ins, strict=True):
            for axis in value.axes:
                self.note("break", axis, atom=atom)
        return [fresh(v.aval.shape) for v in eqn.outvars]

    def _followed(self, eqn: Any, ins: Sequence[Value], cuts: Any) -> Iterable[Iterable[Axis]]:
        name = eqn.primitive.name
        if name == "slice":
            return families.window(self, eqn, ins, cuts)
        family = families.FAMILIES.get(name)
        if family is None:
            self.unknown[name] += 1
            return self.broken(eqn, ins)
        return family(self, eqn, ins)

    def _called(self, eqn: Any, ins: list[Value]) -> list[Value] | None:
        """What an equation returns that calls other functions; None for all others."""
        name, params = eqn.primitive.name, eqn.params
        if name == "optimization_barrier":
            return ins
        if name == "scan":
            return self._scan(eqn, ins)
        if name == "while":
            first, second = params["cond_nconsts"], params["body_nconsts"]
            carry = ins[first + second :]
            self.run(params["cond_jaxpr"], ins[:first] + carry)
            return self._repeated(carry, self.run(params["body_jaxpr"], ins[first:]))
        if name == "cond":
            outs, *others = [self.run(branch, ins[1:]) for branch in params["branches"]]
            for other in others:
                self._same(outs, other)
            return [Value(value.axes) for value in outs]
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            body = getattr(params.get(key), "jaxpr", params.get(key))
            if isinstance(body, Jaxpr) and name not in OPAQUE:
                fits = len(body.invars) == len(ins) and len(body.outvars) == len(eqn.outvars)
                return self.run(params[key], ins) if fits else None
        return None

    def _scan(self, eqn: Any, ins: list[Value]) -> list[Value]:
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        # What is stacked has one axis more outside than inside, going in and coming out.
        carries = sum(map(_same_rank, eqn.outvars, body.jaxpr.outvars))
        first = sum(map(_same_rank, eqn.invars, body.jaxpr.invars))
        consts = first - carries
        for value in ins[first:]:
            if value.param is not None:  # layers: of other values only the order is kept
                self.frozen.append(value.axes[0])
        slices = [Value(value.axes[1:], value.param) for value in ins[first:]]
        before, self._trips = self._trips, self._trips * length
        outs = self.run(body, ins[:first] + slices)
        self._trips = before
        carried = self._repeated(ins[consts:first], outs)
        lead = ins[first].axes[0] if len(ins) > first else fresh([length])[0]
        return carried + [Value((lead, *out.axes)) for out in outs[first - consts :]]

    def _repeated(self, carry: list[Value], outs: list[Value]) -> list[Value]:
        """What a loop returns: another thing than what went in, of the same axes."""
        self._same(carry, outs[: len(carry)])
        return [Value(value.axes) for value in carry]

    def _same(self, values: Sequence[Value], others: Sequence[Value]) -> None:
        for one, other in zip(values, others, strict=True):
            for a, b in zip(one.axes, other.axes, strict=True):
                self.same(a, b)


def _same_rank(one: Any, other: Any) -> bool:
    return len(one.aval.shape) == len(other.aval.shape)
