import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from core import HostOptions, MeshOptions, TrainOptions, UserError, run
from core.optimizer import AdamWOptions
from core.report import ReportOptions
from core.run import DeviceOptions, Devices, Run, RunOptions, Shared, launch, read_config
from core.signals import Ended, Stopped
from core.trainer import FREE


@dataclasses.dataclass(frozen=True)
class Config:
    """A script of one's own."""

    size: int = 3
    """Width of everything."""
    ratio: float = 0.5
    """Share of something."""
    texts: tuple[str, ...] = ()
    """Files."""
    optimizer: AdamWOptions = AdamWOptions(0.1)
    run: Shared = RunOptions(steps=5)


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    run: Devices = DeviceOptions()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def launched(monkeypatch, capsys):
    """Runs a script with a command line: exit code, lines of stdout, stderr."""

    def call(main, *arguments, config=Config):
        monkeypatch.setattr(sys, "argv", ["script.py", "--hosts.address", "none", *arguments])
        code = 0
        try:
            launch(config, main)
        except SystemExit as exit:
            code = exit.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


def strict_json(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def config(**options):
    return Config(run=RunOptions(**options))


# The command line


def test_options_reach_main_and_those_of_the_run_have_no_prefix(launched):
    seen = []
    options = "--size 4 --texts a b --optimizer.warmup 2 --seed 7 --mesh.fsdp 2 --report.quiet"
    assert launched(seen.append, *options.split()) == (0, "", "")
    hosts = dataclasses.replace(RunOptions().hosts, address="none")
    shared = RunOptions(
        steps=5, seed=7, mesh=MeshOptions(fsdp=2), report=ReportOptions(quiet=True), hosts=hosts
    )
    assert seen == [Config(4, 0.5, ("a", "b"), AdamWOptions(0.1, warmup=2), shared)]


def test_script_that_trains_nothing_has_the_options_of_devices_only(launched):
    seen = []
    assert launched(seen.append, "--mesh.tensor", "2", config=ServeConfig)[0] == 0
    assert seen[0].run.mesh.tensor == 2
    code, _, err = launched(seen.append, "--steps", "2", config=ServeConfig)
    assert code == 2 and "Unrecognized options: --steps" in err


@dataclasses.dataclass(frozen=True)
class PresetConfig(Config):
    def defaults(self):
        return dataclasses.replace(self, size=9, ratio=0.25) if self.texts == ("b",) else self


def test_defaults_may_follow_from_other_options_and_the_command_line_wins(launched):
    seen = []
    for given in ((), ("--texts", "b"), ("--texts", "b", "--size", "4")):
        assert launched(seen.append, *given, config=PresetConfig)[0] == 0
    assert [(one.size, one.ratio) for one in seen] == [(Config().size, 0.5), (9, 0.25), (4, 0.25)]


def test_devices_are_simulated_and_hosts_joined_before_main(launched, monkeypatch):
    order = []
    monkeypatch.setattr(run, "simulate_devices", lambda count: order.append(count))
    monkeypatch.setattr(run, "join_hosts", lambda hosts: order.append(hosts.address))
    assert launched(lambda _: order.append("main"), "--simulate-devices", "4")[0] == 0
    assert launched(lambda _: order.append("main"))[0] == 0
    assert order == [4, "none", "main", "none", "main"]


def fails_in_jit(_):
    @jax.jit
    def step(x):
        error = UserError("The batch is empty; give some rows.")
        error.add_note("This came from example 3.")
        raise error

    step(1.0)


def test_mistake_of_the_user_is_one_paragraph_with_its_notes(launched):
    said = "error: The batch is empty; give some rows. This came from example 3.\n"
    assert launched(fails_in_jit) == (2, "", said)


def test_mistake_of_the_user_shows_its_traceback_when_debugging(launched):
    with pytest.raises(UserError, match="The batch is empty"):
        launched(fails_in_jit, "--debug")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            Stopped(3, Path("runs/x")),
            1,
            "stopped at step 3; the same command with --folder runs/x goes on",
        ),
    ],
)
def test_stopping_is_one_line(launched, error, code, says):
    def main(_):
        raise error

    status, _, err = launched(main)
    assert status == code and err.startswith(says) and len(err.splitlines()) == 1


