"""What PPO reaches, over several seeds: runs what is missing, and prints the table of all results.

    python -m benchmarks.ppo_quality                      (hours on 2 cores; goes on where it was)
    python -m benchmarks.ppo_quality --envs CartPole-v1
    python -m benchmarks.ppo_quality --no-run             (the table alone)

A run leaves algorithms/ppo/results/ENV/SEED.json: its command, versions, summary and curve.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path

import tyro

from core.report import read_rows

RESULTS = Path("algorithms/ppo/results")
POINTS = 100  # of a curve
# CleanRL's default settings of its PPO scripts, for numbered and for continuous actions.
DISCRETE = ["--timesteps", "500000", "--optimizer.learning-rate", "2.5e-4"]
CONTINUOUS = [
    *["--timesteps", "500000", "--num-envs", "1", "--num-steps", "2048", "--minibatches", "32"],
    *["--passes", "10", "--optimizer.learning-rate", "3e-4", "--entropy-weight", "0"],
    *["--normalize-observations", "--normalize-rewards", "--report.log-every", "320"],
]
SETTINGS = {
    "CartPole-v1": (10, DISCRETE),
    "Acrobot-v1": (10, DISCRETE),
    "MountainCar-v0": (3, DISCRETE),
    "Pendulum-v1": (3, CONTINUOUS),
    "LunarLander-v3": (3, DISCRETE),
    "HalfCheetah-v5": (3, CONTINUOUS),
}
# Means and deviations of the return, as their authors give them for these settings.
CLEANRL = {
    "CartPole-v1": "490.04 ± 6.12",
    "Acrobot-v1": "-86.36 ± 1.32",
    "MountainCar-v0": "-200.00 ± 0.00",
}
BASELINES = {"CartPole-v1": "497.54", "Acrobot-v1": "-81.82", "MountainCar-v0": "-200.00"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Returns of PPO over several seeds."""

    envs: tuple[str, ...] = tuple(SETTINGS)
    """Environments to run."""
    seeds: int = 0
    """Seeds of each, 0 up to this; 0 takes as many as the table has."""
    run: bool = True
    """Run what is missing."""


def train(env: str, seed: int) -> None:
    """Runs, or goes on with, one seed, and keeps what it reached."""
    folder = Path("runs/ppo-quality") / env / str(seed)
    command = ["-m", "algorithms.ppo.train", "--env", env, *SETTINGS[env][1], "--seed", str(seed)]
    if not (folder / "summary.json").exists():
        quietly = ["--folder", str(folder), "--report.quiet"]
        subprocess.run([sys.executable, *command, *quietly], check=True)
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["split"] == "train"]
    curve = [[row["step"], row["mean_return"]] for row in rows[:: max(1, len(rows) // POINTS)]]
    config = json.loads((folder / "config.json").read_text())
    kept = {
        "command": " ".join(["python", *command]),
        **{name: config[name] for name in ("commit", "python", "versions")},
        "summary": json.loads((folder / "summary.json").read_text()),
        "curve_of_optimizer_step_and_mean_return": curve,
    }
    path = RESULTS / env / f"{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept) + "\n")


def spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def table() -> str:
    """The results in Markdown: means over seeds, and deviations."""
    lines = [
        "| environment | seeds | last 100 episodes of training | held out | CleanRL | baselines |",
        "|---|---|---|---|---|---|",
    ]
    for env in SETTINGS:
        runs = [json.loads(path.read_text()) for path in sorted((RESULTS / env).glob("*.json"))]
        if runs:
            trained = [run["summary"]["train"]["mean_return"] for run in runs]
            held_out = [run["summary"]["held_out"]["mean_return"] for run in runs]
            others = f"{CLEANRL.get(env, '')} | {BASELINES.get(env, '')}"
            lines.append(
                f"| {env} | {len(runs)} | {spread(trained)} | {spread(held_out)} | {others} |"
            )
    return "\n".join(lines)


def main(config: Config) -> None:
    for env in config.envs if config.run else ():
        for seed in range(config.seeds or SETTINGS[env][0]):
            if not (RESULTS / env / f"{seed}.json").exists():
                train(env, seed)
                print(f"{env}, seed {seed}: done", flush=True)
    print(table())


if __name__ == "__main__":
    main(tyro.cli(Config))
