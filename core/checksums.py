"""The SHA-256 of every file of a checkpoint, written with it and compared before it is restored."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from core.errors import short
from core.mesh import all_processes

NAME = "checksums.json"


class Damaged(Exception):
    """A checkpoint is not what was saved, or not of this model."""


def write(folder: Path) -> None:
    """Adds the checksums of all files of the items in a checkpoint's folder."""
    names = sorted(str(p.relative_to(folder)) for p in folder.glob("*/**/*") if p.is_file())
    with ThreadPoolExecutor() as pool:
        sums = dict(zip(names, pool.map(_digest, map(folder.joinpath, names)), strict=True))
    (folder / NAME).write_text(json.dumps(sums, indent=0))


def verify(folder: Path, items: tuple[str, ...]) -> None:
    """Raises `Damaged`, on every process, where a file of these items is not as it was written.

    Each process reads its share of the files.
    """
    problem = ""
    try:
        sums = json.loads((folder / NAME).read_text())
        wanted = sorted(name for name in sums if name.split("/")[0] in items)
        if missing := set(items) - {name.split("/")[0] for name in wanted}:
            problem = f"it has no {', '.join(sorted(missing))}."
        mine = wanted[jax.process_index() :: jax.process_count()]
        with ThreadPoolExecutor() as pool:
            digests = list(pool.map(_digest, map(folder.joinpath, mine)))
        if changed := [n for n, digest in zip(mine, digests, strict=True) if digest != sums[n]]:
            problem = f"{changed[0]} is not what was saved (its checksum differs)."
    except FileNotFoundError as error:
        problem = f"{Path(error.filename).relative_to(folder)} is missing."
    except (OSError, ValueError, AttributeError, TypeError) as error:
        problem = f"it cannot be read ({short(error)})."
    agree_on(problem)


def agree_on(problem: str) -> None:
    """Raises `Damaged` on every process where one of them has a problem; "" is none."""
    if not all_processes(not problem):
        raise Damaged(problem or "another process cannot read it.")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