@pytest.mark.parametrize("error", [KeyError("a bug"), ValueError("a bug")])
def test_bug_keeps_its_traceback(launched, error):
    def main(_):
        raise error

    with pytest.raises(type(error)) as caught:
        launched(main)
    assert caught.value is error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--nope", "1"), "Unrecognized options: --nope"),
        (("--size", "x"), "Error parsing --size"),
        (("--steps", "-1"), "steps -1 is out of range: it must be at least 0."),
        (("--batch-size", "0"), "batch_size 0 is out of range: it must be at least 1."),
        (("--simulate-devices", "-2"), "simulate_devices -2 is out of range"),
        (("--optimizer.b1", "1"), "b1 1.0 is out of range: it must be at least 0"),
        (("--hosts.count", "2"), "--hosts.count 2 and --hosts.index -1 need an explicit"),
    ],
)
def test_wrong_option_is_said_and_main_never_called(launched, arguments, says):
    code, out, err = launched(pytest.fail, *arguments)
    assert (code, out) == (2, "")
    assert re.search(says, " ".join(re.sub("[│╭╰─╮╯]", " ", err).split()))
    assert "Traceback" not in err


def test_script_as_it_is_run(tmp_path):
    """One process for help, and one for a run that the user got wrong."""
    root = Path(run.__file__).parents[1]
    shutil.copytree(root / "core", "core", ignore=shutil.ignore_patterns("__pycache__"))
    Path("script.py").write_text(
        "import dataclasses\n"
        "import core.run as r\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Config:\n"
        "    size: int = 3\n"
        "    run: r.Shared = r.RunOptions(steps=5)\n"
        "def main(config):\n"
        "    run = r.Run('toy', config)\n"
        "    run.say(str(run.mesh.devices.shape))\n"
        "    raise r.UserError('No more.')\n"
        "r.launch(Config, main)\n"
    )

    def script(*arguments):
        command = [sys.executable, "-W", "error", "script.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    shown = script("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    for field in dataclasses.fields(RunOptions):
        group = f"--{field.name}.".replace("_", "-")
        flag = group if dataclasses.is_dataclass(field.default) else group[:-1]
        assert flag in shown.stdout, flag
    assert "--size" in shown.stdout

    ran = script("--simulate-devices", "3", "--folder", "out")
    assert (ran.returncode, ran.stdout) == (2, "(3, 1, 1)\n")
    assert ran.stderr == "error: No more.\n"
    written = strict_json(Path("out/config.json"))
    assert written["commit"] == "unknown"  # this copy stands outside of any repository
    assert written["devices"] == ["cpu"] * 3


# The folder


def test_config_tells_what_it_takes_to_repeat_the_run(tmp_path):
    made = Run("toy", config(folder="a/b", seed=3), {"corpus": "abc", "score": np.float32(0.5)})
    assert made.folder == Path("a/b")
    written = strict_json(tmp_path / "a" / "b" / "config.json")
    assert written["algorithm"] == "toy" and written["corpus"] == "abc" and written["score"] == 0.5
    assert written["config"]["run"]["seed"] == 3
    assert written["config"]["run"]["mesh"] == {"data": -1, "fsdp": 1, "tensor": 1}
    assert written["versions"]["jax"] == jax.__version__
    git = ["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    assert written["commit"] == (head or "unknown")
    assert len(written["devices"]) == 8
    assert [path.name for path in made.folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (float("nan"), "NaN"),
        ([np.float64("inf"), -np.inf], ["Infinity", "-Infinity"]),
        (np.float32(1.5), 1.5),
        (np.int64(2), 2),
        (np.bool_(True), True),
        (np.array([[1.0], [np.nan]]), [[1.0], ["NaN"]]),
        (Path("x"), "x"),
        ({1: {"a": (1, None)}}, {"1": {"a": [1, None]}}),
    ],
)
def test_written_files_are_strict_json_of_plain_values(value, plain):
    Run("toy", config(folder="x")).write("summary.json", {"value": value})
    assert strict_json(Path("x/summary.json")) == {"value": plain}


def test_array_on_a_device_is_written_as_a_list():
    Run("toy", config(folder="x")).write("summary.json", {"loss": jax.numpy.arange(2) + 0.5})
    assert strict_json(Path("x/summary.json")) == {"loss": [0.5, 1.5]}


def test_summary_is_written_and_the_folder_said(capsys):
    Run("toy", config(folder="x")).finish({"steps": 5})
    assert strict_json(Path("x/summary.json")) == {"steps": 5}
    assert capsys.readouterr().out == "The run is in x\n"


def begun(**options):
    """A run that is not finished."""
    made = Run("toy", config(folder="x", seed=1, **options), {"corpus": "abc"})
    Path("x/metrics.jsonl").touch()
    return made


def test_folder_of_a_run_with_other_options_is_refused_with_a_table_and_left_alone():
    begun()
    with pytest.raises(UserError) as refused:
        other = RunOptions(folder="x", seed=2, steps=7, compute_dtype="bfloat16")
        Run("toy", Config(size=4, texts=("b",), run=other), {"corpus": "abd"})
    assert str(refused.value).splitlines() == [
        "x holds a run with other options, which would change its numbers:",
        "  setting        the run has  given now",
        '  computes_in    "as given"   "bfloat16"',
        '  corpus         "abc"        "abd"',
        "  size           3            4",
        '  texts          []           ["b"]',
        "  steps          0            7",
        '  compute_dtype  "auto"       "bfloat16"',
        "  seed           1            2",
        "Give those that it has, or another --folder.",
    ]
    assert strict_json(Path("x/config.json"))["config"]["run"]["seed"] == 1


@pytest.mark.parametrize(
    "free",
    [
        {"mesh": MeshOptions(2, 4)},
        {"simulate_devices": 8},
        {"hosts": HostOptions("none")},
        {"overrides": ("a=fsdp",)},
        {"report": ReportOptions(log_every=3, quiet=True)},
        {"save_every": 3},
        {"keep": 3},
        {"debug": True},
        {"on_nonfinite": "skip", "max_skipped": 3},
    ],
    ids=str,
)
def test_what_changes_no_number_may_change(free):
    begun()
    assert Run("toy", config(folder="x", seed=1, **free), {"corpus": "abc"}).folder == Path("x")
    assert strict_json(Path("x/config.json"))["config"]["run"][next(iter(free))], "it is recorded"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field.name, value)
        for field in dataclasses.fields(TrainOptions)
        if field.name not in FREE
        for value in [{"compute_dtype": "float32"}.get(field.name, 7)]
    ],
)
def test_whatever_else_the_trainer_takes_may_not_change(field, value):
    begun()
    with pytest.raises(UserError, match=rf"\n  {field} "):
        Run("toy", config(folder="x", **{"seed": 1, field: value}), {"corpus": "abc"})


