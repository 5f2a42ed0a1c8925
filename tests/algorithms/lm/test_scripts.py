"""The scripts of language modelling, as a user runs them; and the package as a template."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from algorithms.lm import generate, train
from core.run import launch

ROOT = Path(__file__).parents[3]
TINY = "--model.layers 1 --model.dim 32 --model.heads 2 --model.kv-heads 1 --model.hidden 32"
TINY += " --block 16 --tokenizer bytes --optimizer.warmup 2 --completions 2 --new-tokens 8"


def script(name, arguments, cwd=ROOT, module="algorithms.lm"):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-m", f"{module}.{name}", *arguments],
        cwd=cwd,
        env=environment | {"PYTHONPATH": str(cwd)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(3):
        lines = [f"def f{i}(x):\n    return x + {i}\n" for i in range(60)]
        (folder / f"{number}.py").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    options = [*TINY.split(), "--text", str(text), "--folder", str(folder), "--steps", "30"]
    done = script("train", [*options, "--eval-every", "10", "--simulate-devices", "2"])
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_run_leaves_a_complete_folder(trained):
    folder, done = trained
    config = json.loads((folder / "config.json").read_text())
    assert config["config"]["run"]["steps"] == 30
    assert config["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert len(config["corpus"]) == 64 and config["versions"]["jax"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["split"] == "train"]
    valid = [row for row in rows if row["split"] == "valid"]
    assert [row["step"] for row in train] == [10, 20, 30] == [row["step"] for row in valid]
    assert valid[-1]["loss"] < valid[0]["loss"] < math.log(257)
    assert all(row["tokens_per_second"] > 0 for row in train[1:])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 30
    assert summary["valid"]["bits_per_byte"] == valid[-1]["bits_per_byte"]
    assert summary["best"]["step"] == 30 and set(summary["compressors"]) == {"gzip -9", "xz -9"}
    assert (folder / "curves.png").stat().st_size > 10_000
    assert (folder / "checkpoints" / "30").is_dir() and (folder / "tokenizer").is_dir()
    assert "step 30  valid" in done.stderr and "bits_per_byte" in done.stderr
    assert done.stdout.count("def f") >= 2 and "held-out bits per byte: this model" in done.stdout


def test_a_finished_run_generates_in_a_new_process(trained):
    folder, _ = trained
    ask = ["--run", str(folder), "--new-tokens", "9", "--prompt", "def f1(x):\n ", "de"]
    first = script("generate", ask)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("def f1(x):\n ")
    spread = script("generate", [*ask, "--simulate-devices", "4", "--mesh.fsdp", "2"])
    assert spread.stdout == first.stdout, "devices must not change what is drawn"
    other = script("generate", [*ask, "--seed", "1"])
    assert other.returncode == 0 and other.stdout != first.stdout


def test_help_is_quick_and_explains_every_option():
    began = time.monotonic()
    done = script("train", ["--help"])
    assert done.returncode == 0 and time.monotonic() - began < 30, "3 s on an idle machine"
    for option in ("--text", "--tokenizer", "--model.dropout", "--mesh.fsdp", "--batch-size"):
        assert option in done.stdout
    blocks = done.stdout.split("\n│ --")[1:]
    assert len(blocks) > 45
    for block in blocks:
        words = " ".join(block.replace("│", " ").split("(default")[0].split()[1:])
        assert len(words.split()) >= 3, f"--{block} has no explanation"


def test_slow_packages_are_only_imported_when_needed():
    code = (
        "import sys, algorithms.lm.train; "
        "print([m for m in ('datasets', 'transformers', 'matplotlib', 'torch', 'wandb') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


WRONG = {
    "missing text": (["--text", "nowhere/*.txt"], "does not exist"),
    "empty text": (["--text", "{tmp}/empty.txt"], "no text"),
    "binary text": (["--text", "{tmp}/binary"], "UTF-8"),
    "unknown data set": (["--dataset", "no/such"], "data set 'no/such'"),
    "two sources": (["--dataset", "a", "--text", "{text}"], "give one of them"),
    "unknown tokenizer": (["--tokenizer", "no/such"], "tokenizer 'no/such'"),
    "vocabulary": (["--tokenizer", "bytes", "--vocab-size", "200"], "larger than the model's"),
    "small bpe": (["--tokenizer", "bpe", "--vocab-size", "200"], "257"),
    "mesh": (["--mesh.fsdp", "3"], "--mesh.fsdp 1, 2, 4, 8"),
    "batch": (["--batch-size", "6", "--microbatches", "4"], "4 or 8"),
    "range": (["--model.dropout", "1.5"], "dropout 1.5"),
    "heads": (["--model.heads", "5"], "not a multiple"),
    "folder": (["--folder", "{trained}"], "holds a run with other options"),
    "override": (["--overrides", "nothing=fsdp"], "matches no parameter"),
    "warm-up": (["--steps", "3", "--optimizer.warmup", "5"], "not shorter than the run"),
    "dtype": (["--compute-dtype", "int8"], "use auto, bfloat16"),
    "tracker": (["--report.tensorboard"], "pip install tensorboardX"),
    "run": (["--run", "{tmp}"], "not the folder of a run"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_one_paragraph_that_says_what_to_change(
    case, text, trained, tmp_path, monkeypatch, capsys
):
    arguments, says = WRONG[case]
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary").write_bytes(np.arange(256, dtype=np.uint8).tobytes() * 9)
    arguments = [a.format(tmp=tmp_path, text=text, trained=trained[0]) for a in arguments]
    if case == "run":
        module = generate
    else:
        module, options = train, [*TINY.split(), "--folder", str(tmp_path / "run")]
        source = [] if {"--text", "--dataset"} & set(arguments) else ["--text", str(text)]
        arguments = options + source + arguments
    # The backend of this process is up, too late to look for a cluster.
    monkeypatch.setattr(sys, "argv", ["script", "--hosts.address", "none", *arguments])
    with pytest.raises(SystemExit) as stopped:
        launch(module.Config, module.main)
    assert stopped.value.code == 2
    # tyro puts its own into a box.
    error = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())
    assert says in error and re.search("^error: |Error parsing", error)
    assert "Traceback" not in error


@pytest.fixture
def copied(tmp_path):
    """`core` and the package, renamed, in an empty folder."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "core", tmp_path / "core", ignore=ignore)
    shutil.copytree(ROOT / "algorithms" / "lm", tmp_path / "mine" / "poetry", ignore=ignore)
    return tmp_path


def test_the_package_copied_and_renamed_is_a_working_project(copied, text):
    options = [*TINY.split(), "--text", str(text), "--steps", "5", "--folder", "here"]
    done = script("train", options, cwd=copied, module="mine.poetry")
    assert done.returncode == 0, done.stderr
    assert json.loads((copied / "here" / "summary.json").read_text())["steps"] == 5
    ask = ["--run", "here", "--new-tokens", "3"]
    assert script("generate", ask, cwd=copied, module="mine.poetry").returncode == 0
