"""One process of a run of several: trains, evaluates, predicts, saves; writes what it saw.

python -m tests.core.host_worker ADDRESS COUNT INDEX DEVICES FOLDER
"""

import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

from core import HostOptions, MeshOptions, Trainer, TrainOptions, checkpoint, join_hosts, make_mesh
from core.mesh import all_processes, from_first, simulate_devices
from core.signals import Stopped
from tests import toy
from tests.core import resume_worker


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


def stop(folder):
    """The step at which the run stops where process 1 alone gets a signal in its step 4."""
    one, count = resume_worker.trainer(folder, "plain"), 0
    inner = one.step_jit

    def step(state, batch):
        nonlocal count
        count += 1
        if count == 4 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(state, batch)

    one.step_jit = step
    try:
        resume_worker.fit(one, "plain")
    except Stopped as stopped:
        return str(stopped)


def go_on(folder):
    one = resume_worker.trainer(folder, "plain")
    return resume_worker.fit(one, "plain")["valid"]


def fill_disk(folder, process):
    """Steps and a parameter of a run where one process can write nothing in the second save."""
    one, count = resume_worker.trainer(folder, "plain", save_every=3), 0
    inner, agree = one.step_jit, checkpoint.Checkpoints._agree

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def step(state, batch):
        nonlocal count
        count += 1
        if count == 5 and jax.process_index() == process:
            while not resume_worker.finished(folder):
                time.sleep(0.01)
            limit(100)
        return inner(state, batch)

    def agree_and_make_room(self, step, problem):
        if problem is not None:
            limit(resource.RLIM_INFINITY)
        agree(self, step, problem)

    one.step_jit, checkpoint.Checkpoints._agree = step, agree_and_make_room
    try:
        return one.fit(toy.examples(40))["steps"], np.asarray(one.state.params["bias"]).tolist()
    finally:
        checkpoint.Checkpoints._agree = agree


def fail(folder):
    """What is said of a row that is not finite."""
    examples = toy.examples(32)
    examples[7]["y"] = np.full(3, np.inf)
    one = resume_worker.trainer(folder, "plain")
    try:
        one.fit(examples)
    except ValueError as error:
        return str(error)


def main(address, count, index, devices, folder):
    jax.config.update("jax_enable_x64", True)
    simulate_devices(int(devices))
    join_hosts(HostOptions(address, int(count), int(index)))
    folder = Path(folder)
    out = run(folder / "run")
    out["told"] = [from_first(f"ä{index}" * (9 - int(index))), all_processes(index == "0")]
    out["stopped"] = stop(folder / "stopped")
    if index == "0":
        shutil.copytree(folder / "stopped", folder / "stopped-for-one")
    out["two to two"] = go_on(folder / "stopped")
    out["one to two"] = go_on(folder / "half")
    checkpoint.WAIT_SECONDS = 10
    out["full"] = fill_disk(folder / "full", 1)
    out["bad"] = fail(folder / "bad")
    (folder / f"process{index}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
