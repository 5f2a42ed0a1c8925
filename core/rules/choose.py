"""Which dimensions of a model are split over the tensor axis: the cheapest first.

A colour is a dimension of the model that leads an axis of some parameter: layer 3's heads, its
hidden units, the vocabulary, the residual stream. Splitting one costs communication where it is
summed over, looked up, compared or cut. Taken greedily, the cheapest per element of its parameters
first, and never two that meet on one value, colours give both rules of RedCoast: products that
follow each other alternate output and input, and attention splits by heads.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

from core.rules.factors import Factor, expand
from core.rules.walk import Walk

COSTS = ("contract", "lookup", "reduce", "break")
# A colour without a product must have this share of the largest parameter to be worth splitting.
WORTH = 1 / 32

# How a parameter is used, the most telling first, and what that makes of it.
ROLES = {"lookup": "vocabulary", "contract": "row", "column": "column"}

Run = tuple[Factor, ...]


@dataclasses.dataclass
class Colour:
    """A dimension that might be split: a factor, or two that follow each other (grouped heads)."""

    factors: Run
    params: set[int] = dataclasses.field(default_factory=set)
    """Indices of the parameters of which it leads an axis."""
    elements: int = 0
    """Of these parameters."""
    cost: int = 0
    """Bytes to move, were it split."""
    made: int = 0
    """Bytes of what its products with parameters make."""
    kinds: dict[int, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))
    """By parameter, how it is used there; by -1, anywhere."""
    verdict: str = "not looked at"
    """Why it is not split; empty where it is."""

    @property
    def size(self) -> int:
        return math.prod(factor.size for factor in self.factors)

    @property
    def name(self) -> str:
        return f"{self.what} {self.size}"

    @property
    def what(self) -> str:
        used = set().union(*self.kinds.values())
        if "attend" in used:
            return "heads"
        if "lookup" in used:
            return "outputs" if "lookup" in self.kinds.get(-1, ()) else "vocabulary"
        return "experts" if "batch" in used else "units"

    def role(self, param: int) -> str:
        """What a parameter is by the way that it uses this dimension: column, row, vocabulary or
        expert. A bias is in no product, and follows the outputs of one."""
        used = self.kinds.get(param, set())
        role = next((role for kind, role in ROLES.items() if kind in used), "column")
        return "expert" if role == "column" and self.what == "experts" else role


@dataclasses.dataclass(frozen=True)
class Choice:
    colours: list[Colour]
    """All that were looked at, in that order."""
    dims: list[list[Run]]
    """The factors of each dimension of each parameter."""
    fused: set[Factor]
    """Numbers of parts, which come before the colour in the axis of a fused weight."""

    def split(self, param: int) -> dict[int, Colour]:
        """The colours that split a parameter, by dimension."""
        taken = {c.factors: c for c in self.colours if not c.verdict and param in c.params}
        found = {}
        for d, axis in enumerate(self.dims[param]):
            for run in _leading(axis, self.fused):
                if run in taken:
                    found[d] = taken[run]
        return found

    def left(self, param: int) -> list[Colour]:
        """The colours that might have split a parameter, and do not."""
        return [c for c in self.colours if c.verdict and param in c.params]


def choose(walk: Walk, elements: Sequence[int], tensor: int) -> Choice:
    """The colours to split over so many devices.

    Args:
      walk: of the function.
      elements: of each parameter.
      tensor: devices along the tensor axis.
    """
    dims = [[tuple(expand(axis)) for axis in axes] for axes in walk.params]
    fused = {factor for axis in walk.fused for factor in expand(axis)}
    colours = _candidates(dims, fused, walk.frozen_factors(), tensor)
    by_factor: dict[Factor, list[Colour]] = defaultdict(list)
    for colour in colours:
        colour.elements = sum(elements[i] for i in colour.params)
        for factor in colour.factors:
            by_factor[factor].append(colour)
    _tally(walk, by_factor)
    meets = _meetings(walk, by_factor)
    order = sorted(colours, key=lambda c: c.cost / max(c.elements, 1))
    taken: list[Colour] = []
    for colour in order:
        colour.verdict = _verdict(colour, taken, meets, max(elements, default=0), tensor)
        if not colour.verdict:
            taken.append(colour)
    return Choice(order, dims, fused)


def _candidates(
    dims: list[list[Run]], fused: set[Factor], frozen: set[Factor], tensor: int
) -> list[Colour]:
    found: dict[Run, Colour] = {}
    for param, axes in enumerate(dims):
        for axis in axes:
            for run in _leading(axis, fused):
                pair = len(run) == 2
                fits = not pair or (
                    tensor % run[0].size == 0 and run[1].size % (tensor // run[0].size) == 0
                )
                if fits and not frozen & {*run} and (not pair or run[0].size % tensor):
                    found.setdefault(run, Colour(run)).params.add(param)
    return list(found.values())


def _leading(axis: Run, fused: set[Factor]) -> list[Run]:
    """What of an axis can be split: its first factor or the first two, after numbers of parts."""
    runs, at = [], 0
    while at < len(axis):
        runs += [axis[at : at + 1], axis[at : at + 2]] if at + 1 < len(axis) else [axis[at:]]
        if axis[at] not in fused:
            break
        at += 1
    return [run for run in runs if not fused & {*run}]


def _tally(walk: Walk, by_factor: dict[Factor, list[Colour]]) -> None:
    for event in walk.events:
        axis = expand(event.axis)
        if event.kind == "merge":
            # As the minor part of a longer axis it cannot be split as it is.
            minor = [c for factor in axis[1:] for c in by_factor[factor] if axis[0] != c.factors[0]]
            for colour in minor:
                colour.cost += event.bytes
            continue
        for colour in _in(axis, by_factor):
            colour.cost += event.bytes * (event.kind in COSTS)
            product = event.kind in ("column", "batch", "contract") and event.param is not None
            colour.made += event.bytes * product
            colour.kinds[-1 if event.param is None else event.param].add(event.kind)


def _in(axis: Sequence[Factor], by_factor: dict[Factor, list[Colour]]) -> list[Colour]:
    return list({id(c): c for factor in axis for c in by_factor[factor]}.values())


def _meetings(walk: Walk, by_factor: dict[Factor, list[Colour]]) -> dict[int, set[int]]:
    """By id, which colours meet on one value; a colour that stands twice on one meets itself."""
    meets: dict[int, set[int]] = defaultdict(set)
    for axes in {id(axes): axes for axes in walk.values}.values():
        here = [(d, c) for d, axis in enumerate(axes) for c in _in(expand(axis), by_factor)]
        for d, one in here:
            for e, other in here:
                if one is not other or (d != e and len(one.factors) == 1):
                    meets[id(one)].add(id(other))
    return meets


def _verdict(
    colour: Colour, taken: list[Colour], meets: dict[int, set[int]], largest: int, tensor: int
) -> str:
    """Why a colour is not split, or nothing."""
    others = meets[id(colour)]
    if id(colour) in others:
        return f"{colour.name} stand twice on one value"
    for other in taken:
        if id(other) in others or {*other.factors} & {*colour.factors}:
            return f"{colour.name} meet {other.name} on one value, which are cheaper to split"
    if not colour.made and colour.elements < largest * WORTH:
        return f"{colour.name} are in no product, and in few parameters"
    if colour.made and colour.cost > colour.made:
        return f"{colour.name} would move more bytes than their products make"
    if colour.size % tensor:
        return undivided(colour, tensor)
    return ""


def undivided(colour: Colour, tensor: int) -> str:
    sizes = ", ".join(str(n) for n in range(2, tensor) if colour.size % n == 0)
    would = f"tensor {sizes} would" if sizes else "nor by anything smaller"
    if colour.what in ("vocabulary", "outputs"):
        would += f"; padded to {-(-colour.size // tensor) * tensor} they would (--pad-vocab)"
    return f"{colour.name} do not divide by {tensor}: {would}"