def test_finished_run_says_so_and_prints_its_summary(launched):
    def main(config):
        Run("toy", config).finish({"loss": 0.5})

    assert launched(main, "--folder", "x")[0] == 0
    code, out, err = launched(main, "--folder", "x")
    assert code == 0 and err == ""
    assert out.startswith("The run in x is finished; another --folder starts a new one.\n{")
    assert json.loads(out[out.index("{") :]) == {"loss": 0.5}
    code, _, err = launched(main, "--folder", "x", "--size", "9")
    assert code == 2 and "size     3            9" in err


@pytest.mark.parametrize("text", [None, "", "[]", '{"config": 3}'])
def test_folder_with_a_run_but_no_config_is_said(text):
    begun()
    if text is None:
        Path("x/config.json").unlink()
    else:
        Path("x/config.json").write_text(text)
    with pytest.raises(UserError, match="x holds a run whose config.json or"):
        Run("toy", config(folder="x", seed=1))


def test_folder_of_a_run_that_never_began_is_free():
    Run("toy", config(folder="x", seed=1))
    Run("toy", config(folder="x", seed=2))
    assert strict_json(Path("x/config.json"))["config"]["run"]["seed"] == 2


@pytest.mark.parametrize("text", ['{"mine": 1}', "[]", '{"config": {"run": {}}}'])
def test_folder_with_the_config_of_something_else_is_left_alone(text):
    Path("x").mkdir()
    Path("x/config.json").write_text(text)
    with pytest.raises(UserError, match="or something else that has such files"):
        Run("toy", config(folder="x"))
    assert Path("x/config.json").read_text() == text


def test_folder_without_a_run_is_taken():
    Path("x").mkdir()
    Path("x/notes.txt").write_text("")
    Run("toy", config(folder="x"))
    assert Path("x/config.json").exists()


def test_config_of_the_current_folder_does_not_stand_in_the_way_of_a_new_one():
    Path("config.json").write_text("{}")
    assert Run("toy", config()).folder.parent == Path("runs")


@pytest.mark.parametrize("folder", ["file", "file/below", "n" * 300, ""])
def test_folder_that_cannot_be_written_is_said(folder):
    Path("runs").touch()
    Path("file").touch()
    with pytest.raises(UserError, match=r"cannot be written \(.+\)\. Give another --folder\."):
        Run("toy", config(folder=folder))


