"""One process of a run of several: trains, evaluates, predicts, saves; writes what it saw.

python host_worker.py ADDRESS COUNT INDEX DEVICES FOLDER
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax

from core import HostOptions, MeshOptions, Trainer, TrainOptions, join_hosts, make_mesh
from core.mesh import simulate_devices
from tests import toy


class Recorded:
    """Examples that remember which of them were read."""

    def __init__(self, items):
        self.items, self.read = items, []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        self.read.append(row)
        return self.items[row]


def run(folder=None):
    train, valid, ask = (Recorded(toy.examples(n, seed=n)) for n in (45, 9, 3))
    trainer = Trainer(
        toy.collate,
        toy.loss,
        toy.predict,
        toy.init,
        optax.adam(0.01),
        make_mesh(MeshOptions(data=2, fsdp=2)),
        train.items[:2],
        options=TrainOptions(batch_size=16, microbatches=2, epochs=2, clip_norm=1.0),
        folder=folder,
    )
    result = trainer.fit(train, valid, best=("loss", "min"))
    outputs = trainer.predict(ask)
    keys = jax.random.split(jax.random.key(1), 3)
    again = trainer.predict_step(trainer.state.params, toy.collate(ask.items), keys)
    return {
        "metrics": {k: v for k, v in result["train"].items() if k != "examples_per_second"},
        "valid": result["valid"],
        "outputs": [{k: x.tolist() for k, x in out.items()} for out in outputs],
        "again": again["mean"].tolist(),
        "bias": np.asarray(jax.device_get(trainer.state.params["bias"])).tolist(),
        "read": [[int(row) for row in source.read] for source in (train, valid, ask)],
    }


def main(address, count, index, devices, folder):
    jax.config.update("jax_enable_x64", True)
    simulate_devices(int(devices))
    join_hosts(HostOptions(address, int(count), int(index)))
    out = run(Path(folder) / "run")
    (Path(folder) / f"process{index}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
