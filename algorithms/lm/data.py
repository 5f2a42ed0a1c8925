"""Documents to blocks of tokens: what is trained on, what is held out, and how it is measured.

A corpus is two lists of documents. `Blocks` packs one of them so that each token of each document,
and its end, is predicted exactly once, and says how many bytes of text a prediction stands for.
Bits per byte, which no choice of tokenizer can flatter, are then sum(loss) / ln 2 / sum(bytes).
"""

import glob
import gzip
import hashlib
import heapq
import lzma
import os
import re
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.errors import UserError

from .tokenizer import TextTokenizer, hugging_face

HELD_OUT = 0.05  # of the documents or, where these are few, of each document's text
FEW = 20  # below this, a twentieth of the documents is none

# Folders beside the library's source that are not it: tests, other packages and what scripts wrote.
# The code pages of `encodings` are copies of each other but for a few lines: held-out ones would
# measure memory. `pydoc_data` is one file of English, and would be most of the held-out part.
NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
NOT_SOURCE |= {"encodings", "pydoc_data"}

DEFINITION = re.compile(r"^(?:async def|def|class) \w+\s*[(:\[]", re.MULTILINE)
LINE = re.compile(r"^[ \t]*\w", re.MULTILINE)
WHOLE_WORDS = re.compile(r".*\w(?=\W)", re.DOTALL)


class Document(NamedTuple):
    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    train: list[Document]
    held_out: list[Document]

    @cached_property
    def digest(self) -> str:
        """The sha256 of all names and texts, and of which part they are in."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(b"%d documents\n" % len(part))
            for data in (_utf8(field) for document in part for field in document):
                digest.update(b"%d bytes\n" % len(data) + data)
        return digest.hexdigest()


def load_corpus(text: Sequence[str], dataset: str, config: str, column: str) -> Corpus:
    """What the options of the script name; by default the standard library."""
    if text and dataset:
        raise UserError("--text and --dataset are two sources of text: give one of them.")
    if dataset:
        return hub_dataset(dataset, config, column)
    return local_text(text) if text else standard_library()


def standard_library() -> Corpus:
    """The source of the running Python's own standard library, about 10 MB in 600 files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in _walk(root, lambda name: name in NOT_SOURCE or name.startswith("config-"))
        # Like config-*, _sysconfigdata* tells of the machine that Python was built on.
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]
    return _corpus(*_hold_out(_read(files, root), "name"), f"the standard library in {str(root)!r}")


def local_text(paths: Sequence[str]) -> Corpus:
    """Files, folders and globs of UTF-8 text; hidden and binary files inside folders are left out.

    Of 20 files or more, some are held out by a hash of their path below the folder that holds them
    all. Of fewer, the last lines of each are: a single file may well be most of the text.
    """
    files: set[Path] = set()
    explicit: set[Path] = set()
    for given in paths:
        pattern = os.path.expanduser(given)
        found = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not found:
            raise UserError(
                f"text {given!r} does not exist (seen from {os.getcwd()!r}): give a file, a folder "
                "or, in quotes, a glob such as 'notes/**/*.md'"
            )
        for path in (Path(os.path.abspath(match)) for match in found):
            if path.is_dir():
                files.update(_walk(path, lambda name: name.startswith(".")))
            else:
                explicit.add(path)
    files |= explicit
    root = Path(os.path.commonpath([path.parent for path in files])) if files else Path()
    documents = _read(files, root, explicit)
    parts = _hold_out_ends(documents) if len(documents) < FEW else _hold_out(documents, "name")
    return _corpus(*parts, f"text {', '.join(map(repr, paths))}")


def hub_dataset(name: str, config: str = "", column: str = "text") -> Corpus:
    """A data set of the Hugging Face Hub or a local folder of one: each row is a document.

    Its own validation split (or else test split) is held out; without one, rows are, by a hash of
    their text. Empty rows are left out.
    """
    import datasets

    given = f"data set {name!r}" + (f" ({config})" if config else "")
    allowed = "an id on the Hub or a folder (json, csv, parquet, text, or what save_to_disk wrote)"
    with hugging_face("data set", name, f"{allowed}, with one of its configurations") as location:
        if any(Path(location, f).exists() for f in ("state.json", "dataset_dict.json")):
            data = datasets.load_from_disk(location)
        else:
            data = datasets.load_dataset(location, config or None)
    splits = data if isinstance(data, dict) else {"train": data}
    if "train" not in splits:
        raise UserError(
            f"{given} has no split 'train', only {list(splits)}: give a data set that has one"
        )
    validation = next((s for s in ("validation", "valid", "dev", "test") if s in splits), None)
    train = _rows(splits["train"], "train", column, given)
    if validation is None:
        return _corpus(*_hold_out(train, "text"), given)
    return _corpus(train, _rows(splits[validation], validation, column, given), given)


