"""The one exception type whose message is meant for the person who runs a script."""

from typing import Any


class UserError(ValueError):
    """A mistake the user can mend; the message says what was given, what fits, what to change."""


def at_least(options: Any, name: str, least: float) -> None:
    """Raises a `UserError` where a numeric option is below its least value, or not a number."""
    value = getattr(options, name)
    if not least <= value < float("inf"):
        raise UserError(f"{name} {value} is out of range: it must be at least {least}.")
