"""What a source keeps comes back as it was, through JSON."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from core import UserError
from core.encoding import decoded, encoded


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        "ä\n",
        -(2**200),
        0.1,
        float("inf"),
        [1, [2.5, None], {"a": []}],
        {"dict": {"array": [1, 2, 3]}, "scalar": False},
        np.random.PCG64(3).state,
        np.random.MT19937(3).state,
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 3)),
        np.array([np.nan, -0.0]),
        np.array(["ab", "c"]),
        np.array([1 + 2j], np.complex64),
        np.array([1.5, 2], ">f4"),
        np.arange(4).astype(jnp.bfloat16),
        np.float32(0.1),
        np.int64(2**62),
    ],
    ids=repr,
)
def test_a_value_comes_back_to_the_bit(value):
    def same(a, b):
        assert type(a) is type(b)
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            [same(a[key], b[key]) for key in a]
        elif isinstance(a, list):
            [same(x, y) for x, y in zip(a, b, strict=True)]
        elif isinstance(a, np.ndarray | np.generic):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        else:
            assert a == b

    same(decoded(json.loads(json.dumps(encoded(value, "state()")))), value)


def test_arrays_that_come_back_can_be_changed():
    array = decoded(encoded(np.zeros(3), "state()"))
    array += 1


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, (2,)]}, r"^state\(\)\['a'\]\[1\] is a tuple, which a checkpoint cannot hold"),
        ({1: 2}, r"^state\(\) has the key 1; the keys of a dict must be strings"),
        ([object()], r"^state\(\)\[0\] is a object"),
        (np.array([None]), r"^state\(\) is a ndarray of object"),
        (np.zeros(2, [("a", "i4")]), r"^state\(\) is a ndarray of"),
        (jnp.ones(2), r"^state\(\) is a ArrayImpl"),
    ],
)
def test_what_cannot_be_kept_is_named(value, says):
    with pytest.raises(UserError, match=says):
        encoded(value, "state()")
