import hashlib
import json
import math
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from algorithms.lm import data
from algorithms.lm.data import (
    Blocks,
    Corpus,
    Document,
    completion_prompts,
    compressed_bits_per_byte,
    hub_dataset,
    local_text,
    standard_library,
)
from algorithms.lm.tokenizer import END, load_tokenizer, make_tokenizer
from core.errors import UserError

CODE = "def add(a, b):\n    return a + b  # the sum\n\n\nclass Point:\n    x: int = 0\n" * 20
SOURCE = Path(data.__file__).read_text()


def scalars(count, seed=0):
    """Random text of any Unicode scalar values, the surrogates left out since UTF-8 has none."""
    pick = random.Random(seed)
    values = (
        pick.choice([pick.randrange(0xD800), pick.randrange(0xE000, 0x110000)])
        for _ in range(count)
    )
    return "".join(map(chr, values))


NASTY = [
    "",
    " ",
    "\n",
    "\r\n\t \r \x0b\x0c\n\n   x  \n",
    "  leading, trailing , and double  spaces  ",
    "a . b , c ! n't 's",  # what a clean-up of spaces would eat
    f"{END} before, within {END}and after{END}",
    "<s></s><pad><unk><|endoftext|>[SEP]",
    "\ufeffbyte order mark, nul \0, \x7f \x85 \u2028 \u2029 \xa0 \u200b",
    "e\u0301 is not \xe9, \ufb01 is not fi, \u212b is not \xc5",
    "\U0001f926\U0001f3fd\u200d\u2642\ufe0f \U0010ffff \ufffd",
    "日本語のテキスト здравствуй مرحبا नमस्ते",
    "_" * 300 + "1234567" * 40 + "(" * 100,
    scalars(3000),
]


@pytest.fixture(scope="module")
def bpe():
    return make_tokenizer("bpe", [SOURCE], 300)


@pytest.fixture(scope="module")
def words_folder(tmp_path_factory):
    """A lossy word tokenizer with an end but no pad token, truncating to 3 tokens and framing."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # Id 7 belongs to no word: the vocabulary has a hole.
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5, "d": 6, "e": 8}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    words.enable_truncation(3)
    folder = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def hub_off(monkeypatch, tmp_path):
    """No network, and the caches of `datasets` in the test's own folder."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def documents(*texts):
    return [Document(f"{i}.txt", text) for i, text in enumerate(texts)]


def names(part):
    return {document.name for document in part}


# Tokenizers


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_decode_inverts_encode_for_any_text(kind, text, bpe):
    tokenizer = bpe if kind == "bpe" else make_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end not in ids
    assert all(0 <= i < tokenizer.vocab for i in ids)


def test_ids_of_bytes_are_the_bytes_also_by_the_library():
    tokenizer = make_tokenizer("bytes")
    assert (tokenizer.vocab, tokenizer.end) == (257, 256)
    for text in NASTY:
        assert tokenizer.encode(text) == list(text.encode())
        library = tokenizer.inner.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert library == list(text.encode())
    assert tokenizer.decode([104, 105, 0xC3, tokenizer.end]) == f"hi\ufffd{END}"


def test_bpe_has_the_size_asked_for_its_end_last_and_is_the_same_each_time(bpe):
    assert bpe.vocab == 300 and bpe.end == 299
    assert len(bpe.encode(SOURCE)) < len(SOURCE) / 1.4
    assert bpe.inner.get_vocab() == make_tokenizer("bpe", [SOURCE], 300).inner.get_vocab()


def test_bpe_of_a_short_text_is_smaller_and_says_so():
    tokenizer = make_tokenizer("bpe", ["ab ab"], 5000)
    assert 257 < tokenizer.vocab < 270 and tokenizer.end == tokenizer.vocab - 1


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_a_saved_tokenizer_loads_as_the_same(kind, bpe, words_folder, tmp_path):
    kinds = {"bytes": lambda: make_tokenizer("bytes"), "bpe": lambda: bpe}
    first = kinds.get(kind, lambda: make_tokenizer(str(words_folder)))()
    first.save(tmp_path / "saved")
    second = load_tokenizer(tmp_path / "saved")
    assert (first.vocab, first.end) == (second.vocab, second.end)
    for text in [*NASTY, "a b c"]:
        ids = first.encode(text)
        assert second.encode(text) == ids and second.decode(ids) == first.decode(ids)


