"""Axes as factors: which axes of which values are the same dimension of the model.

Every axis of every value is a list of factors, major first: 64 columns that are reshaped to 8 heads
of 8 are [8, 8]. Where an equation makes two axes the same dimension their factors become one
(union-find with path compression), and where a reshape splits an axis its factor is split.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any


class Factor:
    """A part of an axis. What it has become, by `unify` or `split`, is what `expand` gives."""

    __slots__ = ("size", "same_as", "parts")

    def __init__(self, size: int):
        self.size = size
        self.same_as: Factor | None = None
        self.parts: tuple[Factor, ...] = ()

    def __repr__(self) -> str:
        return f"{self.size}@{id(self) % 9973}"


# An axis is what its factors are now; axes of size 1 have none.
Axis = Sequence[Factor]
Axes = tuple[Axis, ...]


def fresh(shape: Iterable[int]) -> Axes:
    """Axes that are the same dimension as no other."""
    return tuple((Factor(n),) if n > 1 else () for n in shape)


def expand(axis: Axis) -> list[Factor]:
    """The atomic factors that an axis has become, major first."""
    out: list[Factor] = []
    for factor in axis:
        root = _root(factor)
        out += expand(root.parts) if root.parts else [root]
    return out


def size(axis: Axis) -> int:
    return math.prod(factor.size for factor in axis)


def unify(one: Axis, other: Axis) -> bool:
    """Makes two axes of one size the same; False where their factors cannot be lined up."""
    while True:
        a, b = expand(one), expand(other)
        pair = next(((x, y) for x, y in zip(a, b, strict=False) if x is not y), None)
        if pair is None:
            return True
        x, y = pair
        if x.size == y.size:
            x.same_as = y
        elif x.size % y.size == 0:
            _split(x, y.size)
        elif y.size % x.size == 0:
            _split(y, x.size)
        else:
            return False


def regroup(axis: Axis, sizes: Iterable[int]) -> list[Axis] | None:
    """The factors of an axis as axes of these sizes, which multiply to its own; None where a size
    cuts through factors that it does not divide."""
    left, out = expand(axis)[::-1], list[Axis]()
    for n in sizes:
        group: list[Factor] = []
        while n > 1:
            if not left:  # an axis of size 0
                return None
            factor = left.pop()
            if factor.size > n and factor.size % n == 0:
                _split(factor, n)
                # The same factor may stand in the axis again.
                left = expand([factor, *left[::-1]])[::-1]
            elif n % factor.size == 0:
                group.append(factor)
                n //= factor.size
            else:
                return None
        out.append(group)
    return out


def _root(factor: Factor) -> Factor:
    root = factor
    while root.same_as is not None:
        root = root.same_as
    while factor is not root:
        following: Any = factor.same_as
        factor.same_as, factor = root, following
    return root


def _split(factor: Factor, major: int) -> None:
    factor.parts = (Factor(major), Factor(factor.size // major))
