"""What is damaged is passed over and said, and a save that fails costs no earlier one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from core import UserError
from core.checkpoint import FOLDER, Checkpoints, Saved, like, steps
from tests.core.test_resume import rows, small

ROOT = Path(__file__).parents[2]


def params(step):
    return {"w": jnp.arange(600.0).reshape(30, 20) * step, "b": jnp.ones(3) * step}


def state(step):
    return {"step": jnp.int32(step), "opt_state": (params(step), None)}


def target():
    return like(params(1)), like(state(1))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    checkpoints = Checkpoints(folder, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, params(step), state(step), {"at": step}, -float(step))
    checkpoints.close()
    return folder


@pytest.fixture
def folder(three, tmp_path):
    return shutil.copytree(three, tmp_path / "run")


def restored(folder, *wanted):
    """The step that is restored, having compared it, and the warnings."""
    said = []
    got_params, got_state, run = Checkpoints(folder, 3).restore(*(wanted or target()), said.append)
    step = run["at"]
    for got, want in ((got_params, params(step)), (got_state, state(step))):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    return step, said


def test_the_latest_is_restored_without_a_word(folder):
    assert restored(folder) == (3, [])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def files(folder):
    """The files of the latest checkpoint whose content matters: not those of Orbax's own log."""
    found = sorted((folder / FOLDER / "3").rglob("*"))
    return [path for path in found if path.is_file() and path.parent != folder / FOLDER / "3"] + [
        folder / FOLDER / "3" / "checksums.json"
    ]


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink], ids=lambda f: f.__name__)
def test_any_damaged_file_is_found_and_the_checkpoint_before_taken(three, tmp_path, damage):
    for number, file in enumerate(files(three)):
        copy = shutil.copytree(three, tmp_path / str(number))
        damage(copy / file.relative_to(three))
        step, said = restored(copy)
        assert step == 2, file
        assert len(said) == 1 and said[0].startswith("The checkpoint of step 3 is passed over: ")
        assert (file.name in said[0]) or file.name == "checksums.json"
        assert sorted(os.listdir(copy / FOLDER)) == ["1", "2", "3.damaged"], "nothing is deleted"


def test_orbax_own_files_do_not_matter(folder):
    for path in (folder / FOLDER / "3").iterdir():
        if path.is_file() and path.name != "checksums.json":
            path.unlink()
    assert restored(folder) == (3, [])


@pytest.mark.parametrize("item", ["params", "state", "run"])
def test_a_folder_that_is_half_there_is_passed_over(folder, item):
    shutil.rmtree(folder / FOLDER / "3" / item)
    step, (said,) = restored(folder)
    assert step == 2 and "is missing" in said


def test_an_empty_folder_and_what_a_killed_process_left_are_passed_over(folder):
    (folder / FOLDER / "4").mkdir()
    shutil.copytree(folder / FOLDER / "3", folder / FOLDER / "5.orbax-checkpoint-tmp")
    step, (said,) = restored(folder)
    assert step == 3 and "The checkpoint of step 4 is passed over: checksums.json is miss" in said
    assert sorted(os.listdir(folder / FOLDER)) == ["1", "2", "3", "4.damaged"]


def test_all_that_is_damaged_is_named_where_nothing_is_left(folder):
    for step in (1, 2, 3):
        flip(next((folder / FOLDER / str(step) / "params/ocdbt.process_0/d").iterdir()))
    with pytest.raises(UserError) as error:
        restored(folder)
    found = re.findall(r"Step (\d): params/\S+ is not what was saved", str(error.value))
    assert found == ["3", "2", "1"] and "remove this one to start anew" in str(error.value)
    assert steps(folder / FOLDER) == [1, 2, 3], "they are left for a better program"


@pytest.mark.parametrize(
    "other",
    [
        {"w": jnp.zeros((30, 21)), "b": jnp.zeros(3)},
        {"w": jnp.zeros((30, 20)), "c": jnp.zeros(3)},
        {"w": jnp.zeros((30, 20))},
        {"w": jnp.zeros((30, 20)), "b": jnp.zeros(3), "c": jnp.zeros(3)},
    ],
    ids=["shape", "name", "fewer", "more"],
)
def test_a_checkpoint_of_another_model_is_refused(folder, other):
    with pytest.raises(UserError, match="params do not fit this model and optimizer: [wbc] is"):
        restored(folder, like(other), like(state(1)))


def test_a_checkpoint_of_another_model_among_ours_is_passed_over(folder):
    shutil.rmtree(folder / FOLDER / "3")
    checkpoints = Checkpoints(folder, keep=3)
    checkpoints.save(3, {"w": jnp.zeros(2)}, state(3), {"at": 3}, None)
    checkpoints.close()
    step, (said,) = restored(folder)
    assert step == 2 and "params do not fit this model" in said


def test_damaged_weights_are_refused_by_name(folder):
    flip(next((folder / FOLDER / "1" / "params/ocdbt.process_0/d").iterdir()))
    saved = Saved(folder)  # the best
    assert saved.step == 1
    with pytest.raises(UserError, match=r"checkpoints/1 cannot be restored: params/\S+ is not"):
        saved.load(jax.tree.map(lambda x: x.sharding, like(params(1))))
    flip(folder / FOLDER / "3" / "params" / "_METADATA")
    with pytest.raises(UserError, match=r"checkpoints/3 cannot be restored"):
        last = Saved(folder, "last")
        last.load(jax.tree.map(lambda x: x.sharding, last.shapes()))