def test_a_tokenizer_without_pad_token_works_and_neither_truncates_nor_frames(words_folder):
    tokenizer = make_tokenizer(str(words_folder))
    assert tokenizer.inner.pad_token_id is None
    assert (tokenizer.vocab, tokenizer.end) == (9, 2)
    assert tokenizer.encode("a b c d a") == [3, 4, 5, 6, 3]
    assert tokenizer.encode("a") == [3]
    assert tokenizer.end not in tokenizer.encode("a </s> b")


@pytest.mark.parametrize("roles, end", [({"sep_token": "d"}, 6), ({"bos_token": "<s>"}, 1)])
def test_the_end_is_sep_or_bos_where_there_is_no_eos(roles, end, words_folder, tmp_path):
    from transformers import PreTrainedTokenizerFast

    file = str(words_folder / "tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file, **roles).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).end == end


def test_a_tokenizer_in_python_works(tmp_path):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.inner.is_fast
    assert tokenizer.decode(tokenizer.encode("Zoë </s> x")) == "Zoë </s> x"
    assert tokenizer.end not in tokenizer.encode("Zoë </s> x")


# Blocks


def by_hand(texts, tokenizer, block):
    """The rule in Blocks' docstring, one token at a time."""
    stream, share = [tokenizer.end], []
    for text in texts:
        ids = [*tokenizer.encode(text), tokenizer.end]
        for token in ids:
            stream.append(token)
            share.append(len(text.encode()) / len(ids))
    blocks, at = [], 0
    while at < len(share):
        blocks.append((stream[at : at + block + 1], share[at : at + block]))
        at += block
    return blocks


TEXTS = ["The first.\n", "", "é日🙂" * 5, "x", CODE[:200], "last"]


@pytest.mark.parametrize("block", [1, 2, 7, 16, 64, 10_000])
@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_blocks_equal_packing_by_hand(kind, block, bpe, words_folder):
    tokenizer = (
        bpe if kind == "bpe" else make_tokenizer("bytes" if kind == "bytes" else words_folder)
    )
    blocks = Blocks(documents(*TEXTS), tokenizer, block)
    expected = by_hand(TEXTS, tokenizer, block)
    assert len(blocks) == len(expected)
    for got, (tokens, share) in zip(blocks, expected, strict=True):
        assert got["tokens"].dtype == np.int32 and got["bytes"].dtype == np.float32
        assert got["tokens"].tolist() == tokens
        np.testing.assert_allclose(got["bytes"], share, rtol=1e-6)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_each_token_and_each_end_is_predicted_once_and_bytes_add_up(kind, bpe, words_folder):
    tokenizer = (
        bpe if kind == "bpe" else make_tokenizer("bytes" if kind == "bytes" else words_folder)
    )
    blocks = Blocks(documents(*TEXTS), tokenizer, 7)
    targets = [token for block in blocks for token in block["tokens"][1:].tolist()]
    assert targets == [t for text in TEXTS for t in [*tokenizer.encode(text), tokenizer.end]]
    assert len(targets) == blocks.num_tokens
    assert blocks.num_bytes == sum(len(text.encode()) for text in TEXTS)
    total = sum(block["bytes"].sum(dtype=float) for block in blocks)
    assert math.isclose(total, blocks.num_bytes, rel_tol=1e-6)


def test_blocks_overlap_by_one_token_and_index_like_a_list():
    blocks = Blocks(documents(*TEXTS), make_tokenizer("bytes"), 16)
    for before, after in zip(blocks, list(blocks)[1:], strict=False):
        assert before["tokens"][-1] == after["tokens"][0] and len(before["tokens"]) == 17
    assert len(blocks[-1]["tokens"]) == len(blocks[-1]["bytes"]) + 1 <= 17
    np.testing.assert_array_equal(blocks[-1]["tokens"], blocks[len(blocks) - 1]["tokens"])
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_a_uniform_model_over_bytes_costs_log2_of_the_vocabulary_per_byte_and_end():
    blocks = Blocks(documents("abc", "defg"), make_tokenizer("bytes"), 4)
    loss = sum(len(block["bytes"]) for block in blocks) * math.log(257)
    bits = loss / math.log(2) / sum(block["bytes"].sum() for block in blocks)
    assert math.isclose(bits, math.log2(257) * 9 / 7, rel_tol=1e-6)  # 7 bytes and 2 ends


def test_no_documents_give_no_blocks():
    blocks = Blocks([], make_tokenizer("bytes"), 4)
    assert (len(blocks), list(blocks), blocks.num_tokens, blocks.num_bytes) == (0, [], 0, 0)


def test_many_documents_are_all_packed():
    texts = [f"{i} " * (i % 5) for i in range(1000)]
    blocks = Blocks(documents(*texts), make_tokenizer("bytes"), 50)
    stream = b"".join(bytes(b["tokens"][1:][b["tokens"][1:] < 256].tolist()) for b in blocks)
    assert stream == "".join(texts).encode()


# Corpora


@pytest.fixture(scope="module")
def library():
    return standard_library()


def test_the_standard_library_is_its_source_without_tests(library):
    everything = names(library.train) | names(library.held_out)
    assert {"argparse.py", "json/decoder.py", "unittest/mock.py"} <= everything
    assert not any("test" in name.split("/")[:-1] or "site-packages" in name for name in everything)
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes().decode()
    texts = {document.name: document.text for document in library.train + library.held_out}
    assert texts["argparse.py"] == source
    assert 5e6 < sum(len(text) for text in texts.values()) < 20e6
    assert 0.02 < len(library.held_out) / len(everything) < 0.09


def test_the_standard_library_is_the_same_each_time_and_its_parts_share_nothing(library):
    assert standard_library() == library and standard_library().digest == library.digest
    assert list(library.train) == sorted(library.train)
    assert not names(library.train) & names(library.held_out)
    assert not {d.text for d in library.train} & {d.text for d in library.held_out}


def test_the_digest_sees_names_texts_and_parts():
    a, b, c = documents("one", "two", "three")
    corpora = [
        Corpus([a, b], [c]),
        Corpus([a], [b, c]),
        Corpus([b, a], [c]),
        Corpus([a, Document("1.txt", "tw")], [c]),
        Corpus([a, Document("1.txtt", "wo")], [c]),
        Corpus([Document("0.tx", "tone"), b], [c]),
    ]
    assert len({corpus.digest for corpus in corpora}) == len(corpora)
    assert Corpus([a, b], [c]).digest == corpora[0].digest
    assert len(corpora[0].digest) == len(hashlib.sha256().hexdigest())


@pytest.fixture
def many(tmp_path):
    folder = tmp_path / "many"
    for i in range(60):
        path = folder / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {i}\n" * 3)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    return folder


def test_files_are_held_out_by_path_whatever_their_order_and_place(many, monkeypatch):
    corpus = local_text([str(many)])
    assert len(corpus.train) + len(corpus.held_out) == 60
    assert 1 <= len(corpus.held_out) <= 10
    parts = [str(many / f"part{i}") for i in (2, 0, 1)]
    assert local_text(parts).digest == corpus.digest
    assert local_text([str(many / "**" / "*.txt"), parts[0]]).digest == corpus.digest
    monkeypatch.chdir(many)
    assert local_text(["part?"]).digest == corpus.digest
    many.rename(many.with_name("moved"))
    assert local_text([str(many.with_name("moved"))]).digest == corpus.digest


def test_one_more_file_moves_no_other_to_the_other_part(many):
    before = local_text([str(many)])
    (many / "part0" / "new.txt").write_text("new")
    after = local_text([str(many)])
    assert names(before.train) <= names(after.train)
    assert names(before.held_out) <= names(after.held_out)


def test_a_copy_of_a_held_out_file_is_not_trained_on(many):
    held_out = local_text([str(many)]).held_out[0]
    copies = [many / f"copy{i}.txt" for i in range(5)]
    for copy in copies:
        copy.write_text(held_out.text)
    assert held_out.text not in {document.text for document in local_text([str(many)]).train}


def test_a_single_text_is_held_out_by_its_end_cut_at_a_line(tmp_path):
    text = "".join(f"line {i}\r\n" for i in range(1000))
    (tmp_path / "poem.txt").write_bytes(text.encode())
    corpus = local_text([str(tmp_path / "poem.txt")])
    (train,), (held_out,) = corpus.train, corpus.held_out
    assert train.text + held_out.text == text and train.text.endswith("\r\n")
    assert 0.05 <= len(held_out.text) / len(text) < 0.06
    assert names(corpus.train) == {"poem.txt"}


def test_of_a_few_texts_each_gives_its_end(tmp_path):
    for name in ("large", "small"):
        (tmp_path / name).write_text(f"{name}\n" * (1000 if name == "large" else 40))
    corpus = local_text([str(tmp_path)])
    assert len(corpus.train) == len(corpus.held_out) == 2
    assert sum(len(d.text) for d in corpus.train) > 0.9 * (6000 + 240)


ROWS = [f"row {i} of the set" for i in range(80)]


def write_rows(folder, form, rows=ROWS, file="train"):
    from datasets import Dataset

    folder.mkdir(exist_ok=True)
    rows = Dataset.from_dict({"id": list(range(len(rows))), "text": list(rows)})
    write = {"json": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[form]
    write(folder / f"{file}.{form}")


@pytest.mark.parametrize("form", ["json", "csv", "parquet"])
def test_a_folder_of_rows_is_held_out_by_text(form, hub_off, tmp_path):
    write_rows(tmp_path / "rows", form)
    corpus = hub_dataset(str(tmp_path / "rows"))
    texts = [{d.text for d in part} for part in (corpus.train, corpus.held_out)]
    assert texts[0] | texts[1] == set(ROWS) and not texts[0] & texts[1]
    write_rows(tmp_path / "turned", form, ROWS[::-1])
    turned = hub_dataset(str(tmp_path / "turned"))
    assert {d.text for d in turned.held_out} == texts[1]


def test_a_validation_split_is_the_held_out_part_and_empty_rows_go(hub_off, tmp_path):
    write_rows(tmp_path / "rows", "json", ["a", "", "b", None])
    write_rows(tmp_path / "rows", "json", ["c", "d", ""], "validation")
    write_rows(tmp_path / "rows", "json", ["e"], "test")
    corpus = hub_dataset(str(tmp_path / "rows"))
    assert [d.text for d in corpus.train] == ["a", "b"]
    assert [d.text for d in corpus.held_out] == ["c", "d"]


def test_what_save_to_disk_wrote_loads(hub_off, tmp_path):
    from datasets import Dataset, DatasetDict

    rows, few = Dataset.from_dict({"body": ROWS}), Dataset.from_dict({"body": ROWS[:2]})
    rows.select(range(40)).save_to_disk(tmp_path / "one")
    DatasetDict(train=rows, test=few).save_to_disk(tmp_path / "two")
    one, two = (hub_dataset(str(tmp_path / name), column="body") for name in ("one", "two"))
    assert len(one.train) + len(one.held_out) == 40
    assert [d.text for d in two.held_out] == ROWS[:2] and len(two.train) == 80


# Figures and prompts


def test_compressors_are_measured_on_the_bytes_of_all_documents():
    noise = random.Random(0).randbytes(20_000).hex()  # 4 bits of news in each byte of 8
    bits = compressed_bits_per_byte(documents(noise[:10_000], noise[10_000:]))
    assert set(bits) == {"gzip -9", "xz -9"}
    assert all(4 < value < 4.7 for value in bits.values())
    assert all(value < 0.1 for value in compressed_bits_per_byte(documents("ab" * 20_000)).values())


def test_prompts_start_at_definitions_and_continue_as_the_document_does(library):
    pairs = completion_prompts(library.held_out, 8)
    assert pairs == completion_prompts(library.held_out[::-1], 8) and len(set(pairs)) == 8
    for prompt, continuation in pairs:
        assert prompt.startswith(("def ", "class ", "async def "))
        assert 20 < len(prompt) <= 120 and len(prompt + continuation) == 480
        assert prompt[-1].isidentifier() or prompt[-1].isdigit()
        assert not (continuation[0].isalnum() or continuation[0] == "_")
        assert any(prompt + continuation in d.text for d in library.held_out)


def test_prompts_of_prose_start_at_lines_in_as_many_documents_as_there_are():
    texts = ["".join(f"{word} line {i} goes on and on\n" for i in range(90)) for word in "ABC"]
    pairs = completion_prompts(documents(*texts), 3)
    assert {prompt[0] for prompt, _ in pairs} == set("ABC")
    assert len(completion_prompts(documents(*texts), 7)) == 7
    indented = completion_prompts(documents(" Robert Boulter is an English film actor .\n"), 1)
    assert indented == [(" Robert Boulter is an", " English film actor .\n")]


def test_short_or_few_documents_give_what_there_is():
    assert completion_prompts(documents("one two three four"), 4) == [("one two", " three four")]
    assert completion_prompts(documents("", "\n"), 4) == []


# Errors: what was given, what is allowed, what to change


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("café\n".encode("latin1"))
    (tmp_path / "binary.bin").write_bytes(b"a\0b\n")
    with pytest.raises(UserError, match=r"text 'no/such\*' does not exist.*a file, a folder or"):
        local_text(["no/such*"])
    with pytest.raises(UserError, match=r"latin\.txt' cannot be read as text .*UTF-8.*iconv"):
        local_text([str(tmp_path / "latin.txt")])
    with pytest.raises(UserError, match=r"binary\.bin' cannot be read as text \(it has zero bytes"):
        local_text([str(tmp_path / "*.bin")])


def test_text_that_is_empty_or_a_single_line_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "line.txt").write_text("a single line\n")
    (tmp_path / "folder").mkdir()
    for nothing in (str(tmp_path / "empty.txt"), str(tmp_path / "folder")):
        with pytest.raises(UserError, match="has no text to train on"):
            local_text([nothing])
    with pytest.raises(UserError, match=r"line\.txt' leaves no text to hold out.*more than one"):
        local_text([str(tmp_path / "line.txt")])


def test_a_python_without_its_source_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match="the standard library in .* has no text to train on"):
        standard_library()


