"""Continues prompts with a finished run.

python -m algorithms.lm.generate --run runs/lm-... --prompt "def "
"""

import dataclasses
from functools import partial
from typing import Annotated

import tyro

from core import Trainer, TrainOptions, UserError, make_mesh
from core.decode import Sampling
from core.rules import parse_overrides
from core.run import DeviceOptions, Devices, launch, read_config

from . import lm, train
from .model import build
from .tokenizer import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Config:
    """Continue prompts with a trained language model."""

    folder: Annotated[str, tyro.conf.arg(name="run")]
    """Folder of the run."""
    prompt: tuple[str, ...] = ("def ",)
    """Texts to continue, each on its own."""
    new_tokens: int = 128
    """Tokens to add at most; the end of a document ends it before."""
    seed: int = 0
    """Seed of the sampling."""
    sampling: Sampling = Sampling(temperature=0.6, top_p=0.95)
    run: Devices = DeviceOptions()


def main(config: Config) -> None:
    if not config.prompt:
        raise UserError("--prompt has no text: give one or more, such as --prompt 'def '.")
    trained = read_config(config.folder, train.Config())
    tokenizer = load_tokenizer(f"{config.folder}/tokenizer")
    prompts = [{"tokens": [tokenizer.end, *tokenizer.encode(text)]} for text in config.prompt]
    model, _ = build(trained.model, tokenizer.vocab, trained.pad_vocab)
    trainer = Trainer(
        partial(lm.collate, block=max(len(prompt["tokens"]) for prompt in prompts)),
        None,
        partial(
            lm.predict,
            model=model,
            length=config.new_tokens,
            sampling=config.sampling,
            end=tokenizer.end,
        ),
        config.folder,
        None,
        make_mesh(config.run.mesh),
        prompts[:1],
        options=TrainOptions(batch_size=len(prompts), seed=config.seed),
        overrides=parse_overrides(config.run.overrides),
    )
    for text, tokens in zip(config.prompt, trainer.predict(prompts), strict=True):
        print(text + tokenizer.decode([t for t in tokens if t != tokenizer.end]))


if __name__ == "__main__":
    launch(Config, main)
