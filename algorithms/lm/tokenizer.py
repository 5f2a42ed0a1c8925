"""Text to token ids and back: bytes, byte-level BPE, or any Hugging Face tokenizer.

All three are one class around a `transformers` tokenizer, so that what a run saves also opens with
`AutoTokenizer.from_pretrained`. Text is nothing but text: a document that spells out an end token
is not cut by it, and nothing is truncated, padded or framed by special tokens.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from core.errors import UserError

END = "<|end|>"
NUM_BYTES = 256
DEFAULT_VOCAB = 4096

# A word with the one character before it, up to three digits, punctuation with the white space
# after it, white space. On Python source this gives 2.79 bytes per token at 1,024 symbols and 3.92
# at 4,096 (GPT-2's pattern 2.67 and 3.54, GPT-4's 2.66 and 3.65), because "):", the line end and
# the indentation that follows may become one token.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+\s*|\s+"


@dataclass(frozen=True)
class TextTokenizer:
    """A `transformers` tokenizer, and the id that ends a document."""

    inner: Any
    end: int

    @cached_property
    def vocab(self) -> int:
        """The largest id plus one: some vocabularies have holes."""
        return 1 + max(map(int, self.inner.get_vocab().values()))

    @cached_property
    def _is_bytes(self) -> bool:
        return bool(self.inner.get_vocab() == _byte_symbols() | {END: NUM_BYTES})

    def encode(self, text: str) -> list[int]:
        return list(map(int, self.encode_batch([text])[0]))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The token ids of each text (int32), without any special tokens, on all cores."""
        if self._is_bytes:  # a copy, where the library would take seconds
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
        if self.inner.is_fast:
            encodings = self.inner.backend_tokenizer.encode_batch_fast(
                texts, add_special_tokens=False
            )
            return [np.array(encoding.ids, np.int32) for encoding in encodings]
        plain = dict(add_special_tokens=False, split_special_tokens=True, verbose=False)
        return [np.array(self.inner.encode(text, **plain), np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text, with special tokens spelt out and U+FFFD for bytes that are not UTF-8."""
        return str(self.inner.decode(list(map(int, ids)), clean_up_tokenization_spaces=False))

    def save(self, folder: str | Path) -> None:
        """Writes a folder that `load_tokenizer` and `AutoTokenizer.from_pretrained` open."""
        self.inner.save_pretrained(folder)


def make_tokenizer(name: str, texts: Iterable[str] = (), vocab_size: int = 0) -> TextTokenizer:
    """The tokenizer called `name`: `bytes`, `bpe`, or the folder or Hub id of a trained one.

    Args:
      texts: what `bpe` learns from; the training documents only.
      vocab_size: the ids of `bpe`, with the 256 bytes and the end (a short text may yield fewer),
        and how many any other may have at most; 0 is 4,096, and as many as it has.
    """
    if name == "bpe":
        return _byte_level(models.BPE(), texts, vocab_size or DEFAULT_VOCAB)
    if name == "bytes":
        tokenizer = _byte_level(models.BPE(vocab=_byte_symbols(), merges=[]))
    else:
        tokenizer = load_tokenizer(name)
    if 0 < vocab_size < tokenizer.vocab:
        raise UserError(
            f"tokenizer {name!r} has a vocabulary of {tokenizer.vocab}, larger than the model's of "
            f"--vocab-size {vocab_size}: give at least {tokenizer.vocab}, or 0 for what it needs"
        )
    return tokenizer


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """A saved tokenizer, or any other that `transformers.AutoTokenizer` opens."""
    allowed = "`bytes`, `bpe`, a folder with a saved tokenizer, or a tokenizer's id on the Hub"
    with hugging_face("tokenizer", folder, allowed) as location:
        inner = _transformers().AutoTokenizer.from_pretrained(location)
    ends = (inner.eos_token_id, inner.sep_token_id, inner.bos_token_id)
    end = next((token for token in ends if token is not None), None)
    if end is None:
        raise UserError(
            f"tokenizer {str(folder)!r} has no token that could end a document, and needs an "
            "eos_token, sep_token or bos_token: set one (`tokenizer.eos_token = ...`), save the "
            "tokenizer to a folder and give that folder"
        )
    return _plain(inner, end)


def _byte_level(
    model: models.BPE, texts: Iterable[str] | None = None, vocab_size: int = 0
) -> TextTokenizer:
    """A tokenizer over bytes, with merges learnt from `texts` if there are any, and an end."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if texts is not None:
        if vocab_size <= NUM_BYTES:
            raise UserError(
                f"a BPE vocabulary of {vocab_size} is too small: it holds the 256 bytes and the "
                "end of a document, so give at least 257 (1024, say), or take the tokenizer `bytes`"
            )
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,  # the end comes on top
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
    fast = _transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    return _plain(fast, fast.eos_token_id)


def _byte_symbols() -> dict[str, int]:
    """Each byte by the printable character that stands for it in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(NUM_BYTES + i): byte for i, byte in enumerate(others)}


def _plain(inner: Any, end: int) -> TextTokenizer:
    if inner.is_fast:
        backend = inner.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # as the text that they are
    return TextTokenizer(inner, end)


def _transformers() -> Any:
    # Without this it says at import that PyTorch is missing, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


@contextmanager
def hugging_face(kind: str, given: str | Path, allowed: str) -> Iterator[str]:
    """Yields where to load `given` from; a failure inside becomes one `UserError`.

    The loaders retry for up to a minute without a network, so the Hub is asked once whether it is
    there. If not, they look into their cache only. For a folder the Hub is left alone.
    """
    from huggingface_hub import constants, get_session

    folder = Path(given).expanduser()
    local, silent, before = folder.is_dir(), "", constants.HF_HUB_OFFLINE
    if not local:
        try:
            get_session().head(constants.ENDPOINT, timeout=5)
        except Exception:  # any of the client's errors, or its refusal under HF_HUB_OFFLINE
            silent = (
                "there is no such folder, no copy in the cache, and the Hugging Face Hub does not "
                "answer (no network, or HF_HUB_OFFLINE is set); "
            )
    constants.HF_HUB_OFFLINE = local or bool(silent)
    try:
        yield str(folder if local else given)
    except Exception as error:  # a dozen types, by library and version
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{kind} {str(given)!r} could not be loaded: {silent}give {allowed} "
            f"({reason[:400]}{'...' if len(reason) > 400 else ''})"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before
