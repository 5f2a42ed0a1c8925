"""Tasks: few examples to learn from (the support set) and others to answer (the query set).

A task is {"support_x": [S, ...], "support_y", "query_x": [Q, ...], "query_y"}. Task i of a split is
a function of (seed, split, i) alone, so tasks are the same on any number of hosts, and a run that
goes on gets those that would have come.

Images are [H, W, C] in [0, 1]; a task of N ways has labels 0 to N - 1, its classes in random order.
"""

import hashlib
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from core import UserError

from . import glyphs

SPLITS = ("train", "valid", "test")
PATTERNS = ("*.png", "*.jpg", "*.jpeg")
BENCHMARKS = ("omniglot", "mini-imagenet")  # of learn2learn
INSTALL = """learn2learn is asked for but missing. Its release does not build on this Python without
its C files made anew, and asks for packages that nothing here needs, so install it in this way:
  pip install learn2learn==0.2.0 --no-deps --config-settings "--build-option=build_ext"
  pip install torch==2.14.1 torchvision==0.29.1 gym scipy requests tqdm"""


class Tasks(Sequence[Any]):
    """A sequence of so many tasks, each drawn when it is asked for.

    Args:
      draw: function of a NumPy generator, that of (seed, split, index), to a task.
    """

    def __init__(self, draw, number, seed, split):
        self._draw, self._number, self._stream = draw, number, (seed, SPLITS.index(split))

    def __len__(self):
        return self._number

    def __getitem__(self, index):
        index = range(self._number)[index]
        return self._draw(np.random.default_rng((*self._stream, index)))


def sinusoid(rng, *, shots, queries, frequency=(1.0, 1.0), grid=False):
    """A sine of amplitude 0.1 to 5 and phase 0 to pi at x from -5 to 5 (Finn et al. 2017, 5.1).

    Args:
      frequency: range of the angular frequency, 1 in the paper; Li et al. 2017 vary it.
      grid: lay the queries out evenly from -5 to 5 instead of drawing them.
    """
    amplitude, phase = rng.uniform(0.1, 5.0), rng.uniform(0.0, np.pi)
    speed = rng.uniform(*frequency)
    x = rng.uniform(-5.0, 5.0, (shots + queries, 1))
    if grid:
        x[shots:, 0] = np.linspace(-5.0, 5.0, queries)
    y = amplitude * np.sin(speed * x - phase)
    x, y = x.astype(np.float32), y.astype(np.float32)
    return _task(x[:shots], y[:shots], x[shots:], y[shots:])


def few_shot(rng, *, classes, ways, shots, queries):
    """Tells apart some classes, each an array [n, H, W, C] uint8 of distinct examples."""
    chosen = rng.choice(len(classes), ways, replace=False)
    each = shots + queries
    x = np.stack([classes[i][rng.choice(len(classes[i]), each, replace=False)] for i in chosen])
    return _split(x.astype(np.float32) / 255, shots)


def sampled(rng, *, taskset, shots):
    """A task of a learn2learn `Taskset` with shots + queries images [C, H, W] of each class."""
    import torch

    seed = int(rng.integers(2**32))
    random.seed(seed)  # which its transforms draw from
    torch.manual_seed(seed)
    images, labels = (array.numpy() for array in taskset.sample())
    images = np.moveaxis(images, 1, -1).astype(np.float32)
    return _split(np.stack([images[labels == label] for label in np.unique(labels)]), shots)


def glyph_tasks(**sizes):
    """Functions that draw tasks of glyphs, by split, and their digest; see `few_shot`."""
    splits = glyphs.load()
    named = {split: dict(enumerate(classes)) for split, classes in splits.items()}
    return {split: drawer(named[split], **sizes) for split in SPLITS}, {"digest": digest(named)}


def image_tasks(folder, size, color, **sizes):
    """The same of a folder of pictures; see `load_images`."""
    named = load_images(folder, size, color)
    return {split: drawer(named[split], **sizes) for split in SPLITS}, {"digest": digest(named)}


def benchmark_tasks(name, *, ways, shots, queries):
    """Functions that draw tasks of a benchmark of learn2learn, by split; see `load_benchmark`."""
    sets = load_benchmark(name, ways, shots + queries, glyphs.cache_folder() / "learn2learn")
    return {split: partial(sampled, taskset=sets[split], shots=shots) for split in SPLITS}


