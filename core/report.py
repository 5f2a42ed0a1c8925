"""What a run says about itself: progress, `metrics.jsonl`, `curves.png`, trackers.

`metrics.jsonl` has one JSON object a line: `step`, `split`, `time`, and the metrics.

- Numbers have their full precision, so that two runs compare bit for bit. What is not finite is a
  string, "NaN", "Infinity" or "-Infinity": valid JSON, and `float` reads it back.
- A continued run drops the rows that the interrupted one wrote after the step it continues from,
  and ends with the rows of a run that was never interrupted. Only `time` (in seconds, carried on
  from the last row kept) and `<unit>_per_second` differ.
- A run from step 0 starts the file anew.

Nothing that fails here stops training, and nothing fails in silence: the first failure of the
metrics file or of a tracker is said, each later row is tried again, and rows that the disk refused
wait in memory for that. What still fails at the end, `close` raises, after doing all the rest.
A tracker that cannot start is an error before training.
"""

import importlib
import json
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import jax
from tqdm import tqdm

from core.curves import draw_curves
from core.errors import UserError

Tracker = Callable[[int, str, Mapping[str, float]], None]  # (step, split, metrics)

ROW_KEYS = {"step", "split", "time"}
REFRESH_SECONDS = 0.25  # between two drawings of the bar


@dataclass(frozen=True)
class ReportOptions:
    """What is shown and recorded while a run goes on."""

    log_every: int = 10
    """Steps between two logged rows."""
    quiet: bool = False
    """Show no progress, only messages."""
    tensorboard: bool = False
    """Write TensorBoard files into the run's folder (needs tensorboardX)."""
    wandb: str = ""
    """Log to this Weights & Biases project (needs wandb, which reads WANDB_MODE and so on)."""

    def __post_init__(self) -> None:
        if self.log_every < 1:
            raise UserError(f"log_every is {self.log_every}; it must be at least 1")


