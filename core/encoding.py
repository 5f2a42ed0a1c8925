"""What a source of examples keeps in a checkpoint, as JSON."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from core.errors import UserError


def encoded(value: Any, where: str) -> Any:
    """A value as JSON: nested dicts and lists of str, bool, numbers, None and NumPy arrays.

    Raises:
      UserError: it holds something else, or a dict whose keys are no strings.
    """
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise UserError(
                f"{where} has the key {wrong[0]!r}; the keys of a dict must be strings."
            )
        return {"dict": {key: encoded(x, f"{where}[{key!r}]") for key, x in value.items()}}
    if isinstance(value, list):
        return [encoded(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, np.ndarray | np.generic) and (
        value.dtype.kind in "biufcSU" or is_extended(value.dtype)
    ):
        array = np.asarray(value)
        data = base64.b64encode(array.tobytes()).decode()
        dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
        return {"array": [dtype, array.shape, data], "scalar": array is not value}
    if value is None or type(value) in (str, bool, int, float):
        return value
    of = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
    raise UserError(
        f"{where} is a {type(value).__name__}{of}, which a checkpoint cannot hold: use dicts, "
        "lists, strings, numbers, None and NumPy arrays."
    )


def is_extended(dtype: Any) -> bool:
    """Whether it is a number type that NumPy itself lacks, such as bfloat16."""
    return dtype.kind == "V" and not dtype.name.startswith("void")


def decoded(value: Any) -> Any:
    """What `encoded` was given."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if isinstance(value, Mapping) and "dict" in value:
        return {key: decoded(item) for key, item in value["dict"].items()}
    if isinstance(value, Mapping):
        dtype, shape, data = value["array"]
        array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
        return array[()] if value["scalar"] else array
    return value
