"""Examples to global arrays: order, batches, padding, the rows of each host, prefetch.

The rows of one step are laid out as [k, width]: k microbatches in data order, each padded at its
own end to a multiple of the devices that split it, and split over (data, fsdp) on axis 1. So no
data moves between devices, and what a microbatch holds does not depend on how many there are.
"""

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.errors import UserError
from core.mesh import ROW_AXES, row_shards

# A sequence (or `datasets.Dataset`) of examples, or a dict of arrays with equal leading axes.
Examples = Sequence[Any] | Mapping[str, np.ndarray]
Collate = Callable[[Any], Mapping[str, np.ndarray]]
Batch = dict[str, jax.Array]

# Batches are collated this far ahead of the device, except where the first ones take less than so
# many seconds: there, to wait for a thread would take longer.
AHEAD = 2
MOMENT = 0.001


def count(examples: Any, name: str = "examples") -> int:
    """The number of examples.

    Raises:
      UserError: not a source of examples, or arrays of unequal lengths.
    """
    if isinstance(examples, Mapping):
        lengths = {key: len(array) for key, array in examples.items()}
        if not lengths:
            raise UserError(f"The {name}: the dict of arrays is empty.")
        if len(set(lengths.values())) != 1:
            raise UserError(
                f"The {name}: a dict of arrays must have equal leading axes, but has {lengths}."
            )
        return next(iter(lengths.values()))
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        raise UserError(
            f"The {name}: a {type(examples).__name__} has no length and no index. Give a sequence, "
            "a datasets.Dataset or a dict of arrays (to train also a function (epoch, params) that "
            "returns one)."
        )
    return len(examples)


def some(examples: Any, name: str) -> int:
    """The number of examples, at least one.

    Raises:
      UserError: there is none.
    """
    if not (number := count(examples, name)):
        raise UserError(f"The {name}: there are no examples in it.")
    return number


def select(examples: Examples, rows: np.ndarray) -> Any:
    """The examples of these rows: a dict of selected rows, or a list."""
    if isinstance(examples, Mapping):
        return {key: array[rows] for key, array in examples.items()}
    if hasattr(examples, "__getitems__"):  # datasets.Dataset: one read for all rows
        return examples.__getitems__(rows.tolist())
    return [examples[row] for row in rows.tolist()]


def order(seed: int, epoch: int, examples: int) -> np.ndarray:
    """The order of the examples in an epoch, a function of (seed, epoch) alone."""
    return np.random.default_rng((seed, epoch)).permutation(examples)


class Layout:
    """How the rows of one step lie on devices and hosts."""

    def __init__(self, mesh: Mesh, batch_size: int, microbatches: int = 1):
        self.batch_size, self.microbatches = batch_size, microbatches
        self.rows = _divided(batch_size, microbatches)
        shards = row_shards(mesh)
        self.width = math.ceil(self.rows / shards) * shards
        self.sharding = NamedSharding(mesh, PartitionSpec(None, ROW_AXES))
        shape = (microbatches, self.width)
        slices = self.sharding.addressable_devices_indices_map(shape).values()
        spans = [range(*index[1].indices(self.width)) for index in slices if index is not None]
        # The columns of the layout that this process holds, in ascending order.
        self.columns = np.unique(np.concatenate([np.asarray(span) for span in spans]))
        # Almost all steps have the same number of rows.
        self._pattern = functools.lru_cache(16)(self._pattern_of)

    def place(self, rows: np.ndarray) -> np.ndarray:
        """Rows of a step [n], n at most the batch size, to those that this process reads.

        Returns:
          [k * columns of this process], padded by repeating one of its real rows; a process
          without any reads the first of the step.
        """
        index, _ = self._pattern(len(rows))
        return np.take(rows, index)

    def to_global(self, own: np.ndarray) -> jax.Array:
        """[k * columns of this process, ...] on this process to a global [k, width, ...]."""
        own = own.reshape(self.microbatches, len(self.columns), *own.shape[1:])
        shape = (self.microbatches, self.width, *own.shape[2:])

        def shard(index: Any) -> np.ndarray:
            start, stop, _ = index[1].indices(self.width)
            first = int(np.searchsorted(self.columns, start))
            return own[:, first : first + stop - start]

        return jax.make_array_from_callback(shape, self.sharding, shard)

    def batch(self, arrays: Mapping[str, np.ndarray], rows: int) -> Batch:
        """Arrays of this process's rows, of a step of so many, to the global batch."""
        batch = {key: self.to_global(array) for key, array in arrays.items()}
        return batch | {"row_mask": self._pattern(rows)[1]}

    def _pattern_of(self, rows: int) -> tuple[np.ndarray, jax.Array]:
        """Which rows of a step of so many this process reads, and the global mask of the real."""
        mask = np.zeros((self.microbatches, self.rows), bool)
        mask.reshape(-1)[:rows] = True
        grid = np.zeros((self.microbatches, self.width), int)
        grid[:, : self.rows][mask] = np.arange(rows)
        mask = np.pad(mask, ((0, 0), (0, self.width - self.rows)))
        own, real = grid[:, self.columns], mask[:, self.columns]
        if real.any():
            own[~real] = own[real][0]
        return own.reshape(-1), self.to_global(real.reshape(-1))


