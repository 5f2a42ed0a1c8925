"""Plays episodes with the agent of a finished run, and shows one of them as a GIF.

python -m algorithms.ppo.play --run runs/ppo-...
"""

import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image

from core import Trainer, TrainOptions, UserError, make_mesh
from core.checkpoint import Saved
from core.errors import at_least
from core.rules import parse_overrides
from core.run import DeviceOptions, Devices, launch, read_config

from . import ppo, train
from .compiled import PREFIX
from .data import STATISTICS, Moments, seen
from .environments import checked, described, make_env, to_env
from .model import build

MOST_FRAMES = 1000


@dataclasses.dataclass(frozen=True)
class Config:
    """Play episodes with a trained agent."""

    folder: Annotated[str, tyro.conf.arg(name="run")]
    """Folder of the run."""
    episodes: int = 100
    """Episodes that the mean return is taken over."""
    agent: int = 0
    """Which one, of a run of several side by side."""
    greedy: bool = False
    """Take the likeliest action instead of one drawn from the policy."""
    gif: str = "play.gif"
    """File in the run's folder, or a path, for a picture of one episode; empty makes none."""
    seed: int = 0
    """Seed of environments and actions."""
    run: Devices = DeviceOptions()

    def __post_init__(self) -> None:
        at_least(self, "episodes", 1)
        at_least(self, "seed", 0)
        at_least(self, "agent", 0)


def main(config: Config) -> None:
    trained = read_config(config.folder, train.Config())
    rollout = trained.rollout
    envs = trained.envs(config.episodes)
    spaces = train.spaces(envs)
    model, _ = build(spaces.size, spaces.actions, spaces.discrete, trained.hidden)
    trainer = Trainer(
        ppo.collate,
        None,
        partial(ppo.predict, model=model, greedy=config.greedy),
        Agent(config.folder, config.agent, trained.seeds) if trained.seeds > 1 else config.folder,
        None,
        make_mesh(config.run.mesh),
        {"observation": spaces.example()["observation"]},
        options=TrainOptions(seed=config.seed),
        overrides=parse_overrides(config.run.overrides),
    )
    moments = statistics(config.folder, spaces.size) if rollout.normalize_observations else None
    if moments is not None and trained.seeds > 1:
        moments = Moments(*(array[config.agent] for array in moments))
    print(described(train.played(envs, trainer, moments, config.episodes, config.seed)))
    if config.gif and jax.process_index() == 0:
        path = Path(config.folder) / config.gif
        # (Those of gymnax are copies of Gymnasium's, which have pictures.)
        env = rollout.env.removeprefix(PREFIX)
        act = partial(trainer.predict_step, trainer.state.params)
        images, fps = frames(env, act, partial(seen, moments=moments), config.seed)
        first, *rest = images
        first.save(path, save_all=True, append_images=rest, duration=1000 / fps, loop=0)
        print(f"An episode is shown in {path}")


class Agent:
    """The weights of one agent, of a run of several side by side."""

    def __init__(self, folder: str, agent: int, agents: int):
        if agent >= agents:
            raise UserError(f"agent {agent} is not in the run: it has 0 to {agents - 1}.")
        self.saved, self.agent = Saved(folder), agent

    def shapes(self) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.saved.shapes()
        )

    def load(self, shardings: Any) -> Any:
        return jax.tree.map(
            lambda x, sharding: jax.device_put(x[self.agent], sharding),
            self.saved.load(jax.tree.map(lambda x: NamedSharding(x.mesh, P()), shardings)),
            shardings,
        )


def statistics(folder: str, size: int) -> Moments:
    """Those of the observations of a finished run, as they were at its end.

    Raises:
      UserError: the run has none.
    """
    path = Path(folder) / STATISTICS
    try:
        kept = json.loads(path.read_text())
        moments = Moments(*(np.asarray(kept[name]) for name in Moments._fields))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it is written at the end of a run, so let the run "
            "finish first."
        ) from error
    return moments


def frames(env: str, act: Any, see: Any, seed: int) -> tuple[list[Image.Image], float]:
    """Pictures of one episode, and how many there are in a second."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # no display is needed, nor looked for
    one = make_env(env, "rgb_array")
    observation, _ = one.reset(seed=seed)
    key, over = jax.random.key(seed), False
    images: list[Image.Image] = []
    while not over and len(images) < MOST_FRAMES:
        images.append(Image.fromarray(np.asarray(one.render())))
        batch = {"observation": see(checked(observation[None], len(images) - 1))}
        out = act(batch, jax.random.fold_in(key, len(images))[None])
        action = to_env(out["action"], one.action_space)[0]
        observation, _, terminated, truncated, _ = one.step(action)
        over = terminated or truncated
    one.close()
    return images, float(one.metadata.get("render_fps", 30))


if __name__ == "__main__":
    launch(Config, main)