def test_wrong_columns_splits_and_rows_are_named(hub_off, tmp_path):
    from datasets import Dataset, DatasetDict

    write_rows(tmp_path / "rows", "json")
    rows = str(tmp_path / "rows")
    with pytest.raises(UserError, match=r"no column 'body'.*columns \['id', 'text'\]"):
        hub_dataset(rows, column="body")
    with pytest.raises(UserError, match=r"'id' of .* holds int values.*columns \['id', 'text'\]"):
        hub_dataset(rows, column="id")
    DatasetDict(other=Dataset.from_dict({"text": ROWS})).save_to_disk(tmp_path / "other")
    with pytest.raises(UserError, match=r"no split 'train', only \['other'\]"):
        hub_dataset(str(tmp_path / "other"))
    write_rows(tmp_path / "blank", "json", ["", ""])
    with pytest.raises(UserError, match="has no text to train on"):
        hub_dataset(str(tmp_path / "blank"))
    write_rows(tmp_path / "single", "json", ["the only row"])
    with pytest.raises(UserError, match="none beside what is held out: give more documents"):
        hub_dataset(str(tmp_path / "single"))
    write_rows(tmp_path / "unmeasured", "json", ["a", "b"])
    write_rows(tmp_path / "unmeasured", "json", [""], "validation")
    with pytest.raises(UserError, match="leaves no text to hold out .*validation split"):
        hub_dataset(str(tmp_path / "unmeasured"))


