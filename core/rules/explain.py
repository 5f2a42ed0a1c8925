"""How parameters are split, as a table, as JSON, and as a file in the folder of a run."""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from core.rules.overrides import parse_spec, path_name, written

FILE = "sharding.json"


@dataclasses.dataclass(frozen=True)
class Row:
    """A parameter, or several that differ only by the numbers in their paths."""

    path: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    role: str
    spec: str
    """As overrides write it."""
    bytes: int
    """Of all of them."""
    bytes_per_device: int
    reason: str


def rows(inferred: Any, params: Any, mesh: Mesh) -> list[Row]:
    """A row for every parameter, in their order, like layers folded."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    specs = jax.tree.leaves(inferred.specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    found: dict[Any, Row] = {}
    for (keys, leaf), spec in zip(leaves, specs, strict=True):
        path = path_name(keys)
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        axes = [axis for entry in spec for axis in _axes(entry)]
        row = Row(
            path,
            1,
            tuple(leaf.shape),
            str(leaf.dtype),
            inferred.roles[path],
            written(spec),
            size,
            size // math.prod(mesh.shape[axis] for axis in axes),
            inferred.reasons[path],
        )
        folded = re.sub(r"(?<![^/])\d+(?![^/])", "*", path)
        like = dataclasses.replace(row, path=folded)
        found[like] = _together(folded, found[like], row) if like in found else row
    return list(found.values())


def _together(path: str, one: Row, other: Row) -> Row:
    counts = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("count", "bytes", "bytes_per_device")
    }
    return dataclasses.replace(other, path=path, **counts)


def table(rows: Sequence[Row], problems: Sequence[str], mesh: Mesh) -> str:
    """For people: the rows, totals, and what every device has whole, the largest first."""
    head = ("parameter", "shape", "role", "split", "a device has", "why")
    lines = [head] + [
        (
            row.path + (f" ({row.count})" if row.count > 1 else ""),
            " x ".join(map(str, row.shape)) or "scalar",
            row.role,
            row.spec or "whole",
            in_words(row.bytes_per_device),
            row.reason,
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)) for line in lines]
    total, one = (sum(getattr(row, n) for row in rows) for n in ("bytes", "bytes_per_device"))
    whole = [row for row in rows if row.bytes == row.bytes_per_device]
    on = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    text += ["", f"The mesh is {on}. Of {in_words(total)} a device has {in_words(one)}."]
    if whole and math.prod(mesh.shape[axis] for axis in ("fsdp", "tensor")) > 1:
        text += [f"Whole on every device: {in_words(sum(row.bytes for row in whole))}, of these"]
        for row in sorted(whole, key=lambda row: -row.bytes)[:10]:
            text.append(f"  {in_words(row.bytes):>10}  {row.path}: {row.reason}")
    return "\n".join(line.rstrip() for line in [*text, *problems])


def as_json(rows: Sequence[Row], problems: Sequence[str], mesh: Mesh) -> dict[str, Any]:
    return {
        "mesh": dict(mesh.shape),
        "parameters": [dataclasses.asdict(row) for row in rows],
        "problems": list(problems),
    }


def save(folder: Path, inferred: Any, params: Any, mesh: Mesh) -> None:
    """Keeps the shardings for this mesh in the folder of a run, beside those for others."""
    known = _read(folder)
    specs = jax.tree.leaves(inferred.specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    known[_key(mesh)] = {
        "specs": dict(zip(inferred.reasons, map(written, specs), strict=True)),
        **as_json(rows(inferred, params, mesh), inferred.problems, mesh),
    }
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{FILE}.part"
    part.write_text(json.dumps(known, indent=1) + "\n")
    part.replace(folder / FILE)


def load(folder: str | Path, mesh: Mesh) -> dict[str, PartitionSpec]:
    """The shardings that a run used on this mesh, by path; empty where it never ran on it."""
    try:
        kept = _read(Path(folder)).get(_key(mesh), {})
        return {path: parse_spec(text) for path, text in kept.get("specs", {}).items()}
    except (AttributeError, TypeError):  # not what was written there
        return {}


def in_words(size: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size = size / 1024  # type: ignore[assignment]
    return f"{size:,.0f} {unit}" if size >= 100 or unit == "bytes" else f"{size:.1f} {unit}"


def _read(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError):  # it can be made anew
        return {}


def _key(mesh: Mesh) -> str:
    return ", ".join(f"{axis} {mesh.shape[axis]}" for axis in ("fsdp", "tensor"))


def _axes(entry: Any) -> Sequence[str]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
