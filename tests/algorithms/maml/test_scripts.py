"""The script of MAML, as a user runs it."""

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from algorithms.maml import train
from core.run import launch

ROOT = Path(__file__).parents[3]
SINES = ["--dataset", "sinusoid", "--steps", "12", "--eval-every", "6", "--valid-tasks", "10"]
SINES += ["--batch-size", "4", "--test-tasks", "20", "--microbatches", "auto"]


def script(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-m", "algorithms.maml.train"]
        + [str(argument) for argument in arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
    )


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def config(*arguments):
    """The config that a command line stands for."""
    found = []
    argv, sys.argv = sys.argv, ["script", "--hosts.address", "none", *arguments]
    try:
        launch(train.Config, found.append)
    finally:
        sys.argv = argv
    return found[0]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Twenty classes of pictures that a glance tells apart: each is one shade, with some noise."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for c in range(20):
        (folder / f"shade{c}").mkdir()
        for n in range(3):
            pixels = np.clip(12 * c + rng.integers(0, 5, (16, 16)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"shade{c}" / f"{n}.png")
    return folder


@pytest.fixture(scope="module")
def sines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sines"
    done = script(*SINES, "--folder", folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_sines_are_tested_after_each_number_of_steps_beside_a_pretrained_network(sines):
    folder, done = sines
    figures = summary(folder)["test"]
    for start in ("maml", "pretrained"):
        for shots in (5, 10):
            for steps in (0, 1, 10):
                mean, half = figures[f"{start}, {shots} shots, {steps} steps"]
                assert mean > half > 0
                assert f"{start}, {shots} shots, {steps} steps: {mean:.3f} ± " in done.stdout
    # Before any step the points play no part.
    assert figures["maml, 5 shots, 0 steps"] != figures["pretrained, 5 shots, 0 steps"]
    with Image.open(folder / "sines.png") as figure:
        assert figure.width > 1000 and len(figure.convert("L").getcolors()) > 100
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["split"] == "valid"] == [6, 12]
    assert (folder / "pretrained" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_two_processes_draw_the_same_tasks_and_learn_the_same(sines, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = ["--folder", tmp_path, "--hosts.count", 2, "--hosts.address", address]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(script, *SINES, *hosts, "--hosts.index", i) for i in range(2)]
    assert all(run.result().returncode == 0 for run in runs), runs[0].result().stderr
    one, two = summary(sines[0]), summary(tmp_path)
    assert two["valid"]["loss"] == pytest.approx(one["valid"]["loss"], rel=1e-4)
    for name, figure in one["test"].items():
        assert two["test"][name] == pytest.approx(figure, rel=1e-3), name


def test_a_run_with_auto_microbatches_may_go_on_with_other_devices(sines):
    folder, figures = sines[0], summary(sines[0])["test"]
    assert "is finished" in script(*SINES, "--folder", folder).stdout
    settings = json.loads((folder / "config.json").read_text())["config"]["run"]
    assert settings["microbatches"] == "auto"
    (folder / "summary.json").unlink()  # as if it had been killed at its end
    done = script(*SINES, "--folder", folder, "--simulate-devices", 2)
    assert done.returncode == 0 and "is finished already: step 12" in done.stderr, done.stderr
    for name, figure in summary(folder)["test"].items():
        assert figure == pytest.approx(figures[name], rel=1e-4), name


def test_a_folder_of_pictures_is_learnt_from_beside_the_nearest_pixels(images, tmp_path):
    small = ["--images", images, "--image-size", 8, "--ways", 2, "--queries", 2, "--steps", 4]
    small += ["--valid-tasks", 8, "--test-tasks", 12, "--model.filters", 4, "--batch-size", 4]
    done = script(*small, "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 ways, 1 shots, 12 test tasks of new classes: accuracy " in done.stdout
    figures = summary(tmp_path)["test"]
    assert figures["nearest"][0] > 0.9 and 0 <= figures["accuracy"][0] <= 1
    with Image.open(tmp_path / "tasks.png") as sheet:
        assert sheet.width > sheet.height > 2 * 8


def test_settings_follow_the_data_set_and_the_command_line_wins():
    assert config().inner_rate == 0.4 and config().run.steps == 200
    sines = config("--dataset", "sinusoid", "--shots", "5")
    assert (sines.inner_rate, sines.shots, sines.run.batch_size) == (0.01, 5, 25)
    published = config("--dataset", "omniglot", "--full", "--steps", "7")
    assert (published.inner_steps, published.run.steps) == (1, 7)
    assert published.optimizer.learning_rate == 1e-3
    wide = config("--dataset", "omniglot", "--full", "--ways", "20")
    assert (wide.inner_rate, wide.inner_steps, wide.run.batch_size) == (0.1, 5, 16)
    imagenet = config("--dataset", "mini-imagenet", "--full", "--shots", "5")
    assert imagenet.model.pool and (imagenet.queries, imagenet.test_steps) == (15, 10)
    assert imagenet.run.steps == 60_000 and imagenet.shots == 5


WRONG = {
    "ways": (["--ways", "3000"], "3000 ways need as many classes"),
    "queries": (["--shots", "5", "--queries", "20"], "need 25 different examples of each class"),
    "folder": (["--images", "nowhere"], "has no pictures"),
    "steps": (["--steps", "0"], "steps 0 is out of range"),
    "rate": (["--inner-rate", "nan"], "inner_rate nan"),
    "microbatches": (["--microbatches", "7"], "does not divide into 7 microbatches"),
    "overflow": ([*SINES, "--inner-rate", "1e30"], "--inner-rate is 1e+30, --inner-steps 1."),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_one_paragraph_that_says_what_to_change(case, tmp_path, monkeypatch, capsys):
    arguments, says = WRONG[case]
    arguments = ["--folder", str(tmp_path / "run"), *arguments]
    # The backend of this process is up, too late to look for a cluster.
    monkeypatch.setattr(sys, "argv", ["script", "--hosts.address", "none", *arguments])
    with pytest.raises(SystemExit) as stopped:
        launch(train.Config, train.main)
    assert stopped.value.code == 2
    # tyro puts its own into a box.
    error = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())
    assert says in error and "Traceback" not in error


def test_answers_that_overflow_in_the_test_are_named():
    class Broken:
        def predict(self, tasks):
            return [np.full((3, 2), np.nan), np.zeros((3, 2))]

    with pytest.raises(train.UserError, match="In 1 of 2 tasks .* --inner-rate 0.4 is too large"):
        train.answers(train.Config(), Broken(), None, 3)


def test_an_interval_by_hand():
    mean, half = train.interval([0.0, 1.0, 1.0, 1.0])
    assert mean == 0.75 and half == pytest.approx(1.96 * 0.5 / 2)
