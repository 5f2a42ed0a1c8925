"""Sources, order, padding, the rows of a process, and collation in the background."""

import math
import re
import threading
import time

import jax
import numpy as np
import pytest

from core import MeshOptions, UserError, data, make_mesh
from core.data import AHEAD, Layout, batches, collated, count, order, select


def mesh(data, fsdp=1):
    return make_mesh(MeshOptions(data, fsdp), jax.devices()[: data * fsdp])


def collate(examples):
    return {"value": np.asarray(examples, np.float32)}


class Table:
    """Like `datasets.Dataset`: reads many rows at once."""

    def __init__(self, number):
        self.number, self.reads = number, []

    def __len__(self):
        return self.number

    def __getitem__(self, row):
        raise AssertionError("rows are read together")

    def __getitems__(self, rows):
        self.reads.append(rows)
        return [{"row": row} for row in rows]


def test_every_kind_of_source_gives_its_rows():
    rows = np.array([2, 0])
    assert select([10, 11, 12], rows) == [12, 10]
    picked = select({"a": np.arange(3) * 10, "b": np.eye(3)}, rows)
    assert picked["a"].tolist() == [20, 0] and picked["b"].shape == (2, 3)
    table = Table(3)
    assert select(table, rows) == [{"row": 2}, {"row": 0}] and table.reads == [[2, 0]]
    assert count([1, 2]) == 2 and count({"a": np.ones(4), "b": np.ones((4, 2))}) == 4


def test_a_hugging_face_data_set_is_a_source():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "n": [1, 2, 3]})
    assert count(table) == 3
    assert select(table, np.array([2, 0])) == [{"text": "c", "n": 3}, {"text": "a", "n": 1}]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ((x for x in [1]), "the text: a generator has no length and no index. Give a sequence"),
        (3, "the text: a int has no length"),
        ({"a": np.ones(2), "b": np.ones(3)}, "equal leading axes, but has {'a': 2, 'b': 3}"),
        ({}, "the dict of arrays is empty"),
    ],
)
def test_what_is_no_source_is_said(source, says):
    with pytest.raises(UserError, match="(?i)" + re.escape(says)):
        count(source, "text")


def test_order_is_a_function_of_seed_and_epoch():
    first = order(1, 2, 100)
    assert sorted(first) == list(range(100))
    np.testing.assert_array_equal(first, order(1, 2, 100))
    for other in (order(1, 3, 100), order(2, 2, 100), order(2, 1, 100)):
        assert (first != other).any()


