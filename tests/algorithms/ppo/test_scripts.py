"""The scripts of PPO, as a user runs them."""

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from algorithms.ppo import play, train
from core.run import launch
from tests.algorithms.ppo import tiny  # noqa: F401 (registers)

ROOT = Path(__file__).parents[3]
SMALL = ["--timesteps", "1000", "--num-steps", "32", "--hidden", "8", "--episodes", "3"]


def script(name, *arguments):
    # No display, whatever machine this is.
    environment = {k: v for k, v in os.environ.items() if "DISPLAY" not in k}
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-m", f"algorithms.ppo.{name}"]
        + [str(argument) for argument in arguments],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


PENDULUM = ["--env", "Pendulum-v1", "--normalize-observations", "--normalize-rewards"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    done = script("train", *SMALL, *PENDULUM, "--folder", folder, "--simulate-devices", 2)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_run_leaves_a_complete_folder(trained):
    folder, done = trained
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # 8 rollouts of 4 * 32 steps, each of 4 passes in 4 minibatches.
    assert [row["step"] for row in rows] == list(range(16, 129, 16))
    names = {"mean_return", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"}
    assert names | {"explained_variance"} <= set(rows[-1]) and rows[-1]["steps_per_second"] > 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 128 and summary["held_out"]["episodes"] == 3
    assert summary["train"]["mean_return"] < 0
    assert "held out: 3 episodes, mean return -" in done.stdout
    assert len(json.loads((folder / "statistics.json").read_text())["mean"]) == 3


def test_two_processes_step_the_same_environments_and_learn_the_same(trained, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = ["--folder", tmp_path, "--hosts.count", 2, "--hosts.address", address]
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(script, "train", *SMALL, *PENDULUM, *hosts, "--hosts.index", index)
            for index in range(2)
        ]
    assert all(run.result().returncode == 0 for run in runs), runs[0].result().stderr
    one, two = (json.loads((f / "summary.json").read_text()) for f in (trained[0], tmp_path))
    for name, value in one["train"].items():
        if name != "steps_per_second":
            assert two["train"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert two["held_out"]["mean_return"] == pytest.approx(one["held_out"]["mean_return"], rel=1e-3)


def test_a_finished_run_plays_without_a_display(trained):
    folder, _ = trained
    done = script("play", "--run", folder, "--episodes", 4)
    assert done.returncode == 0, done.stderr
    assert re.match(r"4 episodes, mean return -\d+\.\d\d \+- \d+\.\d\d\n", done.stdout)
    assert not done.stderr
    with Image.open(folder / "play.gif") as gif:
        assert gif.n_frames > 100 and gif.size == (500, 500)


WRONG = {
    "environment": (["--env", "NoSuch-v0"], "'NoSuch-v0' cannot be made"),
    "observations": (["--env", "TinyNested-v0"], "is not supported"),
    "actions": (["--env", "TinySeveral-v0"], "action space MultiDiscrete"),
    "nan": (["--env", "TinyBroken-v0"], "not finite in step 3"),
    "minibatches": (["--minibatches", "3"], "128 transitions, which do not divide into 3"),
    "vectorization": (["--env", "Pendulum-v1", "--vectorization", "vector"], "vector entry point"),
    "microbatches": (["--microbatches", "2"], "looks across the rows"),
    "gamma": (["--gamma", "1.5"], "gamma 1.5"),
    "none": (["--num-envs", "0"], "num_envs 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_one_paragraph_that_says_what_to_change(case, tmp_path, monkeypatch, capsys):
    arguments, says = WRONG[case]
    arguments = [*SMALL, "--folder", str(tmp_path / "run"), *arguments]
    # The backend of this process is up, too late to look for a cluster.
    monkeypatch.setattr(sys, "argv", ["script", "--hosts.address", "none", *arguments])
    assert_refused(train, says, capsys)


def test_a_run_that_is_not_finished_has_no_statistics_to_play_with(trained, monkeypatch, capsys):
    folder, _ = trained
    (folder / "statistics.json").rename(folder / "moved.json")
    monkeypatch.setattr(sys, "argv", ["script", "--hosts.address", "none", "--run", str(folder)])
    assert_refused(play, "let the run finish first", capsys)
    (folder / "moved.json").rename(folder / "statistics.json")


def assert_refused(module, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        launch(module.Config, module.main)
    assert stopped.value.code == 2
    # tyro puts its own into a box.
    error = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())
    assert says in error and "Traceback" not in error
