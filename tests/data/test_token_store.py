"""Hold-out against its definition, and a cache that survives accidents."""

import errno
import itertools
import json
import os
import shutil

import numpy as np
import pytest

from memtrain.command import BadInput
from memtrain.data import token_store
from memtrain.data.corpus import CorpusReport
from memtrain.data.packing import PackedRows
from memtrain.data.token_store import cached_folder, held_out_share, tokenize_split


def split_texts(texts, tokenizer, eval_fraction, cache_dir):
    """(training texts, held-out texts, split)"""
    def documents(report):
        for text in texts:
            report.documents += 1
            yield text

    split = tokenize_split(documents, tokenizer, eval_fraction, str(cache_dir), ["test", list(texts)])
    parts = []
    for tokens in (split.train, split.evaluation):
        found = [tokens.ids[a:b].tolist() for a, b in itertools.pairwise(tokens.offsets.tolist())]
        assert all(ids[0] == 0 and ids[-1] == 1 for ids in found)
        parts.append([tokenizer.decode(ids[1:-1]) for ids in found])
        assert tokens.text_bytes == sum(len(text.encode()) for text in parts[-1])
    return *parts, split


# ---- hold-out -------------------------------------------------------------------------------------------------------

def test_hold_out_is_by_text_and_not_by_order(tokenizer, tmp_path):
    texts = [f"text number {i}" for i in range(200)] + ["text number 3"] * 2
    train, held_out, _ = split_texts(texts, tokenizer, 0.1, tmp_path)
    assert held_out == [t for t in texts if held_out_share(t) < 0.1]
    assert train == [t for t in texts if t not in held_out]
    assert 8 <= len(held_out) <= 35 and not set(train) & set(held_out)
    reversed_train, reversed_held_out, _ = split_texts(texts[::-1], tokenizer, 0.1, tmp_path)
    assert reversed_train == train[::-1] and reversed_held_out == held_out[::-1]


def test_share_is_uniform():
    shares = np.array([held_out_share(str(i)) for i in range(4000)])
    assert shares.min() >= 0 and shares.max() < 1
    counts = np.histogram(shares, bins=10, range=(0, 1))[0]
    assert np.abs(counts - 400).max() < 5 * 20, counts


def test_something_is_held_out_of_a_small_corpus(tokenizer, tmp_path):
    texts = ["one", "two", "three", "two", "four"]
    least = min(texts, key=held_out_share)
    train, held_out, split = split_texts(texts, tokenizer, 1e-9, tmp_path)
    assert set(held_out) == {least} and train == [t for t in texts if t != least] and len(train) + len(held_out) == 5
    assert split.report.documents == 5, "documents are counted once though read twice"
    assert split_texts(texts, tokenizer, 0.0, tmp_path)[:2] == (texts, [])


@pytest.mark.parametrize(("text", "eval_fraction", "cut"), [
    ("a\n" * 50, 0.1, 90), ("first line\nsecond line\nlast", 0.01, 23), ("x" * 100, 0.25, 75),
    ("five words are here now.\n", 0.01, 12), ("ab", 0.9, 1)])
def test_a_single_document_gives_its_end(tokenizer, tmp_path, text, eval_fraction, cut):
    train, held_out, _ = split_texts([text], tokenizer, eval_fraction, tmp_path)
    assert (train, held_out) == ([text[:cut]], [text[cut:]])


def test_nothing_left_to_train_on_is_refused(tokenizer, tmp_path):
    for texts, words in ((["same", "same"], "holds out all 2"), (["x"], "too short to hold out")):
        with pytest.raises(BadInput, match=words):
            split_texts(texts, tokenizer, 0.5, tmp_path)
    assert os.listdir(tmp_path / "tokens") == [], "nothing half-made stays"


