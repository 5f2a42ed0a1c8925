"""Counts of the collectives in a compiled program."""

import re
from collections import Counter

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

KINDS = {
    "all-reduce": "AR",
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "collective-permute": "CP",
}
_LINE = re.compile(rf"\s*(?:ROOT )?%?\S+ = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_SHAPE = re.compile(r"\w+\[[\d,]*\]")


def count(text):
    """Operands of each kind, since a compiler combines several into one instruction.

    A loop's body counts once.
    """
    found, seen = Counter(), set()
    for line in text.splitlines():
        if not (match := _LINE.match(line)):
            continue
        shapes, kind, start = match.groups()
        # A fusion that waits for it repeats an instruction under the same number.
        channel = re.search(r"channel_id=(\d+)", line)
        if channel and (kind, channel[1]) in seen:
            continue
        seen |= {(kind, channel[1])} if channel else set()
        number = len(_SHAPE.findall(shapes))
        if kind == "all-to-all" or (start and kind == "collective-permute"):
            number = 1
        elif start and kind == "all-gather":  # what goes in is listed too
            number = number // 2
        found[KINDS[kind]] += number
    return found


def compiled(fn, specs, mesh, params, batch, outputs=None):
    """The text of fn(params, batch), compiled for devices with the parameters split so."""
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    out = None if outputs is None else outputs(shardings, NamedSharding(mesh, P()))
    jitted = jax.jit(fn, in_shardings=(shardings, rows), out_shardings=out)
    return jitted.lower(params, batch).compile().as_text()