def drawer(classes, *, ways, shots, queries):
    """The function that draws tasks from named classes, {name: pictures [n, H, W, C] uint8}.

    Raises:
      UserError: there are too few classes, or a class has too few pictures.
    """
    if len(classes) < ways:
        raise UserError(
            f"Tasks of {ways} ways need as many classes, and a split of the data has only "
            f"{len(classes)}: give fewer --ways or more classes."
        )
    least = min(classes, key=lambda name: len(classes[name]))
    if len(classes[least]) < shots + queries:
        raise UserError(
            f"{shots} shots and {queries} queries need {shots + queries} different examples of "
            f"each class, and class {least} has {len(classes[least])}: give fewer --shots or "
            "--queries, or more examples."
        )
    return partial(
        few_shot, classes=list(classes.values()), ways=ways, shots=shots, queries=queries
    )


def digest(splits):
    """Of all classes by split."""
    total = hashlib.sha256()
    for split, classes in splits.items():
        for name, pictures in classes.items():
            total.update(f"{split}/{name}/{pictures.shape}".encode())
            total.update(pictures.tobytes())
    return total.hexdigest()


def load_images(folder, size, color):
    """Classes of a folder root/class/picture, by split and name: 64, 16 and 20 % by a hash.

    Args:
      size: the pictures are scaled to so many pixels squared.
      color: three channels instead of one.

    Raises:
      UserError: there are no such files, or one cannot be read.
    """
    root = Path(folder)
    names = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    files = {name: sorted(f for p in PATTERNS for f in (root / name).glob(p)) for name in names}
    files = {name: found for name, found in files.items() if found}
    if not files:
        raise UserError(
            f"--images {folder} has no pictures: give a folder with one subfolder for each class, "
            f"with its pictures in it ({', '.join(PATTERNS)})."
        )
    order = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    cuts = [round(0.64 * len(order)), round(0.8 * len(order))]
    parts = np.split(np.asarray(order), cuts)
    return {
        split: {name: np.stack([_read(f, size, color) for f in files[name]]) for name in part}
        for split, part in zip(SPLITS, parts, strict=True)
    }


def load_benchmark(name, ways, samples, root):
    """The task sets of a benchmark of learn2learn by split, which it downloads into a folder.

    Raises:
      UserError: learn2learn is not installed, or the data cannot be had.
    """
    try:
        from learn2learn.vision.benchmarks import get_tasksets
    except ImportError as error:
        raise UserError(f"{INSTALL}\n({error})") from error
    random.seed(0)  # draws which classes of Omniglot are in which split
    try:
        sets = get_tasksets(
            name,
            train_ways=ways,
            train_samples=samples,
            test_ways=ways,
            test_samples=samples,
            root=str(root),
            **({"data_augmentation": "normalize"} if name == "mini-imagenet" else {}),
        )
    except OSError as error:
        raise UserError(
            f"learn2learn cannot load {name} into {root} ({error}). It needs the network once; "
            "without one, glyphs and --images need none."
        ) from error
    return dict(zip(SPLITS, sets, strict=True))


def nearest(task):
    """The share of queries whose nearest support picture, pixel by pixel, is of their class."""
    flat = [task[name].reshape(len(task[name]), -1) for name in ("query_x", "support_x")]
    query, support = flat
    distance = np.square(support).sum(1)[None] - 2 * query @ support.T
    return float(np.mean(task["support_y"][distance.argmin(1)] == task["query_y"]))


def _split(x, shots):
    """A task of examples x [ways, shots + queries, H, W, C] by class."""
    label = np.arange(len(x), dtype=np.int32)
    support, query = x[:, :shots], x[:, shots:]
    return _task(
        support.reshape(-1, *x.shape[2:]),
        np.repeat(label, shots),
        query.reshape(-1, *x.shape[2:]),
        np.repeat(label, query.shape[1]),
    )


def _task(support_x, support_y, query_x, query_y):
    return {
        "support_x": support_x,
        "support_y": support_y,
        "query_x": query_x,
        "query_y": query_y,
    }


def _read(path, size, color):
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB" if color else "L").resize((size, size))
    except OSError as error:
        raise UserError(
            f"The picture {path} cannot be read ({error}): mend it or take it out."
        ) from error
    return np.asarray(picture, np.uint8).reshape(size, size, -1)
