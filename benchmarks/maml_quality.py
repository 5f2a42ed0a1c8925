"""What MAML reaches over several seeds: runs what is missing, and prints the tables of all results.

    python -m benchmarks.maml_quality                     (about an hour on 2 cores; can go on)
    python -m benchmarks.maml_quality --names glyphs-5w1s
    python -m benchmarks.maml_quality --no-run            (the tables alone)

A run leaves algorithms/maml/results/NAME/SEED.json: its command, versions, summary and curve.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path

import tyro

from core.report import read_rows

RESULTS = Path("algorithms/maml/results")
POINTS = 100  # of a curve
SEEDS = 3
SETTINGS = {
    "glyphs-5w1s": ["--steps", "1000", "--test-tasks", "2000"],
    # As Li et al. 2017 (Meta-SGD) run MAML: frequencies differ, trained with 5 points.
    "sinusoid-5-shot": [
        *["--dataset", "sinusoid", "--frequency-spread", "0.2", "--shots", "5"],
        *["--batch-size", "4", "--steps", "60000", "--eval-every", "10000"],
        *["--optimizer.learning-rate", "1e-3", "--optimizer.schedule", "constant"],
        *["--test-tasks", "2000"],
    ],
    "glyphs-20w1s": [
        *["--ways", "20", "--batch-size", "16", "--steps", "120", "--test-tasks", "500"],
    ],
}
# Means and 95 % intervals that its authors give for (points, steps).
META_SGD = {(5, 1): "1.13 ± 0.18", (10, 1): "0.85 ± 0.14"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Results of MAML over several seeds."""

    names: tuple[str, ...] = tuple(SETTINGS)
    """What to run."""
    seeds: int = SEEDS
    """Seeds of each, 0 up to this."""
    run: bool = True
    """Run what is missing."""


def train(name: str, seed: int) -> None:
    """Runs, or goes on with, one seed, and keeps what it reached."""
    folder = Path("runs/maml-quality") / name / str(seed)
    command = ["-m", "algorithms.maml.train", *SETTINGS[name], "--seed", str(seed)]
    if not (folder / "summary.json").exists():
        quietly = ["--folder", str(folder), "--report.quiet"]
        subprocess.run([sys.executable, *command, *quietly], check=True)
    rows = list(read_rows(folder / "metrics.jsonl"))
    trained = [row for row in rows if row["split"] == "train"]
    config = json.loads((folder / "config.json").read_text())
    kept = {
        "command": " ".join(["python", *command]),
        **{key: config[key] for key in ("commit", "python", "versions")},
        "summary": json.loads((folder / "summary.json").read_text()),
        "curve_of_step_and_loss": [
            [row["step"], row["loss"]] for row in trained[:: max(1, len(trained) // POINTS)]
        ],
        "valid": [row for row in rows if row["split"] == "valid"],
    }
    path = RESULTS / name / f"{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept) + "\n")


def runs(name: str) -> list[dict]:
    """The summaries of the tests of all seeds that are done."""
    paths = sorted((RESULTS / name).glob("*.json"))
    return [json.loads(path.read_text())["summary"]["test"] for path in paths]


def spread(values: list[float], scale: float = 1.0) -> str:
    values = [scale * value for value in values]
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def tables() -> str:
    """The results in Markdown: means over seeds, and deviations."""
    lines = ["| glyphs | seeds | accuracy in % | nearest pixels |", "|---|---|---|---|"]
    for name in ("glyphs-5w1s", "glyphs-20w1s"):
        found = runs(name)
        figures = (spread([run[key][0] for run in found], 100) for key in ("accuracy", "nearest"))
        if found:
            lines.append(f"| {name.split('-')[1]} | {len(found)} | {' | '.join(figures)} |")
    lines += ["", "| sinusoid | seeds | before | 1 step | 10 steps | Meta-SGD's MAML, 1 step |"]
    lines += ["|---|---|---|---|---|---|"]
    found = runs("sinusoid-5-shot")
    for start in ("maml", "pretrained") if found else ():
        for shots in (5, 10):
            keys = [f"{start}, {shots} shots, {steps} steps" for steps in (0, 1, 10)]
            figures = " | ".join(spread([run[key][0] for run in found]) for key in keys)
            other = META_SGD[shots, 1] if start == "maml" else ""
            lines.append(f"| {start}, {shots} points | {len(found)} | {figures} | {other} |")
    return "\n".join(lines)


def main(config: Config) -> None:
    for name in config.names if config.run else ():
        for seed in range(config.seeds):
            if not (RESULTS / name / f"{seed}.json").exists():
                train(name, seed)
                print(f"{name}, seed {seed}: done", flush=True)
    print(tables())


if __name__ == "__main__":
    main(tyro.cli(Config))
