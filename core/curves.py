"""The metrics of a run as a picture."""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = np.ndarray[tuple[int, int], np.dtype[np.float64]]  # [N, 2]: step, value

NOT_DRAWN = {"step", "split", "time", "weight"}
DEVIATION = "_deviation"  # ends the name of a metric that is the deviation of another


def draw_curves(rows: Iterable[Mapping[str, Any]], path: Path, first: Sequence[str] = ()) -> None:
    """Draws a PNG with a panel for each of up to six metrics: these first, then validated ones.

    A metric's deviation, as where several agents are trained side by side, is a band around it.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot, no global state

    series: dict[str, dict[str, array[float]]] = {}  # metric, split -> step, value, step, value, ..
    for row in rows:
        for name in row:
            if name not in NOT_DRAWN:
                points = series.setdefault(name, {}).setdefault(row["split"], array("d"))
                points.extend((row["step"], float(row[name])))
    names = [n for n, of in series.items() if any(np.isfinite(p[1::2]).any() for p in of.values())]
    names = [name for name in names if name.removesuffix(DEVIATION) not in {*names} - {name}]
    names = sorted(names, key=lambda n: (n not in first, series[n].keys() == {"train"}))[:6]
    if not names:
        return
    splits = sorted({split for name in names for split in series[name]} - {"train"})
    colors = {split: f"C{i}" for i, split in enumerate(["train", *splits])}
    num_rows = math.ceil(len(names) / 3)
    num_columns = math.ceil(len(names) / num_rows)
    figure = Figure((4.4 * num_columns, 3.2 * num_rows), dpi=150, layout="constrained")
    figure.suptitle(path.resolve().parent.name, fontsize=11, color="#444444")
    for panel, name in enumerate(names, 1):
        axes = figure.add_subplot(num_rows, num_columns, panel)
        for split, color in colors.items():
            if split in series[name]:
                line, band = (
                    np.array(series.get(of, {}).get(split, ())).reshape(-1, 2)
                    for of in (name, name + DEVIATION)
                )
                _draw_line(axes, line, split, color)
                if len(band) == len(line):
                    low, high = (line[:, 1] + sign * band[:, 1] for sign in (-1, 1))
                    axes.fill_between(line[:, 0], low, high, color=color, alpha=0.2, linewidth=0)
        _style(axes, name)
    figure.savefig(path)


def _draw_line(axes: "Axes", points: Points, split: str, color: str) -> None:
    points[~np.isfinite(points)] = np.nan  # a gap
    line, means = _thin(points)
    if split == "train" and len(points) > 30:
        axes.plot(*line.T, color=color, linewidth=0.8, alpha=0.3)
        line = _smooth(means)
    marker = "o" if len(points) <= 30 else ""  # a lone point has no line
    axes.plot(*line.T, color=color, linewidth=1.6, marker=marker, markersize=3.5, label=split)


def _thin(points: Points, most: int = 1000) -> tuple[Points, Points]:
    """The extremes and the means of buckets, so that neither a spike nor the trend is lost."""
    extremes, means = [], []
    for bucket in np.array_split(points, min(len(points), most)):
        finite = bucket[np.isfinite(bucket[:, 1])]
        finite = finite if len(finite) else bucket[:1]
        extremes += [finite[i] for i in sorted((finite[:, 1].argmin(), finite[:, 1].argmax()))]
        means.append(finite.mean(axis=0))
    return np.stack(extremes), np.stack(means)


def _smooth(points: Points) -> Points:
    """Means over the nearest 5 % of the finite points, fewer where the curve begins, steep."""
    points = points[np.isfinite(points[:, 1])]
    reach = max(len(points) // 40, 1)
    near = [points[i - min(i, reach) : i + min(i, reach) + 1] for i in range(len(points))]
    return np.array([some.mean(axis=0) for some in near]).reshape(-1, 2)


def _style(axes: "Axes", title: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    values = np.concatenate([np.asarray(line.get_ydata()) for line in axes.lines])
    if np.nanmin(values) > 0 and np.nanmax(values) > 20 * np.nanmedian(values):
        axes.set_yscale("log")  # else a few values would press all others flat
    ticks = MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    axes.xaxis.set_major_locator(ticks)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_title(title.replace("_", " "), fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=8, color="#999999")
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
