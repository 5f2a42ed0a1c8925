"""Shardings that the user gives for parameters by path, which win over what is inferred."""

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from core.errors import UserError

Overrides = Mapping[str, PartitionSpec]

_ENTRY = r"\s*(?:-|\w+(?:\+\w+)*)\s*"
_OVERRIDE = re.compile(rf"(.+)=({_ENTRY}(?:,{_ENTRY})*|)")


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
        out[form[1]] = parse_spec(form[2])
    return out


def parse_spec(entries: str) -> PartitionSpec:
    """Entries as an override has them, such as "-,fsdp+tensor"."""
    axes = [tuple(entry.strip().split("+")) for entry in entries.split(",") if entry]
    return PartitionSpec(*(None if entry == ("-",) else entry for entry in axes))


def written(spec: PartitionSpec) -> str:
    """The entries that `parse_spec` reads as this."""
    return ",".join(
        "-" if not entry else "+".join([entry] if isinstance(entry, str) else entry)
        for entry in spec
    )


def overridden(
    overrides: Overrides, shapes: dict[str, tuple[int, ...]], mesh: Mesh
) -> dict[str, tuple[PartitionSpec, str]]:
    """By path, the sharding that is given for it, and the expression that gave it.

    Raises:
      UserError: an override that matches nothing or does not fit; all of them in one message.
    """
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
            faults += misfits(name, shapes[name], spec, mesh)
            out[name] = (spec, f"given by the override {regex!r}")
    if faults:
        raise UserError("These sharding overrides do not fit: " + "; ".join(faults) + ".")
    return out


def misfits(name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> list[str]:
    """What of a spec does not fit a parameter or the mesh, each as a sentence."""
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
