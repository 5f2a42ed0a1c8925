"""Tasks: what is in them, what they depend on, and the mistakes that are named."""

import sys
from functools import partial

import numpy as np
import pytest
from PIL import Image

from algorithms.maml import data
from core import UserError


def numbered(classes=6, each=5):
    """Classes whose every picture says by its pixels which it is: class, number."""
    return {
        f"class{c}": np.stack([np.full((2, 2, 1), 10 * c + n, np.uint8) for n in range(each)])
        for c in range(classes)
    }


def tasks(number=20, seed=0, split="train", **sizes):
    sizes = {"ways": 3, "shots": 2, "queries": 3} | sizes
    return data.Tasks(data.drawer(numbered(), **sizes), number, seed, split)


def codes(x):
    return np.round(255 * x[:, 0, 0, 0]).astype(int)


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


def test_a_task_is_a_function_of_seed_split_and_index():
    assert same(tasks()[7], tasks(number=8)[7])
    assert same(tasks(number=5)[-1], tasks(number=9)[4])
    others = [tasks()[6], tasks(seed=1)[7], tasks(split="test")[7], tasks(split="valid")[7]]
    assert not any(same(tasks()[7], other) for other in others)
    assert len(tasks()) == 20
    with pytest.raises(IndexError):
        tasks()[20]


