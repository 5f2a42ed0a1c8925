"""Trains a language model, by default on the source of Python's own standard library.

    python -m algorithms.lm.train
"""

import dataclasses
from functools import partial

from core import Trainer, UserError
from core.decode import Sampling
from core.optimizer import AdamWOptions
from core.run import Run, RunOptions, Shared, launch

from . import data, lm
from .model import ModelConfig, build
from .tokenizer import make_tokenizer


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a decoder-only language model on text."""

    text: tuple[str, ...] = ()
    """Local text to train on: files, folders or patterns; none takes Python's standard library."""
    dataset: str = ""
    """Data set to train on instead: an id or folder that `datasets` can load."""
    dataset_config: str = ""
    """Configuration of the data set."""
    column: str = "text"
    """Column of the data set that holds the text."""
    tokenizer: str = "bpe"
    """bytes, bpe (trained on the training text), or the folder or id of a tokenizer."""
    vocab_size: int = 0
    """Symbols that bpe is trained to, and that any other tokenizer must fit in; 0 takes 2048 for
    bpe and as many as it has for any other."""
    block: int = 128
    """Tokens of context in training."""
    completions: int = 3
    """Held-out prompts to complete at the end."""
    new_tokens: int = 80
    """Tokens of each completion."""
    sampling: Sampling = Sampling(temperature=0.7, top_p=0.95)
    model: ModelConfig = ModelConfig()
    optimizer: AdamWOptions = AdamWOptions(3e-3, warmup=50, b2=0.99, weight_decay=0.1)
    run: Shared = RunOptions(steps=500, batch_size=16, eval_every=250, clip_norm=1.0)


def main(config: Config) -> None:
    corpus = data.load(config.text, config.dataset, config.dataset_config, config.column)
    texts = (document.text for document in corpus.train)
    tokenizer = make_tokenizer(config.tokenizer, texts, config.vocab_size or 2048)
    train = data.Blocks(corpus.train, tokenizer, config.block)
    held_out = data.Blocks(corpus.held_out, tokenizer, config.block)
    run = Run("lm", config, {"corpus": corpus.digest})
    tokenizer.save(run.folder / "tokenizer")

    model, init = build(config.model, tokenizer.vocab)
    trainer = Trainer(
        partial(lm.collate, block=config.block),
        partial(lm.loss, model=model),
        partial(
            lm.predict,
            model=model,
            new_tokens=config.new_tokens,
            sampling=config.sampling,
            end=tokenizer.end,
        ),
        init,
        config.optimizer.build(config.run.total_steps(len(train))),
        run.mesh,
        train[:2],
        options=config.run,
        overrides=run.overrides,
        summarize=lm.summarize,
        folder=run.folder,
        unit="tokens",
        show=("loss", "bits_per_byte"),
    )
    result = trainer.fit(train, held_out, best=("bits_per_byte", "min"))
