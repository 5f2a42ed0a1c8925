"""Loss function and shapes to a PartitionSpec for each parameter, each with its reason.

Pure functions on shapes: nothing here needs a device. So far: FSDP (each large parameter is split
over the `fsdp` axis along its largest divisible dimension that no scan walks along), and overrides
by path. The rules for the tensor axis belong here too.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from core.errors import UserError
from core.rules.scanned import scanned_dims

# Below this many elements a parameter is left whole: gathering it costs more than keeping it.
SMALL = 4096

Overrides = Mapping[str, PartitionSpec]

_ENTRY = r"\s*(?:-|\w+(?:\+\w+)*)\s*"
_OVERRIDE = re.compile(rf"(.+)=({_ENTRY}(?:,{_ENTRY})*|)")


@dataclasses.dataclass(frozen=True)
class Inferred:
    """What `infer` returns."""

    specs: Any
    """A PartitionSpec per parameter, in the structure of the parameters."""
    reasons: dict[str, str]
    """One sentence per parameter, by path."""


def infer(
    fn: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    mesh: Mesh,
    overrides: Overrides | None = None,
) -> Inferred:
    """A PartitionSpec for every parameter of `fn(params, batch)`, from its own equations.

    Args:
      fn: any function of a pytree of parameters and a batch, traced on shapes only.
      params: arrays or `ShapeDtypeStruct`s.
      batch: arrays or `ShapeDtypeStruct`s.
      mesh: its axis sizes are what is used of it.
      overrides: path regex -> PartitionSpec, which wins over what is inferred.

    Raises:
      UserError: an override that matches nothing or does not fit; all of them in one message.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    scanned = scanned_dims(jax.make_jaxpr(fn)(params, batch), len(leaves))
    names = [path_name(path) for path, _ in leaves]
    shapes = [tuple(leaf.shape) for _, leaf in leaves]
    given = _overridden(overrides or {}, dict(zip(names, shapes, strict=True)), mesh)
    chosen = [
        given.get(name) or _fsdp(shape, walked, mesh.shape["fsdp"])
        for name, shape, walked in zip(names, shapes, scanned, strict=True)
    ]
    return Inferred(
        specs=jax.tree.unflatten(tree, [spec for spec, _ in chosen]),
        reasons={name: reason for name, (_, reason) in zip(names, chosen, strict=True)},
    )


def path_name(path: tuple[Any, ...]) -> str:
    """The path of a leaf as a user writes it: 'layers/attention/q'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def parse_overrides(texts: tuple[str, ...]) -> dict[str, PartitionSpec]:
    """`REGEX=AXIS,AXIS,...` to overrides: one entry per dimension, `-` for a dimension left whole,
    `fsdp+tensor` for two axes on one dimension; no entry at all replicates."""
    out = {}
    for text in texts:
        if not (form := _OVERRIDE.fullmatch(text)):
            raise UserError(
                f"The override {text!r} is not of the form REGEX=AXIS,AXIS,...: one entry per "
                "dimension, '-' for a dimension left whole, such as 'embedding=tensor,-'."
            )
        regex, entries = form.groups()
        axes = [tuple(entry.strip().split("+")) for entry in entries.split(",") if entry]
        out[regex] = PartitionSpec(*(None if entry == ("-",) else entry for entry in axes))
    return out


def _fsdp(shape: tuple[int, ...], walked: set[int], size: int) -> tuple[PartitionSpec, str]:
    if size == 1:
        return PartitionSpec(), "replicated: the mesh has one device along fsdp"
    if math.prod(shape) < SMALL:
        return PartitionSpec(), f"replicated: fewer than {SMALL} elements"
    fits = [d for d, n in enumerate(shape) if d not in walked and n % size == 0]
    why = f" (scanned: dimension {', '.join(map(str, sorted(walked)))})" if walked else ""
    if not fits:
        return PartitionSpec(), f"replicated: no dimension of {shape} divides by {size}{why}"
    largest = max(fits, key=lambda d: shape[d])
    spec = PartitionSpec(*(["fsdp" if d == largest else None for d in range(largest + 1)]))
    return spec, f"split over fsdp on dimension {largest}, its largest that divides by {size}{why}"


def _overridden(
    overrides: Overrides, shapes: dict[str, tuple[int, ...]], mesh: Mesh
) -> dict[str, tuple[PartitionSpec, str]]:
    out: dict[str, tuple[PartitionSpec, str]] = {}
    faults = []
    for regex, spec in overrides.items():
        try:
            hits = [name for name in shapes if re.search(regex, name)]
        except re.error as error:
            faults.append(f"{regex!r} is not a regular expression: {error}")
            continue
        if not hits:
            near = difflib.get_close_matches(regex, shapes, n=3, cutoff=0.0)
            faults.append(
                f"{regex!r} matches no parameter; the nearest paths are {', '.join(near)}"
            )
        for name in hits:
            faults += _misfits(name, shapes[name], spec, mesh)
            out[name] = (spec, f"given by the override {regex!r}")
    if faults:
        raise UserError("These sharding overrides do not fit: " + "; ".join(faults) + ".")
    return out


def _misfits(name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> list[str]:
    if len(spec) > len(shape):
        return [f"{name} has {len(shape)} dimensions, and {spec} names {len(spec)}"]
    faults, seen = [], set()
    for d, entry in enumerate(spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if axis not in mesh.shape:
                faults.append(f"{name}: {axis!r} is no axis of the mesh, {', '.join(mesh.shape)}")
            elif axis in seen:
                faults.append(f"{name}: {axis!r} stands twice in {spec}")
            seen.add(axis)
        parts = math.prod(mesh.shape.get(axis, 1) for axis in axes)
        if shape[d] % parts:
            faults.append(f"{name}: dimension {d} of {shape} does not divide by {parts}")
    return faults