def test_a_data_set_that_is_not_there_is_said_at_once(hub_off, tmp_path):
    with pytest.raises(
        UserError, match=r"data set 'no/set' could not be loaded: .*no network"
    ) as e:
        hub_dataset("no/set", "config")
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="could not be loaded: give an id on the Hub or a folder"):
        hub_dataset(str(tmp_path))


def test_a_missing_network_costs_no_retries_and_changes_no_setting(monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    class Unplugged:
        calls = 0

        def head(self, url, timeout):
            Unplugged.calls += 1
            raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "get_session", Unplugged)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=r"tokenizer 'no/tokenizer' could not be loaded: .*`bpe`"):
        make_tokenizer("no/tokenizer")
    assert Unplugged.calls == 1 and constants.HF_HUB_OFFLINE is False


def test_folders_that_hold_no_tokenizer_or_one_without_an_end_are_said(words_folder, tmp_path):
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="could not be loaded: give `bytes`, `bpe`, a folder"):
        load_tokenizer(tmp_path)
    file = str(words_folder / "tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file).save_pretrained(tmp_path / "endless")
    with pytest.raises(UserError, match=r"no token that could end a document.*eos_token"):
        load_tokenizer(tmp_path / "endless")


@pytest.mark.parametrize("size", [-1, 256])
def test_a_vocabulary_without_room_for_bytes_and_end_is_refused(size):
    with pytest.raises(UserError, match=f"vocabulary of {size} is too small.* at least 257"):
        make_tokenizer("bpe", [CODE], size)
    assert make_tokenizer("bpe", [CODE], 257).vocab == 257


def test_blocks_of_no_tokens_are_refused():
    with pytest.raises(UserError, match="blocks of 0 tokens cannot be: give 1 or more"):
        Blocks(documents("a"), make_tokenizer("bytes"), 0)
