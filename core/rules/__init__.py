"""Loss function and shapes to a PartitionSpec for each parameter, each with its reason.

Pure functions on shapes: nothing here needs a device. The traced function is walked once (`walk`,
`families`), which tells for each axis of each parameter what dimension of the model it is
(`factors`). Of these the cheapest are split over the tensor axis (`choose`); what is left of each
large parameter is split over the fsdp axis, along its largest dimension. Overrides by path win.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from core.errors import UserError
from core.rules.choose import Choice, Colour, choose
from core.rules.factors import expand, size
from core.rules.overrides import Overrides, misfits, overridden, parse_overrides, path_name
from core.rules.walk import Walk

__all__ = ["SMALL", "Inferred", "Overrides", "infer", "parse_overrides", "path_name"]

# Below this many elements a parameter is left whole by fsdp: gathering costs more than keeping it.
SMALL = 4096

ALONE = "replicated: the mesh has one device along fsdp"


@dataclasses.dataclass(frozen=True)
class Inferred:
    """What `infer` returns; the dictionaries are by path."""

    specs: Any
    """A PartitionSpec per parameter, in the structure of the parameters."""
    reasons: dict[str, str]
    """One sentence per parameter."""
    roles: dict[str, str]
    """column, row, vocabulary, expert, or replicated (over the tensor axis)."""
    problems: list[str]
    """What to know of the whole: dimensions that do not divide, equations that are not known."""
    factors: Walk
    """The walked function, with the factors of its axes."""


def infer(
    fn: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    mesh: Mesh,
    overrides: Overrides | None = None,
    known: Mapping[str, PartitionSpec] | None = None,
) -> Inferred:
    """A PartitionSpec for every parameter of `fn(params, batch)`, from its own equations.

    Args:
      fn: any function of a pytree of parameters and a batch, traced on shapes only.
      params: arrays or `ShapeDtypeStruct`s.
      batch: arrays or `ShapeDtypeStruct`s.
      mesh: its axis sizes are what is used of it.
      overrides: path regex -> PartitionSpec, which wins over what is inferred.
      known: path -> PartitionSpec from an earlier time, used where it fits all parameters.

    Raises:
      UserError: an override that matches nothing or does not fit; all of them in one message. A
        grouped convolution that XLA would get wrong on this mesh.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    names = [path_name(path) for path, _ in leaves]
    shapes = [tuple(leaf.shape) for _, leaf in leaves]
    given = overridden(overrides or {}, dict(zip(names, shapes, strict=True)), mesh)

    walk = Walk(jax.make_jaxpr(fn)(params, batch), len(leaves))
    choice = choose(walk, [math.prod(shape) for shape in shapes], mesh.shape["tensor"])
    _check_groups(walk, choice, mesh)
    found = [
        _parameter(i, shape, walk, choice, frozen, mesh)
        for i, (shape, frozen) in enumerate(zip(shapes, walk.frozen_dims(), strict=True))
    ]
    if known and all(
        name in known and not misfits(name, shape, known[name], mesh)
        for name, shape in zip(names, shapes, strict=True)
    ):
        kept = "as in the run that made these weights"
        found = [(known[name], role, kept) for name, (_, role, _) in zip(names, found, strict=True)]
    chosen = [
        (given[name][0], "given", given[name][1]) if name in given else one
        for name, one in zip(names, found, strict=True)
    ]
    return Inferred(
        specs=jax.tree.unflatten(tree, [spec for spec, _, _ in chosen]),
        reasons={name: reason for name, (_, _, reason) in zip(names, chosen, strict=True)},
        roles={name: role for name, (_, role, _) in zip(names, chosen, strict=True)},
        problems=_problems(walk, choice, mesh.shape["tensor"]),
        factors=walk,
    )