class Report:
    """Reports one run. Every process calls it; only process 0 prints and writes.

    Args:
        folder: the run's folder; None for the console alone, without files and trackers.
        total: the number of steps, if known.
        start: the step to continue after.
        unit: what the metric "weight" counts, for the speed.
        show: the training metrics that the console shows.
    """

    def __init__(
        self,
        folder: Path | None,
        total: int | None,
        start: int = 0,
        unit: str = "examples",
        show: tuple[str, ...] = ("loss",),
        options: ReportOptions = ReportOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self._total, self._unit, self._show = total, unit, show
        self._main = jax.process_index() == 0
        self._verbose = self._main and not options.quiet
        # When the first step ended (it compiles), then the latest rows: for speed and time left.
        self._marks: deque[tuple[int, float, int]] = deque(maxlen=50)
        # The rows done up to each of the latest steps: the last step of an epoch may have fewer.
        self._rows: deque[tuple[int, int]] = deque([(start, 0)], maxlen=3)
        self._trackers: dict[str, Tracker] = {}
        self._failed: set[str] = set()
        with ExitStack() as opened:  # closed here only if one of them cannot start
            if self._main and folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                if options.tensorboard:
                    self._trackers["tensorboardX"] = _tensorboard(folder, start, opened)
                if options.wandb:
                    self._trackers["wandb"] = _wandb(folder, start, options.wandb, opened)
                self._trackers["metrics.jsonl"] = _metrics_file(folder, start, show, opened)
            self._exit = opened.pop_all()
        self._bar: _Bar | None = None
        if self._verbose and sys.stderr.isatty():
            shape = "{n_fmt}/{total_fmt} |{bar:10}| {elapsed}" if total else "{n_fmt}  {elapsed}"
            # `desc` and not `postfix`, before which tqdm puts a comma.
            shape = f"step {shape}  {{desc}}"
            self._bar = _Bar(
                total=total, initial=start, bar_format=shape, dynamic_ncols=True, file=sys.stderr
            )
        self._began = self._refreshed = monotonic()
        self._line = ""  # the latest plain line while it is not printed
        self._printed = start, -math.inf  # step and time of the last one that was

    def log(self, step: int, metrics: Mapping[str, float], split: str = "train") -> None:
        """Records a row; "weight" in a train row is the total weight of that one step."""
        if taken := ROW_KEYS & metrics.keys():
            raise UserError(f"every row has a {' and a '.join(sorted(taken))}: rename the metric")
        now = monotonic()
        values = {name: float(value) for name, value in metrics.items()}
        if split == "train" and "weight" in values and self._marks:
            last_step, last_time, last_rows = self._marks[-1]
            if step > last_step and now > last_time:
                rows = dict(self._rows)
                steps = float(step - last_step)  # as large as this one
                if step in rows and step - 1 in rows:
                    steps = (rows[step] - last_rows) / (rows[step] - rows[step - 1])
                speed = values["weight"] * steps / (now - last_time)
                values[f"{self._unit}_per_second"] = speed
        # After validation too, which is no part of the speed.
        self._marks.append((step, now, dict(self._rows).get(step, 0)))
        for name, track in self._trackers.items():
            try:
                track(step, split, values)
            except Exception as error:
                if name not in self._failed:
                    self.message(f"{name} failed, and is tried again with each row: {error!r}")
                self._failed.add(name)
        if self._verbose:
            self._print(step, values, split, now)

    def advance(self, step: int, rows: int = 1) -> None:
        """Says that `step`, of so many rows, is done; cheap enough for every step."""
        now = monotonic()
        last, before = self._rows[-1]
        if step > last:
            self._rows.append((step, before + rows))
        if not self._marks:
            self._marks.append((step, now, before + rows))
        if self._bar is not None:
            self._bar.n = max(step, self._bar.n)  # a row may be logged while a later step runs
            if now - self._refreshed >= REFRESH_SECONDS:
                self._refreshed = now
                self._bar.refresh()

    def message(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self._main:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the progress, closes files and trackers, draws the curves; may be repeated."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._line:
            self.message(self._line)
            self._line = ""
        self._exit.close()

    def _print(self, step: int, values: dict[str, float], split: str, now: float) -> None:
        if split != "train":
            shown = [_figure(name, values[name]) for name in values if name != "weight"]
            self.message("  ".join([f"step {step}", split, *shown]))
            return
        shown = [_figure(name, values[name]) for name in self._show if name in values]
        if (speed := values.get(f"{self._unit}_per_second")) is not None:
            shown.append(f"{speed:,.0f} {self._unit}/s")
        (first_step, first_time, _), total = self._marks[0], self._total
        left = []
        if total is not None and first_step < step < total:
            seconds = (total - step) * (now - first_time) / (step - first_step)
            left = [f"{tqdm.format_interval(seconds)} left"]
        if self._bar is not None:  # a narrow terminal cuts its end
            self._bar.set_description_str("  ".join([*left, *shown]), refresh=False)
            self.advance(step)
            return
        of_total = f"/{total}" if total is not None else ""
        self._line = "  ".join([f"step {step}{of_total}", split, *shown, *left])
        last_step, last_time = self._printed
        tenth = total is not None and (step == total or 10 * (step - last_step) >= total)
        # At least 5 s apart, and more so as time goes by: a run of days prints some hundred lines.
        if tenth or now - last_time >= max(5.0, (now - self._began) / 200):
            self.message(self._line)
            self._line, self._printed = "", (step, now)


class _Bar(tqdm):  # type: ignore[misc]
    monitor_interval = 0  # no thread that watches the bar


def _figure(name: str, value: float) -> str:
    # Four digits with their zeros, so that the bar's text keeps its width.
    return f"{name} {value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{name} {value:#.4g}"


def _metrics_file(folder: Path, start: int, show: tuple[str, ...], on_close: ExitStack) -> Tracker:
    path = folder / "metrics.jsonl"
    began = monotonic() - _drop_rows_after(start, path)
    # Unbuffered: a row is one write, and a killed process leaves whole lines.
    file, waiting = path.open("ab", buffering=0), bytearray()

    def write() -> None:
        nonlocal file
        if waiting and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            file.close()
            file = path.open("ab", buffering=0)
            raise FileNotFoundError(f"{path} was removed, and is made anew")
        # A full disk may take half a row: the rest follows later, and no line is torn.
        while waiting:
            del waiting[: file.write(waiting)]

    def track(step: int, split: str, metrics: Mapping[str, float]) -> None:
        row = {"step": step, "split": split, "time": monotonic() - began}
        row |= {n: v if math.isfinite(v) else json.dumps(v) for n, v in metrics.items()}
        waiting.extend(json.dumps(row).encode() + b"\n")
        write()

    on_close.callback(lambda: draw_curves(read_rows(path), folder / "curves.png", show))
    on_close.callback(lambda: file.close())
    on_close.callback(write)
    return track


def _drop_rows_after(start: int, path: Path) -> float:
    """Keeps the whole lines up to `start`, as they stand, and returns the last one's time."""
    lines = path.read_bytes().splitlines(keepends=True) if start and path.exists() else []
    kept = [line for line in lines if (row := _parse(line)) and row["step"] <= start]
    shorter = path.with_suffix(".tmp")
    shorter.write_bytes(b"".join(kept))
    os.replace(shorter, path)  # in one move: a process killed here loses nothing
    return float(json.loads(kept[-1])["time"]) if kept else 0.0


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        return dict(json.loads(line)) if line.endswith(b"\n") else None
    except (ValueError, TypeError):  # torn: the process died while it wrote
        return None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, without a last line that is torn."""
    with path.open("rb") as lines:
        yield from filter(None, map(_parse, lines))


def _tensorboard(folder: Path, start: int, on_close: ExitStack) -> Tracker:
    # As in metrics.jsonl, what an interrupted run wrote later is hidden.
    purge_step = start + 1 if start else 0
    writer = _optional("tensorboardX").SummaryWriter(str(folder), purge_step=purge_step)
    on_close.callback(writer.close)

    def track(step: int, split: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(f"{split}/{name}", value, step)

    return track


def _wandb(folder: Path, start: int, project: str, on_close: ExitStack) -> Tracker:
    config = folder / "config.json"
    settings = json.loads(config.read_text()) if config.exists() else None
    saved = folder / "wandb_id"
    run_id = saved.read_text() if start and saved.exists() else None
    run = _optional("wandb").init(
        project=project, id=run_id, resume="allow", dir=str(folder), config=settings
    )
    saved.write_text(run.id)
    # Its own step may only grow, and a continued run logs some steps again: ours is the x axis.
    run.define_metric("*", step_metric="step")
    on_close.callback(run.finish)
    return lambda step, split, metrics: run.log(
        {"step": step} | {f"{split}/{name}": value for name, value in metrics.items()}
    )


def _optional(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{package} is asked for but missing: pip install {package}") from error
