"""For how long a save keeps the training waiting, as a share of a save that is waited for.

    python -m benchmarks.checkpoint            (or `make bench`)

The state is that of Adam on random weights, which hardly compress. Each round saves twice: once and
waits until all is written, checksums included; and once in the background, as `Trainer.fit` does,
with steps that donate the state going on meanwhile. Three shares of the first time are shown:

- blocked: the call that begins to save.
- copy: by how much longer a step takes that cannot reuse the memory of a state which is still being
  written. The aim is less than 10 % for both together.
- meanwhile: by how much longer all steps take together until the save is done. On a CPU the writing
  and the steps share the cores; on an accelerator they do not.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from core.checkpoint import Checkpoints

AIM = 0.1


@dataclasses.dataclass(frozen=True)
class Config:
    """Blocking time of a checkpoint over that of a synchronous one."""

    parameters: int = 25_000_000
    """Size of the model; its state is three times that, of 4 bytes each."""
    rounds: int = 5
    """Saves of each kind."""


def random_state(size: int) -> tuple[dict[str, jax.Array], optax.OptState]:
    """Parameters in ten matrices, and the moments of Adam."""
    side = int((size / 10) ** 0.5)
    keys = jax.random.split(jax.random.key(0), 30)
    arrays = [jax.random.normal(key, (side, side)) for key in keys]
    params, mu, nu = ({str(i): arrays[3 * i + j] for i in range(10)} for j in range(3))
    return params, (optax.ScaleByAdamState(jnp.int32(1), mu, nu), optax.EmptyState())


@jax.jit
def _moved(state):
    return jax.tree.map(lambda x: x + x // 2, state)


step = jax.jit(_moved, donate_argnums=0)


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(config: Config) -> None:
    state = jax.block_until_ready(random_state(config.parameters))
    seen: dict[str, list[float]] = {"blocked": [], "copy": [], "meanwhile": []}
    number = 0

    def one_step() -> None:
        nonlocal state
        state = jax.block_until_ready(step(state))

    def save() -> None:
        nonlocal number
        number += 1
        params, opt_state = state
        checkpoints.save(number, params, {"opt_state": opt_state}, {}, None)

    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), keep=1)
        for _ in range(3):
            one_step()
        for _ in range(config.rounds):
            ordinary = statistics.median(timed(one_step) for _ in range(5))
            held = jax.tree.map(np.asarray, state)  # as Orbax holds it
            copied = timed(one_step)
            del held
            whole = timed(lambda: (save(), checkpoints.wait()))
            blocked = timed(save)
            steps = []
            while list(checkpoints.path.glob("*tmp*")):
                steps.append(timed(one_step))
            checkpoints.wait()
            seen["blocked"].append(blocked / whole)
            seen["copy"].append((copied - ordinary) / whole)
            seen["meanwhile"].append((sum(steps) - len(steps) * ordinary) / whole)
        checkpoints.close()
    shares = {name: statistics.median(values) for name, values in seen.items()}
    print(
        f"{config.parameters:,} parameters and their moments, medians of {config.rounds} rounds, "
        "as shares of a save that is waited for:"
    )
    for name, share in shares.items():
        print(f"  {name:<10}  {share:.1%}  ({', '.join(f'{x:.1%}' for x in seen[name])})")
    if (share := shares["blocked"] + shares["copy"]) >= AIM:
        sys.exit(f"Saving blocks for {share:.1%}; the aim is below {AIM:.0%}.")


if __name__ == "__main__":
    main(tyro.cli(Config))