class Blocks(Sequence[dict[str, np.ndarray]]):
    """Documents as blocks of `block` predictions, the last one shorter, over flat arrays.

    The stream is end, document, end, document, end, ... Block i predicts what stands in it at
    1 + i * block to (i + 1) * block, each token from those before it in the block, and so holds
    {"tokens": int32 [block + 1], "bytes": float32 [block]}. `bytes` spreads the UTF-8 bytes of a
    document evenly over its tokens and its end: they add up for any tokenizer, a lossy one too.
    """

    def __init__(self, documents: Sequence[Document], tokenizer: TextTokenizer, block: int):
        if block < 1:
            raise UserError(f"blocks of {block} tokens cannot be: give 1 or more, such as 256")
        dtype = np.uint16 if tokenizer.vocab <= 2**16 else np.int32
        end = np.array([tokenizer.end], dtype)
        stream, counts, sizes = [end], [], []
        for i in range(0, len(documents), 256):  # few at once: encodings are large
            texts = [document.text for document in documents[i : i + 256]]
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                stream += [ids.astype(dtype), end]
                counts.append(len(ids) + 1)
                sizes.append(len(_utf8(text)))
        self.block, self.num_bytes, self.num_tokens = block, sum(sizes), sum(counts)
        self._stream = np.concatenate(stream)  # [num_tokens + 1]
        self._ends = np.cumsum(counts)  # of each document, in predictions
        self._density = np.divide(sizes, counts, dtype=np.float32)  # bytes per prediction

    def __len__(self) -> int:
        return -(-self.num_tokens // self.block)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:  # type: ignore[override]
        start = range(0, self.num_tokens, self.block)[index]
        stop = min(start + self.block, self.num_tokens)
        document = np.searchsorted(self._ends, np.arange(start, stop), side="right")
        tokens = self._stream[start : stop + 1].astype(np.int32)
        return {"tokens": tokens, "bytes": self._density[document]}


def compressed_bits_per_byte(documents: Iterable[Document]) -> dict[str, float]:
    """What general compressors make of the same text, in bits per byte."""
    data = b"".join(_utf8(document.text) for document in documents)
    sizes = {"gzip -9": gzip.compress(data, 9), "xz -9": lzma.compress(data, preset=9)}
    return {name: 8 * len(packed) / len(data) for name, packed in sizes.items()}


def completion_prompts(
    documents: Iterable[Document], n: int, prompt: int = 120, continuation: int = 360
) -> list[tuple[str, str]]:
    """Up to `n` pairs of a prompt and what follows it, of at most so many characters.

    They start at a function or class, or at any line if there are too few, and are drawn by a hash:
    one from each document before a second from any, short ones last. A prompt ends after a whole
    word, where any tokenizer ends a token as well.
    """
    size = prompt + continuation
    drawn = []
    for name, text in documents:
        matches = list(DEFINITION.finditer(text))
        prose = not matches
        starts = sorted(
            (_hash(f"{name}:{m.start()}"), m.start()) for m in matches or LINE.finditer(text)
        )
        for turn, (order, start) in enumerate(starts[:n]):
            short = len(text) - start < size
            drawn.append((prose, short, turn, order, text[start : start + size]))
    pairs = []
    for *_, passage in heapq.nsmallest(n, drawn):
        most = max(1, min(prompt, len(passage) // 2))
        words = WHOLE_WORDS.match(passage[: most + 1])
        cut = words.end() if words else most
        pairs.append((passage[:cut], passage[cut:]))
    return pairs


def _corpus(train: list[Document], held_out: list[Document], source: str) -> Corpus:
    corpus = Corpus([d for d in train if d.text], [d for d in held_out if d.text])
    if not corpus.train:
        raise UserError(
            f"{source} has no text to train on, or none beside what is held out: give more "
            "documents or lines of UTF-8 text"
        )
    if not corpus.held_out:
        raise UserError(
            f"{source} leaves no text to hold out for evaluation: give more than one document or "
            "line of text, or a data set whose validation split is not empty"
        )
    return corpus


def _hold_out(documents: list[Document], by: str) -> tuple[list[Document], list[Document]]:
    """Holds out low hashes of the name or text, the lowest at least, and trains on no copy."""
    hashes = {document: _hash(getattr(document, by)) for document in documents if document.text}
    limit = max(HELD_OUT, min(hashes.values(), default=0))
    held_out = [document for document, value in hashes.items() if value <= limit]
    seen = {document.text for document in held_out}
    return [document for document in documents if document.text not in seen], held_out


def _hold_out_ends(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    train, held_out = [], []
    for name, text in documents:
        cut = text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1 or len(text)
        train.append(Document(name, text[:cut]))
        held_out.append(Document(f"{name} (end)", text[cut:]))
    return train, held_out


def _read(files: Iterable[Path], root: Path, explicit: Collection[Path] = ()) -> list[Document]:
    """The text files among `files`, in the order of their names; `explicit` ones have to be."""
    documents = []
    for path in files:
        try:
            text = path.read_bytes().decode()  # bytes, so that line ends stay as they are
            if "\0" in text:
                raise ValueError("it has zero bytes, as binary files do")
        except (OSError, ValueError) as error:
            if path in explicit:
                raise UserError(
                    f"file {str(path)!r} cannot be read as text ({error}): give UTF-8 text, and "
                    "convert what is not, for instance with `iconv -f latin1 -t utf-8`"
                ) from error
        else:
            documents.append(Document(path.relative_to(root).as_posix(), text))
    return sorted(documents)


def _rows(rows: Any, split: str, column: str, given: str) -> list[Document]:
    if column not in rows.column_names:
        raise UserError(
            f"{given} has no column {column!r} in its split {split!r}: give one of its columns "
            f"{rows.column_names}"
        )
    texts = rows.select_columns([column])[:][column]
    wrong = next((text for text in texts if not isinstance(text, str | None)), None)
    if wrong is not None:
        raise UserError(
            f"column {column!r} of {given} holds {type(wrong).__name__} values and has to hold "
            f"text: give another of its columns {rows.column_names}"
        )
    return [Document(f"{split}/{i}", text) for i, text in enumerate(texts) if text]


def _walk(root: Path, skip: Callable[[str], bool]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not skip(name)]
        yield from (Path(folder, name) for name in names if not skip(name))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")  # names of files may be any bytes


def _hash(key: str) -> float:
    """A number in [0, 1) that depends on nothing but `key`."""
    return int.from_bytes(hashlib.sha256(_utf8(key)).digest()[:6]) / 2**48
