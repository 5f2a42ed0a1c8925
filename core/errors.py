"""The one exception type whose message is meant for the person who runs a script."""

import json
from collections.abc import Mapping
from typing import Any


class UserError(ValueError):
    """A mistake the user can mend; the message says what was given, what fits, what to change."""


class NotFinite(UserError):
    """A run stopped since its loss or gradient is not finite; a script may add what is likely."""


def at_least(options: Any, name: str, least: float) -> None:
    """Raises a `UserError` where a numeric option is below its least value, or beyond 32 bits."""
    value = getattr(options, name)
    end = 2**31 if isinstance(value, int) else float("inf")
    if not least <= value < end:
        below = f" and below {end}" if value >= end else ""
        raise UserError(f"{name} {value} is out of range: it must be at least {least}{below}.")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """A table of what differs between the settings of a run and new ones; "" if nothing does.

    Settings may be nested, and are compared as JSON has them; those that only one side knows,
    since the program has changed, are none.
    """
    was, now = _flat(old), _flat(new)
    rows = [(key, was[key], now[key]) for key in was if key in now and was[key] != now[key]]
    if not rows:
        return ""
    rows.insert(0, ("setting", "the run has", "given now"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join("  " + line.rstrip() for line in lines)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{dotted name: value as JSON}."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(value)
    return flat


def short(error: Exception) -> str:
    """The first line of an error's message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
