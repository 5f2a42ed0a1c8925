"""Pictures of tasks: a contact sheet, and the fits of a sine."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

GAP = 2  # pixels between pictures
QUERIES = 8  # at most, of each class
ZOOM = 2


def draw_tasks(tasks, path):
    """A contact sheet: task beside task, a class a row, its support left of its queries."""
    sheet = np.concatenate([_sheet(task) for task in tasks], 1)[:, : -8 * GAP]
    Image.fromarray(sheet).save(path, format="png")


def _sheet(task):
    ways = task["support_y"].max() + 1
    support, query = (
        np.stack([task[f"{part}_x"][task[f"{part}_y"] == label] for label in range(ways)])
        for part in ("support", "query")
    )
    support, query = (_grid(x[:, :QUERIES]) for x in (support, query))
    bar = np.full((len(support), 8 * GAP, 3), 255, np.uint8)
    return np.concatenate([support, bar[:, : 2 * GAP], query, bar], 1)


def _grid(images):
    """Images [rows, columns, H, W, C] in [0, 1] as one [., ., 3] uint8."""
    images = np.repeat(images, 3, -1) if images.shape[-1] == 1 else images
    images = images.repeat(ZOOM, 2).repeat(ZOOM, 3)
    edges = [(0, 0), (0, 0), (0, GAP), (0, GAP), (0, 0)]
    images = np.pad((255 * images).astype(np.uint8), edges, constant_values=128)
    rows, columns, height, width, _ = images.shape
    return images.swapaxes(1, 2).reshape(rows * height, columns * width, 3)


def draw_sines(drawn, path):
    """A task, and answers [queries, 1] by number of steps, for each name; two names a row."""
    figure = Figure(figsize=(10, 3.2 * -(-len(drawn) // 2)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(-(-len(drawn) // 2), 2, sharex=True, sharey=True, squeeze=False)
    for axis, (name, (task, curves)) in zip(axes.T.flat, drawn.items(), strict=False):
        x = task["query_x"][:, 0]
        axis.plot(x, task["query_y"][:, 0], color="tab:red", label="the sine")
        axis.plot(*(task[f"support_{at}"][:, 0] for at in "xy"), "^", color="tab:purple")
        for (steps, y), line in zip(curves.items(), (":", "--", "-"), strict=False):
            label = f"after {steps} step{'s' * (steps != 1)}" if steps else "before"
            axis.plot(x, y[:, 0], line, color="tab:green", label=label)
        axis.set_title(name)
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