def test_a_score_that_cannot_be_read_is_none(folder):
    next((folder / FOLDER / "1" / "run").glob("metadata")).write_text("{")
    assert Saved(folder).step == 2


def test_a_run_goes_on_from_the_checkpoint_before_and_says_so(tmp_path, capsys):
    data = range(5)
    small(tmp_path / "a", batch_size=1, epochs=4, keep=9).fit(data)
    broken = shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(broken / FOLDER / "20")
    (said,) = (broken / FOLDER / "15" / "run").glob("metadata")
    said.write_text(said.read_text().replace('"seed": 0', '"seed": 1'))
    small(broken, batch_size=1, epochs=4, keep=9).fit(data)
    said = capsys.readouterr().err
    assert "The checkpoint of step 15 is passed over" in said
    assert said.count("passed over") == 1 and "goes on after: step 10" in said
    assert rows(broken) == rows(tmp_path / "a")
    assert steps(broken / FOLDER) == [5, 10, 15, 20]


def test_what_cannot_be_read_for_another_reason_is_left_as_it_is(folder, monkeypatch):
    def full(*_, **__):
        raise MemoryError("out of memory")

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "restore", full)
    with pytest.raises(UserError, match="3/params is whole, but could not be read: out of memory"):
        restored(folder)
    assert steps(folder / FOLDER) == [1, 2, 3]


def test_two_runs_do_not_share_a_folder(tmp_path):
    code = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, 1); print(); input()"
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()
        with pytest.raises(UserError, match="Another process is training in .*give another folder"):
            Checkpoints(tmp_path, keep=1)
        other.communicate(b"\n")
    Checkpoints(tmp_path, keep=1).close()


def test_the_lock_is_held_until_the_run_ends(tmp_path):
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), 5)"
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert subprocess.run(command, capture_output=True).returncode == 1
    checkpoints.close()
    assert subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("name", ["run[1]", "a\\b"])
def test_folders_that_could_not_be_read_back_are_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"has .* in its path, where arrays .* give another one"):
        Checkpoints(tmp_path / name, keep=1)
    assert not (tmp_path / name).exists()


# Saves that fail


def fails(folder, prepare):
    """Runs a script that trains 30 steps, saving after each 5, with a failure on the way."""
    code = f"""
import tests.conftest, os, resource, shutil, sys
from pathlib import Path
from tests.core.test_resume import small
folder = Path({str(folder)!r})
one = small(folder, batch_size=1, steps=30, save_every=5)
inner, count = one.step_jit, 0
def step(state, batch):
    global count
    count += 1
{prepare}
    return inner(state, batch)
one.step_jit = step
one.fit(range(5))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    return run


def test_a_full_disk_is_said_and_the_next_save_tried(tmp_path):
    run = fails(
        tmp_path,
        """
    if count in (8, 18):
        while not (folder / "checkpoints" / "5").exists(): pass
        assert (folder / "checkpoints" / "5").exists()
        limit = 100 if count == 8 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
""",
    )
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if "could not be written" in line]
    assert [re.search(r"step (\d+)", line)[1] for line in said] == ["10", "15"], run.stderr
    assert steps(tmp_path / FOLDER) == [30]
    assert restores(tmp_path) == 30


def test_a_disk_that_stays_full_ends_the_run_in_a_sentence_with_the_last_good_one(tmp_path):
    run = fails(
        tmp_path,
        """
    if count == 28:
        while not (folder / "checkpoints" / "25").exists(): pass
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
""",
    )
    assert run.returncode
    says = "core.errors.UserError: The run is at step 30, but the checkpoint of step 30 could not"
    assert any(line.startswith(says) for line in run.stderr.splitlines()), run.stderr
    assert steps(tmp_path / FOLDER) == [25] and restores(tmp_path) == 25


def test_a_folder_removed_during_the_run_is_said_and_made_again(tmp_path):
    run = fails(
        tmp_path / "run",
        """
    if count == 13:
        while not (folder / "checkpoints" / "10").exists(): pass
        shutil.rmtree(folder)
""",
    )
    assert run.returncode == 0, run.stderr
    assert re.search("step 15 could not be written .*run/checkpoints was removed", run.stderr)
    assert re.search("metrics.jsonl failed, and is tried .* was removed, and is", run.stderr)
    assert [row["step"] for row in rows(tmp_path / "run")] == [20, 30]
    assert restores(tmp_path / "run") == 30


def test_a_folder_that_cannot_be_written_is_said_and_tried_again(tmp_path):
    # (A folder without the right to write stops everyone but root: a file in its place, all.)
    run = fails(
        tmp_path,
        """
    if count in (8, 12):
        there, aside = folder / "checkpoints", folder / "aside"
        if count == 8:
            while not (there / "5").exists(): pass
            there.rename(aside), there.touch()
        else:
            there.unlink(), aside.rename(there)
""",
    )
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if "could not be written" in line]
    assert len(said) == 1 and "the checkpoint of step 10" in said[0]
    assert steps(tmp_path / FOLDER) == [30] and restores(tmp_path) == 30


def restores(folder):
    """The step of the checkpoint that a run there goes on from."""
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    one = jax.device_put(small(None).state, whole)
    rest = {"step": one.step, "opt_state": one.opt_state, "first_bad": one.step}
    target = like((one.params, rest | {"in_a_row": one.step, "skipped": one.step}))
    return Checkpoints(folder, 1).restore(*target, pytest.fail)[2]["at"]["step"]