def batches(
    examples: Examples, rows: np.ndarray, layout: Layout, collate: Collate, name: str = "examples"
) -> Iterator[Batch]:
    """Global batches of the given rows in the given order, all of them, the last one padded.

    Reading and collating run ahead in a background thread, unless they are a matter of a moment;
    an error there surfaces here, with the index of the example that caused it.
    """

    _agree(len(rows), name)
    shapes: dict[str, tuple[int, ...]] = {}
    starts = iter(range(0, len(rows), layout.batch_size))

    def build(start: int) -> Batch:
        step = rows[start : start + layout.batch_size]
        arrays = collated(collate, examples, layout.place(step), name)
        for key, array in arrays.items():
            if shapes.setdefault(key, array.shape) != array.shape:
                raise UserError(
                    f"collate returned {key!r} as {list(array.shape)} after {list(shapes[key])}, "
                    f"for the examples {step.tolist()} of the {name}: shapes must not depend on "
                    "the examples; pad to a fixed length."
                )
        return layout.batch(arrays, len(step))

    ahead: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="collate") as pool:

        def begin(number: int) -> None:
            ahead.extend(pool.submit(build, start) for start in itertools.islice(starts, number))

        for start in starts:
            began = time.monotonic()
            batch = build(start)
            if time.monotonic() - began > MOMENT:
                begin(AHEAD)
            yield batch
            if ahead:
                break
        while ahead:
            batch = ahead.popleft().result()
            begin(1)
            yield batch


def _agree(rows: int, name: str) -> None:
    """Raises a `UserError` where the processes have different numbers of examples.

    One of them would wait for ever in a step that the others never reach.
    """
    if jax.process_count() == 1:
        return
    counts = [int(n) for n in multihost_utils.process_allgather(np.asarray(rows))]
    if len(set(counts)) > 1:
        raise UserError(
            f"The {name}: the processes have {counts} examples; each must be given all of them, "
            "the same on every process, of which it reads its own rows."
        )


def collated(
    collate: Collate, examples: Examples, rows: np.ndarray, name: str
) -> dict[str, np.ndarray]:
    """The collated examples of these rows.

    Raises:
      UserError: what `collate` returned is no batch.
      Exception: what reading or collating raised, noting the index of the example.
    """
    try:
        batch = collate(select(examples, rows))
    except Exception as error:
        culprit = _culprit(collate, examples, rows)
        where = f"example {culprit}" if culprit is not None else f"the examples {rows.tolist()}"
        error.add_note(f"This came from {where} of the {name}.")
        raise
    return check_batch(batch, len(rows))


def check_batch(batch: Any, rows: int) -> dict[str, np.ndarray]:
    """A collated batch as a dict of arrays with the right leading axis.

    Raises:
      UserError: it is not that.
    """
    if not isinstance(batch, Mapping):
        raise UserError(
            f"collate returned a {type(batch).__name__}; it must return a dict of arrays."
        )
    if "row_mask" in batch:
        raise UserError(
            "collate returned 'row_mask', which the core adds to every batch: name it otherwise."
        )
    if wrong := [key for key in batch if not isinstance(key, str)]:
        raise UserError(f"collate returned a dict with the keys {wrong}; keys must be strings.")
    try:
        arrays = {key: np.asarray(value) for key, value in batch.items()}
    except ValueError as error:
        raise UserError(f"collate returned what is no array ({error}); pad to a length.") from error
    for key, array in arrays.items():
        if array.dtype.kind not in "biufcV" or array.shape[:1] != (rows,):
            raise UserError(
                f"collate returned {key!r} as {array.dtype}{list(array.shape)} for {rows} examples;"
                f" it must be an array of numbers with leading axis {rows}."
            )
    return arrays


def _culprit(collate: Collate, examples: Examples, rows: np.ndarray) -> int | None:
    for row in rows:
        try:
            collate(select(examples, np.asarray([row])))
        except Exception:
            return int(row)
    return None


def _divided(batch_size: int, microbatches: int) -> int:
    if batch_size < 1 or microbatches < 1:
        raise UserError(
            f"A batch of {batch_size} in {microbatches} microbatches is not possible: both are at "
            "least 1."
        )
    if batch_size % microbatches:
        below = batch_size // microbatches * microbatches
        sizes = [str(size) for size in (below, below + microbatches) if size]
        raise UserError(
            f"A batch of {batch_size} does not divide into {microbatches} microbatches; a batch of "
            f"{' or '.join(sizes)} would."
        )
    return batch_size // microbatches