def test_f4_rows_do_not_depend_on_batches(tokenizer, tmp_path, monkeypatch):
    texts = ["a", "b"] * 5  # begin, a byte, end: three tokens each
    wanted = [t for text in texts for t in (0, *tokenizer(text)["input_ids"][1:], 1)]
    for batch_characters in (1, 3, 1 << 20):
        monkeypatch.setattr("memtrain.data.tokenizer.document_ids.__defaults__", (batch_characters, 1 << 20))
        split = split_texts(texts, tokenizer, 0.0, tmp_path / str(batch_characters))[2]
        rows = PackedRows(split.train, 8)
        assert [rows[i].tolist() for i in range(len(rows))] == [wanted[i:i + 9] for i in range(0, 29, 8)]
        assert len(wanted) == 30 and split.train.ids.dtype == np.uint16


def test_large_vocabularies_are_stored_in_32_bits(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "tokenizer_size", lambda tokenizer: 65537)
    train, _, split = split_texts(["some text"], tokenizer, 0.0, tmp_path)
    assert train == ["some text"] and split.train.ids.dtype == np.uint32


# ---- cache ----------------------------------------------------------------------------------------------------------

def test_a_second_call_reads_the_cache(tokenizer, tmp_path, monkeypatch):
    texts = ["one text", "two texts", "three"]
    first = split_texts(texts, tokenizer, 0.3, tmp_path)
    monkeypatch.setattr(token_store, "document_ids", lambda *a: pytest.fail("tokenised again"))
    second = split_texts(texts, tokenizer, 0.3, tmp_path)
    assert second[:2] == first[:2] and second[2].report == first[2].report == CorpusReport(documents=3)


def truncate(folder):
    os.truncate(folder / "train" / "ids.bin", 2)


def remove_offsets(folder):
    (folder / "train" / "offsets.npy").unlink()


def empty_description(folder):
    (folder / "store.json").write_text("")


def shift_offsets(folder):
    offsets = np.load(folder / "train" / "offsets.npy")
    offsets[1] = offsets[-1] + 5  # the ends stay what they were
    np.save(folder / "train" / "offsets.npy", offsets)


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("damage", [truncate, remove_offsets, empty_description, shift_offsets, empty])
def test_a_damaged_cache_is_built_again(tokenizer, tmp_path, damage):
    texts = ["one text", "two texts"]
    split_texts(texts, tokenizer, 0.0, tmp_path)
    (folder,) = (tmp_path / "tokens").iterdir()
    damage(folder)
    assert split_texts(texts, tokenizer, 0.0, tmp_path)[0] == texts
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [folder.name]
    assert sorted(path.name for path in folder.iterdir()) == ["evaluation", "store.json", "train"]


def read_number(folder):
    return json.loads((folder / "n").read_text())


def test_a_killed_writer_leaves_nothing_under_the_name(tmp_path):
    def killed(folder):
        (folder / "n").write_text("1")
        os._exit(9)

    child = os.fork()
    if child == 0:
        cached_folder(str(tmp_path), "k", ["x"], killed, read_number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [path.suffix for path in (tmp_path / "k").iterdir()] == [".tmp"]
    assert cached_folder(str(tmp_path), "k", ["x"], lambda f: (f / "n").write_text("2"), read_number) == 2


def test_of_two_writers_one_result_stays(tmp_path):
    def slow(folder):
        assert cached_folder(str(tmp_path), "k", ["x"], lambda f: (f / "n").write_text("1"), read_number) == 1
        (folder / "n").write_text("2")

    assert cached_folder(str(tmp_path), "k", ["x"], slow, read_number) == 1
    assert len(list((tmp_path / "k").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_one_line(tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"cache_dir=.*file: cannot be written \(Not a directory\)") as caught:
        split_texts(["a"], tokenizer, 0.0, tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line_and_other_errors_stay_themselves(tmp_path):
    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    def network(folder):
        raise ConnectionError("reset")

    with pytest.raises(BadInput, match="No space left"):
        cached_folder(str(tmp_path), "k", ["x"], full, read_number)
    with pytest.raises(ConnectionError):
        cached_folder(str(tmp_path), "k", ["x"], network, read_number)
    assert list((tmp_path / "k").iterdir()) == []