def _check_groups(walk: Walk, choice: Choice, mesh: Mesh) -> None:
    """With a batch that is split, and groups of a convolution that are not split over tensor, XLA
    multiplies the gradient of its kernel by the size of tensor, or aborts (jax 0.10.2)."""
    tensor, rows = mesh.shape["tensor"], mesh.shape["data"] * mesh.shape["fsdp"]
    split = {factor for colour in choice.colours if not colour.verdict for factor in colour.factors}
    whole = {size(axis) for axis in walk.grouped if not split & {*expand(axis)}}
    if tensor > 1 and rows > 1 and whole:
        raise UserError(
            f"A convolution in {', '.join(map(str, sorted(whole)))} groups is not split over "
            f"tensor {tensor}, and with a batch that is split too XLA's gradient of it is wrong. "
            "Use a tensor size that divides the groups, or 1, or data 1 and fsdp 1."
        )


def _parameter(
    index: int, shape: tuple[int, ...], walk: Walk, choice: Choice, frozen: set[int], mesh: Mesh
) -> tuple[PartitionSpec, str, str]:
    """Spec, role and reason of a parameter, from the choice of colours."""
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    split = choice.split(index) if tensor > 1 and not walk.failed else {}
    entries = ["tensor" if d in split else None for d in range(len(shape))]
    why = [_tensor_reason(index, choice, split)] if tensor > 1 else []
    if fsdp > 1:
        dim, reason = _fsdp(shape, frozen | {*split}, fsdp, uncertain=bool(walk.failed))
        entries = ["fsdp" if d == dim else entry for d, entry in enumerate(entries)]
        why.append(reason)
    role = next((colour.role(index) for colour in split.values()), "replicated")
    return _trimmed(entries), role, "; ".join(why) or ALONE


def _tensor_reason(param: int, choice: Choice, split: dict[int, Colour]) -> str:
    if not split:
        verdicts = sorted(
            (colour.verdict for colour in choice.left(param)), key=lambda v: "divide" not in v
        )
        return "replicated over tensor: " + (verdicts[0] if verdicts else "no dimension of its own")
    (dim, colour), *_ = split.items()
    # Only numbers of parts may come before it.
    slow = "; it holds several of them side by side: correct, but slower"
    fused = choice.dims[param][dim][: len(colour.factors)] != colour.factors
    return f"dimension {dim} is {colour.name}, split over tensor{slow * fused}"


def _fsdp(
    shape: Sequence[int], taken: set[int], size: int, uncertain: bool
) -> tuple[int | None, str]:
    """The dimension to split over fsdp, if any, and why."""
    if math.prod(shape) < SMALL:
        return None, f"replicated: fewer than {SMALL} elements"
    if uncertain and len(shape) > 2:
        return None, "replicated: it may have a window, which is never split"
    fits = [d for d, n in enumerate(shape) if d not in taken and n % size == 0]
    why = f" (not free: dimension {', '.join(map(str, sorted(taken)))})" if taken else ""
    if not fits:
        return None, f"replicated: no dimension of {tuple(shape)} divides by {size}{why}"
    largest = max(fits, key=lambda d: shape[d])
    return (
        largest,
        f"split over fsdp on dimension {largest}, its largest that divides by {size}{why}",
    )


def _trimmed(entries: Sequence[str | None]) -> PartitionSpec:
    last = max((d for d, entry in enumerate(entries) if entry), default=-1)
    return PartitionSpec(*entries[: last + 1])


def _problems(walk: Walk, choice: Choice, tensor: int) -> list[str]:
    """Sentences on the whole, where something is split over tensor at all."""
    if tensor == 1:
        return []
    if walk.failed:
        return [f"Nothing is split over tensor: the walk ended at {walk.failed}."]
    found = dict.fromkeys(c.verdict for c in choice.colours if "divide" in c.verdict)
    unknown = [f"nothing is split through {name}, which is not known" for name in walk.unknown]
    return [f"{text[0].upper()}{text[1:]}." for text in [*found, *unknown]]
