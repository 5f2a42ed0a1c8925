"""Trains a language model, by default on the source of Python's own standard library.

python -m algorithms.lm.train
"""

import dataclasses
from functools import partial

from core import Trainer
from core.decode import Sampling
from core.errors import at_least
from core.optimizer import AdamWOptions
from core.run import Run, RunOptions, Shared, launch

from . import lm
from .data import Blocks, completion_prompts, compressed_bits_per_byte, load_corpus
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
    """Symbols that bpe is trained to and that any tokenizer must fit in; 0 is 4096 for bpe, and as
    many as it has for any other."""
    pad_vocab: int = 0
    """Rows of embedding and head, where the devices along tensor do not divide the vocabulary; 0 is
    as many as that."""
    block: int = 128
    """Tokens of context in training."""
    completions: int = 3
    """Held-out prompts to complete at the end."""
    new_tokens: int = 64
    """Tokens of each completion."""
    sampling: Sampling = Sampling(temperature=0.5, top_p=0.95)
    model: ModelConfig = ModelConfig()
    optimizer: AdamWOptions = AdamWOptions(1e-2, warmup=30, b2=0.99, weight_decay=0.1)
    run: Shared = RunOptions(steps=600, batch_size=16, eval_every=150, clip_norm=1.0)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "pad_vocab", "completions"):
            at_least(self, name, 0)
        for name in ("block", "new_tokens"):
            at_least(self, name, 1)


def main(config: Config) -> None:
    corpus = load_corpus(config.text, config.dataset, config.dataset_config, config.column)
    texts = (document.text for document in corpus.train)
    tokenizer = make_tokenizer(config.tokenizer, texts, config.vocab_size)
    train, held_out = (Blocks(d, tokenizer, config.block) for d in (corpus.train, corpus.held_out))
    run = Run("lm", config, {"corpus": corpus.digest})
    run.save("tokenizer", tokenizer.save)

    model, init = build(config.model, tokenizer.vocab, config.pad_vocab)
    trainer = Trainer(
        partial(lm.collate, block=config.block),
        partial(lm.loss, model=model),
        partial(
            lm.predict,
            model=model,
            length=config.new_tokens,
            sampling=config.sampling,
            end=tokenizer.end,
        ),
        init,
        config.optimizer.build(config.run.total_steps(len(train))),
        run.mesh,
        [train[0]],
        options=config.run,
        overrides=run.overrides,
        summarize=lm.summarize,
        folder=run.folder,
        unit="tokens",
        show=("loss", "bits_per_byte"),
    )
    result = trainer.fit(train, held_out, best=("loss", "min"))

    pairs = completion_prompts(corpus.held_out, config.completions)
    prompts = [{"tokens": [tokenizer.end, *tokenizer.encode(prompt)]} for prompt, _ in pairs]
    for (prompt, _), tokens in zip(pairs, trainer.predict(prompts), strict=True):
        run.say(f"--- {prompt}|{tokenizer.decode(tokens)}")
    compressors = compressed_bits_per_byte(corpus.held_out)
    bits = {"this model": result["valid"]["bits_per_byte"]} | compressors
    run.say("held-out bits per byte: " + ", ".join(f"{k} {v:.3f}" for k, v in bits.items()))
    run.finish(result | {"compressors": compressors})


if __name__ == "__main__":
    launch(Config, main)