def test_support_and_queries_are_different_examples_of_the_same_classes():
    for task in tasks():
        assert task["support_x"].shape == (6, 2, 2, 1) and task["query_x"].shape == (9, 2, 2, 1)
        assert task["support_x"].dtype == np.float32 and task["query_y"].dtype == np.int32
        support, query = codes(task["support_x"]), codes(task["query_x"])
        assert len({*support, *query}) == 15
        of_label = [set(support[task["support_y"] == label] // 10) for label in range(3)]
        assert [len(classes) for classes in of_label] == [1, 1, 1]
        assert len(set.union(*of_label)) == 3
        for label, classes in enumerate(of_label):
            assert set(query[task["query_y"] == label] // 10) == classes
        assert np.bincount(task["support_y"]).tolist() == [2, 2, 2]
        assert np.bincount(task["query_y"]).tolist() == [3, 3, 3]


def test_labels_are_a_fresh_permutation_for_each_task():
    labels = {c: set() for c in range(6)}
    for task in tasks(200):
        for code, label in zip(codes(task["support_x"]), task["support_y"], strict=True):
            labels[code // 10].add(int(label))
    assert all(found == {0, 1, 2} for found in labels.values())


def test_a_sine_is_as_in_the_paper():
    drawn = data.Tasks(partial(data.sinusoid, shots=5, queries=40), 300, 0, "train")
    amplitudes = []
    for task in drawn:
        x, y = (np.concatenate([task[f"support_{at}"], task[f"query_{at}"]])[:, 0] for at in "xy")
        assert x.shape == (45,) and np.abs(x).max() <= 5
        # A sin(x - p) = a sin x + b cos x
        (a, b), residual, *_ = np.linalg.lstsq(np.stack([np.sin(x), np.cos(x)], 1), y, rcond=None)
        assert residual < 1e-6
        amplitudes.append(np.hypot(a, b))
        assert 0 <= np.arctan2(-b, a) + 1e-3 and np.arctan2(-b, a) <= np.pi + 1e-3
    assert 0.1 <= min(amplitudes) < 0.3 and 4.8 < max(amplitudes) <= 5.0
    assert abs(np.mean(amplitudes) - 2.55) < 0.25


def test_frequencies_may_differ_and_queries_lie_on_a_grid():
    draw = partial(data.sinusoid, shots=2, queries=101, grid=True)
    task = draw(np.random.default_rng(0))
    np.testing.assert_allclose(task["query_x"][:, 0], np.linspace(-5, 5, 101), atol=1e-6)
    fast = draw(np.random.default_rng(0), frequency=(3.0, 3.0))
    crossings = [np.sum(np.diff(np.sign(t["query_y"][:, 0])) != 0) for t in (task, fast)]
    assert crossings[1] >= 2 * crossings[0]


def test_the_nearest_support_picture_answers():
    def pictures(*values):
        return np.asarray(values, np.float32).reshape(-1, 1, 1, 1)

    task = {
        "support_x": pictures(0.0, 1.0),
        "support_y": np.array([1, 0]),
        "query_x": pictures(0.1, 0.4, 0.6, 0.9),
        "query_y": np.array([1, 0, 0, 0]),
    }
    assert data.nearest(task) == 0.75


@pytest.mark.parametrize(
    "sizes, says",
    [
        ({"ways": 7}, "7 ways need as many classes, and a split of the data has only 6"),
        ({"shots": 3, "queries": 3}, "need 6 different examples of each class, and class class0"),
    ],
)
def test_too_few_classes_or_examples_are_named(sizes, says):
    with pytest.raises(UserError, match=says):
        tasks(**sizes)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for c in range(25):
        (tmp_path / f"class{c:02}").mkdir()
        for n in range(4):
            pixels = rng.integers(0, 256, (9, 7, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"class{c:02}" / f"{n}.png")
    return tmp_path


def test_a_folder_of_pictures_is_split_by_class(folder):
    splits = data.load_images(folder, 12, color=False)
    assert [len(splits[name]) for name in data.SPLITS] == [16, 4, 5]
    names = [name for classes in splits.values() for name in classes]
    assert len(set(names)) == 25
    assert {x.shape for classes in splits.values() for x in classes.values()} == {(4, 12, 12, 1)}
    again = data.load_images(folder, 12, color=False)
    assert data.digest(splits) == data.digest(again)
    draw, record = data.image_tasks(folder, 8, True, ways=4, shots=1, queries=3)
    assert draw["test"](np.random.default_rng(0))["query_x"].shape == (12, 8, 8, 3)
    assert len(record["digest"]) == 64
    (folder / "class03" / "0.png").unlink()
    assert data.digest(data.load_images(folder, 12, color=False)) != data.digest(splits)


def test_a_picture_that_cannot_be_read_and_a_folder_without_any_are_named(folder):
    (folder / "class05" / "2.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"class05.2\.png cannot be read .*: mend it or take it"):
        data.load_images(folder, 12, color=True)
    for empty in (folder / "class01", folder / "nowhere"):
        with pytest.raises(UserError, match="has no pictures: give a folder with one subfolder"):
            data.load_images(empty, 12, color=False)


def test_where_learn2learn_is_missing_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "learn2learn", None)
    monkeypatch.setitem(sys.modules, "learn2learn.vision.benchmarks", None)
    with pytest.raises(UserError) as error:
        data.benchmark_tasks("omniglot", ways=5, shots=1, queries=1)
    for words in ("learn2learn==0.2.0 --no-deps", '"--build-option=build_ext"', "torchvision=="):
        assert words in str(error.value)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_a_task_set_of_learn2learn_gives_tasks(folder):
    import learn2learn as l2l
    from learn2learn.data import transforms
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import ToTensor

    pictures = l2l.data.MetaDataset(ImageFolder(str(folder), transform=ToTensor()))
    taskset = l2l.data.Taskset(
        pictures,
        [
            transforms.NWays(pictures, 5),
            transforms.KShots(pictures, 3),
            transforms.LoadData(pictures),
            transforms.RemapLabels(pictures),
            transforms.ConsecutiveLabels(pictures),
        ],
    )
    drawn = data.Tasks(partial(data.sampled, taskset=taskset, shots=1), 30, 0, "train")
    known = {
        (np.asarray(Image.open(path)) / 255).astype(np.float32).tobytes(): path.parent.name
        for path in folder.glob("*/*.png")
    }
    orders = set()
    for index, task in enumerate(drawn):
        assert task["support_x"].shape == (5, 9, 7, 3) and task["query_x"].shape == (10, 9, 7, 3)
        assert task["support_y"].tolist() == [0, 1, 2, 3, 4]
        support, query = (
            [known[x.tobytes()] for x in task[f"{p}_x"]] for p in ("support", "query")
        )
        assert np.repeat(support, 2).tolist() == query and len(set(support)) == 5
        pixels = [x.tobytes() for part in ("support", "query") for x in task[f"{part}_x"]]
        assert len(set(pixels)) == 15
        orders.add(tuple(np.argsort(support)))
        assert same(task, drawn[index])
    assert len(orders) > 20, "labels follow the names of the classes"


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_the_benchmarks_of_learn2learn_are_asked_for_by_split(monkeypatch):
    import random

    from learn2learn.vision import benchmarks

    asked = []

    def get_tasksets(name, **more):
        asked.append((name, more, random.random()))
        return "train set", "validation set", "test set"

    monkeypatch.setattr(benchmarks, "get_tasksets", get_tasksets)
    for _ in range(2):
        sets = data.load_benchmark("mini-imagenet", 5, 16, "somewhere")
        assert sets == {"train": "train set", "valid": "validation set", "test": "test set"}
    name, more, _ = asked[0]
    assert (name, more["train_samples"], more["test_ways"]) == ("mini-imagenet", 16, 5)
    assert more["data_augmentation"] == "normalize"
    assert asked[0] == asked[1], "which classes are in which split must not be left to chance"

    def refused(name, **more):
        raise ConnectionError("no route")

    monkeypatch.setattr(benchmarks, "get_tasksets", refused)
    with pytest.raises(UserError, match="cannot load omniglot .*no route.* needs the network once"):
        data.load_benchmark("omniglot", 5, 2, "somewhere")