@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("batch, k", [(8, 1), (8, 4), (6, 2), (1, 1)])
def test_rows_lie_in_data_order_and_each_microbatch_pads_its_own_end(shards, batch, k):
    layout = Layout(mesh(shards), batch, k)
    width = math.ceil(batch / k / shards) * shards
    for number in range(1, batch + 1):
        rows = np.arange(100, 100 + number)
        arrays = {"row": layout.place(rows)}
        placed = layout.batch(arrays, number)
        got, mask = np.asarray(placed["row"]), np.asarray(placed["row_mask"])
        assert got.shape == mask.shape == (k, width)
        for i in range(k):
            mine = rows[i * (batch // k) : (i + 1) * (batch // k)]
            assert got[i, : len(mine)].tolist() == mine.tolist()
            assert mask[i].tolist() == [True] * len(mine) + [False] * (width - len(mine))
        assert set(got[~mask]) <= {100}, "padding repeats a real row"
        assert placed["row"].sharding.spec == jax.P(None, ("data", "fsdp"))


@pytest.mark.parametrize(
    ("batch", "k", "says"),
    [
        (10, 4, "a batch of 8 or 12 would"),
        (3, 4, "a batch of 4 would"),
        (0, 1, "both are at least 1"),
        (4, 0, "both are at least 1"),
    ],
)
def test_a_batch_that_does_not_divide_names_the_sizes_that_would(batch, k, says):
    with pytest.raises(UserError, match=says):
        Layout(mesh(1), batch, k)


def test_batches_cover_all_rows_in_order_for_tiny_and_for_slow_batches():
    for pause in (0, 0.002):

        def slowly(examples, pause=pause):
            time.sleep(pause)
            return collate(examples)

        layout = Layout(mesh(2), 4)
        rows = np.arange(50)[::-1]
        got = list(batches(np.arange(50.0), rows, layout, slowly))
        real = [np.asarray(b["value"])[np.asarray(b["row_mask"])] for b in got]
        assert np.concatenate(real).tolist() == list(range(50))[::-1]
        assert [len(x) for x in real] == [4] * 12 + [2]


def test_collation_runs_ahead_in_the_background_but_not_far():
    started, threads = [], set()

    def slowly(examples):
        started.append(len(started))
        threads.add(threading.current_thread())
        time.sleep(0.01)
        return collate(examples)

    stream = batches(np.arange(100.0), np.arange(100), Layout(mesh(1), 1), slowly)
    for taken in range(1, 4):
        next(stream)
        time.sleep(0.1)
        assert len(started) == taken + AHEAD
    # The first one, which the device waits for anyway, tells how long it takes.
    threads.remove(threading.current_thread())
    stream.close()
    assert len(threads) == 1 and not any(thread.is_alive() for thread in threads)


def test_collation_of_a_moment_needs_no_thread(monkeypatch):
    monkeypatch.setattr(data, "MOMENT", 60)  # however busy the machine is
    threads = set()

    def quickly(examples):
        threads.add(threading.current_thread())
        return collate(examples)

    assert len(list(batches(np.arange(9.0), np.arange(9), Layout(mesh(1), 3), quickly))) == 3
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("kind", [ValueError, UserError])
def test_an_error_in_collate_names_the_example_and_stops(kind):
    def broken(examples):
        if 7.0 in examples:
            raise kind("not this one")
        return collate(examples)

    seen = []
    with pytest.raises(kind, match="not this one") as caught:
        for batch in batches(np.arange(20.0), np.arange(20), Layout(mesh(1), 4), broken, "text"):
            seen.append(batch)
    assert caught.value.__notes__ == ["This came from example 7 of the text."]
    assert len(seen) <= 1


def test_examples_that_do_not_go_together_are_named():
    rows = [np.zeros(2), np.zeros(2), np.zeros(3)]
    with pytest.raises(ValueError, match="same shape") as caught:
        collated(np.stack, rows, np.array([2, 0]), "text")
    assert caught.value.__notes__ == ["This came from the examples [2, 0] of the text."]


def test_an_example_that_cannot_be_read_is_named():
    class Broken(list):
        def __getitem__(self, row):
            if row == 3:
                raise OSError("bad sector")
            return super().__getitem__(row)

    with pytest.raises(OSError, match="bad sector") as caught:
        collated(collate, Broken(range(8)), np.array([2, 3, 4]), "text")
    assert caught.value.__notes__ == ["This came from example 3 of the text."]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ([1.0], "collate returned a list; it must return a dict of arrays"),
        ({"x": np.ones(3)}, r"'x' as float64\[3\] for 2 examples; .* leading axis 2"),
        ({"x": np.float32(1)}, r"'x' as float32\[\]"),
        ({"x": ["a", None]}, r"'x' as object\[2\]"),
        ({"x": ["a", "b"]}, "array of numbers"),
        ({"x": [[1], [1, 2]]}, "no array .*pad to a length"),
        ({3: np.ones(2)}, r"keys \[3\]; keys must be strings"),
        ({"row_mask": np.ones(2)}, "'row_mask', which the core adds"),
    ],
)
def test_what_collate_returns_is_checked(made, says):
    with pytest.raises(UserError, match=says):
        collated(lambda examples: made, [0, 1], np.array([0, 1]), "text")


def test_shapes_that_depend_on_the_examples_are_refused():
    def ragged(examples):
        return {"x": np.zeros((len(examples), int(max(examples))))}

    with pytest.raises(
        UserError,
        match=r"'x' as \[4, 11\] after \[4, 7\], for the examples \[4, 5, 6, 7\] of .*pad",
    ):
        list(batches(np.arange(4, 12), np.arange(8), Layout(mesh(1), 4), ragged))