def test_new_folders_of_one_second_do_not_collide(monkeypatch):
    monkeypatch.setattr(run.time, "strftime", lambda form: form.replace("%Y%m%d-%H%M%S", "now"))
    # A run has its folder before it has written anything there.
    assert run._new_folder("toy") == "runs/toy-now"
    folders = [Run("toy", config()).folder for _ in range(3)]
    assert folders == [Path(f"runs/toy-now-{n}") for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("options", "says"),
    [({"mesh": MeshOptions(3)}, "does not fit 8"), ({"overrides": ("x",)}, "The override 'x'")],
)
def test_run_that_cannot_be_leaves_no_folder(tmp_path, options, says):
    with pytest.raises(UserError, match=says):
        Run("toy", config(**options))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def second_process(monkeypatch):
    """Makes this the second of two; returns what the first sends."""
    sent = {"folder": "runs/from-0", "error": "", "ended": ""}
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(run, "from_first", lambda own: json.dumps(sent))
    return sent


def test_other_processes_use_the_folder_of_the_first_and_write_nothing(
    tmp_path, second_process, capsys
):
    made = Run("toy", config())
    assert made.folder == Path("runs/from-0")
    made.write("more.json", {})
    made.save("weights", Path.touch)
    made.finish({})
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_first_process_alone_decides_about_a_folder(second_process):
    # It may have written its config before the others look.
    Path("x").mkdir()
    Path("x/metrics.jsonl").touch()
    second_process["folder"] = "x"
    assert Run("toy", config(folder="x", seed=5)).folder == Path("x")
    second_process["error"] = "y holds another run"
    with pytest.raises(UserError, match="^y holds another run$"):
        Run("toy", config(folder="x"))
    second_process |= {"error": "", "ended": "y is finished"}
    with pytest.raises(Ended, match="^y is finished$"):
        Run("toy", config(folder="x"))


def test_first_process_sends_what_it_decided(monkeypatch):
    sent = []
    monkeypatch.setattr(run, "from_first", lambda text: sent.append(json.loads(text)) or text)
    begun()
    with pytest.raises(UserError, match="with other options"):
        Run("toy", config(folder="x", seed=5))
    assert sent[0] == {"folder": "x", "error": "", "ended": ""}
    assert "with other options" in sent[1]["error"]


# Reading it back


@dataclasses.dataclass(frozen=True)
class Deep:
    pairs: tuple[tuple[str, int], ...] = (("a", 1),)
    names: tuple[str, ...] = ()
    limit: float = 1.0
    often: int = 1
    label: str = "x"
    inner: MeshOptions = MeshOptions()


def test_config_is_read_back_as_it_was():
    was = Config(7, 0.25, ("a", "b"), AdamWOptions(0.3, "linear"), RunOptions(folder="x", steps=9))
    Run("toy", was)
    assert read_config("x", Config()) == was
    assert hash(read_config(Path("x"), Config())) == hash(was)


def write_config(values):
    Path("config.json").write_text(json.dumps({"config": values}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Deep()),
        ({"gone": 1, "inner": {"fsdp": 2, "gone": 3}}, Deep(inner=MeshOptions(fsdp=2))),
        ({"pairs": [["b", 2], ["c", 3]], "names": ["d"]}, Deep((("b", 2), ("c", 3)), ("d",))),
        ({"limit": "Infinity", "label": "Infinity"}, Deep(limit=float("inf"), label="Infinity")),
        ({"often": 0, "label": "", "names": []}, Deep(often=0, label="")),
    ],
)
def test_options_since_added_have_their_default_and_those_since_removed_are_left_out(
    values, expected
):
    write_config(values)
    read = read_config(".", Deep())
    assert read == expected and repr(read) == repr(expected)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", "null", '{"config": 3}', "\xff"])
def test_folder_without_a_config_is_said(text):
    if text is not None:
        Path("config.json").write_text(text, encoding="latin1")
    with pytest.raises(UserError, match=r"^\. is not the folder of a run: config.json cannot be"):
        read_config(".", Config())


def test_value_that_is_no_longer_in_range_is_named():
    write_config({"run": {"steps": -3}})
    with pytest.raises(UserError, match="steps -3 is out of range"):
        read_config(".", Config())


@pytest.mark.parametrize("option", ["explain", "explain_json"])
@pytest.mark.parametrize("folder", ["", "there"])
def test_run_that_is_only_explained_leaves_no_trace(option, folder):
    options = RunOptions(steps=5, folder=folder, **{option: True})
    one = Run("mine", Config(run=options))
    one.write("summary.json", {})
    one.save("more", lambda path: path.write_text(""))
    assert list(Path().iterdir()) == []


def test_run_under_way_may_be_explained():
    Run("mine", Config(run=RunOptions(steps=5, folder="there")))
    Path("there/metrics.jsonl").write_text("")
    before = Path("there/config.json").read_text()
    Run("mine", Config(size=4, run=RunOptions(steps=5, folder="there", explain=True)))
    assert Path("there/config.json").read_text() == before
