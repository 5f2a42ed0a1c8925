import io
import itertools
import json
import re
import sys
import threading
import types

import jax
import matplotlib.image
import numpy as np
import pytest

from core import curves, report
from core.curves import draw_curves
from core.errors import UserError
from core.report import Report, ReportOptions, read_rows


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(report, "monotonic", clock)
    return clock


@pytest.fixture
def terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(report, "sys", types.SimpleNamespace(stderr=terminal))
    return terminal


def strict_rows(folder):
    """Parses as a strict reader does, which refuses NaN and Infinity outside of strings."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def train(folder, steps, start=0, stop=None, **settings):
    """A run of `steps` that logs each step and validates each fifth; `stop` breaks it off there."""
    run = Report(folder, steps, start, **settings)
    for step in range(start + 1, (stop or steps) + 1):
        run.advance(step)
        run.log(step, {"loss": 1 / step, "weight": 8.0})
        if step % 5 == 0:
            run.log(step, {"loss": 2 / step}, "valid")
    run.close()


# Rows


def test_rows_are_on_disk_at_once_with_full_precision(tmp_path, clock):
    run = Report(tmp_path / "new" / "run", 10)
    clock.now += 1.5
    run.log(1, {"loss": 0.1 + 0.2, "third": np.float32(1 / 3)})
    run.log(1, {"loss": 2}, "valid")
    assert strict_rows(tmp_path / "new" / "run") == [
        {"step": 1, "split": "train", "time": 1.5, "loss": 0.1 + 0.2, "third": 0.3333333432674408},
        {"step": 1, "split": "valid", "time": 1.5, "loss": 2.0},
    ]
    run.close()


def test_rows_that_are_not_finite_are_valid_json_and_read_back(tmp_path):
    run = Report(tmp_path, 10)
    run.log(1, {"loss": np.nan, "up": np.inf, "down": -np.inf})
    run.close()
    (row,) = strict_rows(tmp_path)
    assert (row["loss"], row["up"], row["down"]) == ("NaN", "Infinity", "-Infinity")
    assert np.isnan(float(row["loss"])) and float(row["down"]) == -np.inf


@pytest.mark.parametrize("name", ["step", "split", "time"])
def test_metric_named_as_a_key_of_every_row_is_refused(tmp_path, name):
    run = Report(None, 10)
    with pytest.raises(UserError, match=f"every row has a {name}: rename the metric"):
        run.log(1, {name: 1.0})


def test_interrupted_run_has_the_rows_of_an_uninterrupted_one(tmp_path):
    train(tmp_path / "whole", 20)
    train(tmp_path / "parts", 20, stop=13)
    train(tmp_path / "parts", 20, start=10)

    def numbers(folder):
        rows = strict_rows(folder)
        return [{k: row[k] for k in row.keys() - {"time", "examples_per_second"}} for row in rows]

    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert len(numbers(tmp_path / "whole")) == 24


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "split": "tra', '{"step": 3}', "\0\0", '"\xc3', "5\n", "[5]\n"]
)
def test_continued_run_drops_later_rows_and_a_torn_line(tmp_path, clock, torn):
    kept = '{"step": 1, "split": "train", "time": 2.5,  "loss": 1e-3}\n'  # kept byte for byte
    later = '{"step": 4, "split": "train", "time": 9, "loss": 3}\n'
    (tmp_path / "metrics.jsonl").write_bytes((kept + later + torn).encode("latin-1"))
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 4]
    run = Report(tmp_path, 10, start=3)
    assert (tmp_path / "metrics.jsonl").read_text() == kept
    clock.now += 1
    run.log(4, {"loss": 5.0})
    assert strict_rows(tmp_path)[-1] == {"step": 4, "split": "train", "time": 3.5, "loss": 5.0}
    run.close()


def test_run_from_step_0_starts_the_file_anew(tmp_path):
    train(tmp_path, 3)
    train(tmp_path, 2)
    assert [row["step"] for row in strict_rows(tmp_path)] == [1, 2]


def test_only_process_0_writes_and_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    options = ReportOptions(tensorboard=True, wandb="project")  # not imported either
    train(tmp_path / "run", 10, options=options)
    run = Report(tmp_path / "run", 10)
    run.message("hello")
    run.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


# Speed and time left


def test_speed_is_weight_of_the_steps_over_time_since_the_last_row(tmp_path, clock):
    run = Report(tmp_path, 100, unit="tokens")
    clock.now += 60  # compilation
    run.advance(1)
    run.log(1, {"weight": 50.0})
    clock.now += 2
    run.log(11, {"weight": 50.0})  # 10 steps of 50 in 2 s
    clock.now += 30  # a validation, which is no part of the next rows' speed
    run.log(11, {"weight": 999.0}, "valid")
    clock.now += 4
    run.log(21, {"weight": 60.0})  # 10 steps of 60 in 4 s
    run.log(22, {"loss": 1.0})
    run.close()
    speeds = [row.get("tokens_per_second") for row in strict_rows(tmp_path)]
    assert speeds == [None, 250.0, None, 150.0, None]


def test_speed_counts_rows_where_the_last_step_of_an_epoch_is_small(tmp_path, clock):
    run = Report(tmp_path, 10)
    for step, rows in enumerate([63, 1, 63, 1], 1):
        clock.now += 2
        run.advance(step, rows)
        if rows == 1:
            run.log(step, {"weight": 3.0})
    run.close()
    speeds = [row["examples_per_second"] for row in strict_rows(tmp_path)]
    assert speeds == [3 * 1 / 2, 3 * 64 / 4], "from the end of the first step on"


def test_time_left_follows_recent_speed_and_not_compilation(clock, capsys):
    run = Report(None, 1000)
    clock.now += 600
    for step in range(1, 201):
        clock.now += 10 if step <= 100 else 1
        run.advance(step)
        run.log(step, {"loss": 1.0})
    run.close()
    lines = capsys.readouterr().err.splitlines()
    assert "left" not in lines[0]  # nothing is known after one step
    assert lines[1].endswith("2:46:20 left")  # 997 steps of 10 s
    assert lines[-1] == "step 200/1000  train  loss 1.000  13:20 left"  # 800 steps of 1 s


# Console


def test_without_a_terminal_lines_are_plain_and_few(capsys, clock):
    run = Report(None, 10_000, unit="tokens")
    for step in range(1, 10_001):
        clock.now += 0.001
        run.advance(step)
        run.log(step, {"loss": 2.5, "weight": 3.0})
    run.log(10_000, {"loss": 1.2341, "wer": 0.0, "weight": 9.0}, "valid")
    run.close()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and "\r" not in err
    assert lines[0] == "step 1/10000  train  loss 2.500"
    assert lines[1] == "step 1001/10000  train  loss 2.500  3,000 tokens/s  00:08 left"
    assert lines[-2] == "step 10000/10000  train  loss 2.500  3,000 tokens/s"
    assert lines[-1] == "step 10000  valid  loss 1.234  wer 0.000"
    assert len(lines) == 12


def test_slow_run_prints_at_most_every_5_seconds_and_less_often_later(capsys, clock):
    run = Report(None, None)
    for step in range(1, 86_401):
        clock.now += 1
        run.log(step, {"loss": 1.0})
    run.close()
    steps = [int(line.split()[1]) for line in capsys.readouterr().err.splitlines()]
    assert steps[:4] == [1, 6, 11, 16]
    assert steps[-1] == 86_400  # the last one, although it was not due
    assert 300 < len(steps) < 1500


def test_terminal_has_a_bar_with_lines_above_it_and_leaves_no_thread(terminal, clock):
    threads = threading.enumerate()
    run = Report(None, 100, unit="tokens", show=("loss", "accuracy", "absent"))
    for step in range(1, 101):
        clock.now += 0.5
        run.advance(step)
        run.log(step, {"loss": 1 / step, "accuracy": 0.5, "hidden": 7.0, "weight": 1000.0})
        if step == 50:
            run.log(step, {"loss": 1.5, "bits_per_byte": np.nan}, "valid")
            run.message("saved")
    run.close()
    frames = re.split(r"[\r\n]+", terminal.getvalue())
    assert "step 50  valid  loss 1.500  bits_per_byte nan" in frames
    assert "saved" in frames
    assert any(
        re.fullmatch(
            r"step 51/100 \|.{10}\| \d\d:\d\d  00:25 left  "
            r"loss 0\.02000  accuracy 0\.5000  2,000 tokens/s *",
            frame,
        )
        for frame in frames
    )
    assert "step 100/100 |##########|" in frames[-2]
    assert terminal.getvalue().endswith("\n")
    assert "hidden" not in terminal.getvalue()
    assert threading.enumerate() == threads


def test_bar_is_drawn_a_few_times_a_second_only(terminal, clock):
    run = Report(None, 100_000)
    for step in range(1, 10_001):
        clock.now += 0.001
        run.advance(step)
        run.log(step, {"loss": 1.0})
    assert terminal.getvalue().count("step ") <= 10 / report.REFRESH_SECONDS + 1
    run.close()


def test_row_that_is_logged_late_does_not_move_the_bar_back(terminal, clock):
    run = Report(None, 10)
    run.advance(6)
    clock.now += 1
    run.log(5, {"loss": 1.0})
    assert re.split(r"[\r\n]+", terminal.getvalue())[-1].startswith("step 6/10 ")
    run.close()


def test_bar_without_a_total_counts(terminal):
    train(None, None, stop=3)
    assert re.search(r"step 3  \d\d:\d\d  loss 0.3333", terminal.getvalue())


def test_quiet_shows_messages_only(tmp_path, terminal):
    run = Report(tmp_path, 10, options=ReportOptions(quiet=True))
    run.log(1, {"loss": 1.0})
    run.log(1, {"loss": 1.0}, "valid")
    run.message("padded")
    run.close()
    assert terminal.getvalue() == "padded\n"
    assert len(strict_rows(tmp_path)) == 2


# Failures


class FullDisk:
    """A file that takes half of what it is given, then nothing, until there is room."""

    def __init__(self, file):
        self.file, self.full, self.close = file, True, file.close

    def write(self, data):
        if not self.full:
            return self.file.write(data)
        if len(data) < 30:
            raise OSError(28, "No space left on device")
        return self.file.write(data[: len(data) // 2])


@pytest.fixture
def disk(monkeypatch):
    """A list of the metrics files that were opened, each on a full disk."""
    disks = []
    open_file = report.Path.open

    def open_full(path, mode="r", **options):
        file = open_file(path, mode, **options)
        if mode != "ab":
            return file
        disks.append(FullDisk(file))
        return disks[-1]

    monkeypatch.setattr(report.Path, "open", open_full)
    return disks


def test_rows_that_a_full_disk_refused_are_written_later(tmp_path, disk, capsys):
    run = Report(tmp_path, 10)
    run.log(1, {"loss": 1.0})
    run.log(2, {"loss": 2.0})
    assert capsys.readouterr().err.count("metrics.jsonl failed") == 1  # said once
    disk[0].full = False
    run.log(3, {"loss": 3.0})
    assert [row["loss"] for row in strict_rows(tmp_path)] == [1.0, 2.0, 3.0]
    run.close()


def test_close_raises_when_rows_are_still_unwritten(tmp_path, disk):
    run = Report(tmp_path, 10)
    run.log(1, {"loss": 1.0})
    with pytest.raises(OSError, match="No space left"):
        run.close()
    run.close()


@pytest.mark.parametrize("every", [0, -1])
def test_log_every_must_be_positive(every):
    with pytest.raises(UserError, match=f"log_every is {every}; it must be at least 1"):
        ReportOptions(log_every=every)


# Trackers


def fake_tensorboard(log):
    class SummaryWriter:
        def __init__(self, folder, purge_step):
            log.append(("open", folder, purge_step))

        def add_scalar(self, name, value, step):
            log.append((name, value, step))

        def close(self):
            log.append("close")

    return types.SimpleNamespace(SummaryWriter=SummaryWriter)


@pytest.mark.parametrize(("start", "purge_step"), [(0, 0), (3, 4)])
def test_tensorboard_gets_every_row(tmp_path, monkeypatch, start, purge_step):
    log = []
    monkeypatch.setitem(sys.modules, "tensorboardX", fake_tensorboard(log))
    run = Report(tmp_path, 10, start, options=ReportOptions(tensorboard=True))
    run.log(4, {"loss": 1.0})
    run.log(4, {"loss": 2.0}, "valid")
    run.close()
    run.close()
    rows = [("train/loss", 1.0, 4), ("valid/loss", 2.0, 4)]
    assert log == [("open", str(tmp_path), purge_step), *rows, "close"]


class FakeWandb:
    def __init__(self):
        self.inits, self.rows, self.open = [], [], False

    def init(self, **settings):
        self.inits.append(settings)
        self.open = True
        return types.SimpleNamespace(
            id=settings["id"] or f"id{len(self.inits)}",
            define_metric=lambda name, step_metric: None,
            log=self.rows.append,
            finish=lambda: setattr(self, "open", False),
        )


def test_wandb_gets_every_row_and_a_continued_run_keeps_its_id(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "config.json").write_text('{"seed": 1}')
    for start in (0, 5, 0):
        options = ReportOptions(wandb="project")
        run = Report(tmp_path, 10, start, options=options)
        run.log(start + 1, {"loss": 1.0}, "valid")
        assert wandb.open
        run.close()
        assert not wandb.open
    assert wandb.rows == [{"step": step, "valid/loss": 1.0} for step in (1, 6, 1)]
    assert [settings["id"] for settings in wandb.inits] == [None, "id1", None]
    assert wandb.inits[0]["project"] == "project" and wandb.inits[0]["config"] == {"seed": 1}


@pytest.mark.parametrize(
    ("package", "options"),
    [("tensorboardX", {"tensorboard": True}), ("wandb", {"wandb": "project"})],
)
def test_missing_tracker_is_said_before_anything_is_touched(
    tmp_path, monkeypatch, package, options
):
    train(tmp_path, 3)
    monkeypatch.setitem(sys.modules, package, None)  # makes the import fail
    with pytest.raises(UserError, match=f"{package} is asked for but missing: pip install"):
        Report(tmp_path, 10, options=ReportOptions(**options))
    assert len(strict_rows(tmp_path)) == 3


def test_failing_tracker_is_said_once_and_tried_again(tmp_path, monkeypatch, capsys):
    log = []
    module = fake_tensorboard(log)
    failures = itertools.chain([True, True], itertools.repeat(False))

    def add_scalar(writer, name, value, step):
        if next(failures):
            raise ConnectionError("no route")
        log.append(step)

    module.SummaryWriter.add_scalar = add_scalar
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    run = Report(tmp_path, 10, options=ReportOptions(tensorboard=True, quiet=True))
    for step in (1, 2, 3):
        run.log(step, {"loss": 1.0})
    run.close()
    said = "tensorboardX failed, and is tried again with each row: ConnectionError('no route')\n"
    assert capsys.readouterr().err == said
    assert log[1:] == [3, "close"]
    assert len(strict_rows(tmp_path)) == 3


# Curves


def rows_of(num, loss, every=100):
    for step in range(1, num + 1):
        yield {"step": step, "split": "train", "time": 0.0, "loss": loss(step), "weight": 2.0}
        if step % every == 0:
            yield {"step": step, "split": "valid", "time": 0.0, "loss": 1.0, "accuracy": 0.5}


def size_and_ink(path):
    """Width, height, and the share of pixels that are not white."""
    image = matplotlib.image.imread(path)[:, :, :3]
    return image.shape[1], image.shape[0], (image < 0.99).any(axis=2).mean()


@pytest.mark.parametrize(
    ("num", "loss", "panels"),
    [
        (1, lambda step: 2.0, 1),
        (3, lambda step: "NaN" if step == 2 else 1 / step, 1),
        (40, lambda step: "NaN" if step > 1 else 1.0, 1),
        (500, lambda step: "Infinity" if step % 7 == 0 else 1e6 / step**3, 2),
        (500, lambda step: "NaN", 2),  # validation is finite
        (50_000, lambda step: 1 / step + step % 13, 2),
    ],
)
def test_curves_are_drawn_for_few_many_and_missing_points(tmp_path, num, loss, panels):
    draw_curves(rows_of(num, loss), tmp_path / "curves.png")
    width, height, ink = size_and_ink(tmp_path / "curves.png")
    assert (width, height) == (660 * panels, 480)
    assert 0.01 < ink < 0.5


def test_curves_have_at_most_six_panels_and_need_a_finite_value(tmp_path):
    names = "abcdefghij"
    draw_curves(
        [{"step": 1, "split": "train"} | dict.fromkeys(names, 1.0)], tmp_path / "curves.png"
    )
    assert size_and_ink(tmp_path / "curves.png")[:2] == (660 * 3, 480 * 2)
    draw_curves([], tmp_path / "none.png")
    draw_curves(
        [{"step": 1, "split": "train", "loss": "NaN", "weight": 1.0}], tmp_path / "none.png"
    )
    assert not (tmp_path / "none.png").exists()


def test_validated_metric_has_the_first_panel(tmp_path):
    row = {"step": 1, "split": "train"} | dict.fromkeys("abcdefghij", 1.0)
    draw_curves([row, {"step": 1, "split": "valid", "j": 2.0}], tmp_path / "curves.png")
    image = matplotlib.image.imread(tmp_path / "curves.png")[:, :, :3]
    orange = (np.abs(image - np.array([1.0, 0.5, 0.05])) < 0.01).all(axis=2)  # validation's color
    assert orange[:480, :660].sum() > 50
    assert orange.sum() == orange[:480, :660].sum()


def test_metrics_that_are_shown_have_the_first_panels(tmp_path):
    rows = [{"step": 1, "split": "train"} | dict.fromkeys("abcdefghij", 1.0)]
    rows.append({"step": 1, "split": "valid", "i": 2.0})
    draw_curves(rows, tmp_path / "curves.png", ("j",))
    image = matplotlib.image.imread(tmp_path / "curves.png")[:, :, :3]
    orange = (np.abs(image - np.array([1.0, 0.5, 0.05])) < 0.01).all(axis=2)
    assert orange[:480, 660:1320].sum() == orange.sum() > 50, "the validated one is second"


def test_thinning_keeps_spikes_and_smoothing_keeps_a_straight_line():
    points = np.stack((np.arange(100_000.0), np.zeros(100_000)), axis=1)
    points[12_345, 1], points[54_321, 1], points[7, 1] = 9.0, -9.0, np.nan
    extremes, means = curves._thin(points)
    assert len(extremes) == 2000 and len(means) == 1000
    assert [12_345.0, 9.0] in extremes.tolist() and [54_321.0, -9.0] in extremes.tolist()
    assert means[123, 1] == 0.09  # 9 over a bucket of 100
    assert (np.diff(extremes[:, 0]) >= 0).all()
    line = np.stack((np.arange(200.0), 3 * np.arange(200.0)), axis=1)
    smooth = curves._smooth(line)
    np.testing.assert_allclose(smooth[:, 1], 3 * smooth[:, 0], rtol=1e-12)


def test_close_draws_the_curves_of_the_run(tmp_path, monkeypatch):
    train(tmp_path / "run", 20)
    assert size_and_ink(tmp_path / "run" / "curves.png")[0] == 660 * 2  # loss and speed
    Report(tmp_path / "empty", 10).close()
    assert not (tmp_path / "empty" / "curves.png").exists()
