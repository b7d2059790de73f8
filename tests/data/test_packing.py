"""Rows against slices of a plain list, micro-batches against values written by hand."""

import itertools
import pickle

import numpy as np
import pytest
import torch

from memtrain.command import BadInput
from memtrain.data import packing
from memtrain.data.packing import (
    IGNORED_TARGET,
    PackedRows,
    PaddedRows,
    check_ids,
    check_training_rows,
    collate,
    stream_rows,
)
from memtrain.data.token_store import Tokens


def tokens_of(*lengths):
    """Documents of consecutive numbers, so that every id occurs once."""
    offsets = np.cumsum([0, *lengths])
    return Tokens(np.arange(offsets[-1], dtype=np.uint16), offsets, 0)


# ---- rows -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("token_count", [0, 1, 2, 8, 9, 10, 16, 17, 18, 30])
def test_packed_rows_predict_every_token_but_the_first_once(token_count):
    rows = PackedRows(tokens_of(token_count), 8)
    found = [rows[i].tolist() for i in range(len(rows))]
    assert [t for row in found for t in row[1:]] == list(range(1, token_count))
    assert all(row == list(range(row[0], row[-1] + 1)) for row in found), "each input is followed by its target"
    assert all(len(row) == 9 for row in found[:-1]) and all(2 <= len(row) <= 9 for row in found)
    assert [rows.target_count(i) for i in range(len(rows))] == [len(row) - 1 for row in found]
    assert rows.total_target_count == sum(len(row) - 1 for row in found)
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_padded_rows_hold_one_document_and_predict_each_of_its_tokens_once():
    lengths = [2, 9, 10, 1, 17, 18, 3]
    tokens = tokens_of(*lengths)
    rows = PaddedRows(tokens, 8)
    found = [rows[i].tolist() for i in range(len(rows))]
    wanted = []
    for a, b in itertools.pairwise(tokens.offsets.tolist()):
        document = list(range(a, b))
        wanted += [document[i:i + 9] for i in range(0, len(document) - 1, 8)]
    assert found == wanted and len(found) == 1 + 1 + 2 + 0 + 2 + 3 + 1
    assert [rows.target_count(i) for i in range(len(rows))] == [len(row) - 1 for row in wanted]
    assert rows.total_target_count == sum(n - 1 for n in lengths)


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("lengths", [[3] * 10, [2, 9, 10, 17, 18, 3], [1], [40], [5, 4]])
def test_rows_made_on_the_fly_are_the_rows(kind, lengths):
    tokens = tokens_of(*lengths)
    rows = packing.PACKINGS[kind](tokens, 8)
    documents = [tokens.ids[a:b] for a, b in itertools.pairwise(tokens.offsets)]
    assert [r.tolist() for r in stream_rows(documents, 8, kind)] == [rows[i].tolist() for i in range(len(rows))]


def test_f3_too_little_text_is_one_line_with_tokens_found_and_needed():
    with pytest.raises(BadInput, match=r"has 12 tokens .* seq_len=1024 needs at least 1025; lower seq_len") as caught:
        check_training_rows(PackedRows(tokens_of(12), 1024))
    assert "\n" not in str(caught.value)
    check_training_rows(PackedRows(tokens_of(9), 8))
    check_training_rows(PaddedRows(tokens_of(5), 1024))
    with pytest.raises(BadInput, match="has 8 tokens"):
        check_training_rows(PackedRows(tokens_of(8), 8))
    with pytest.raises(BadInput):
        check_training_rows(PaddedRows(tokens_of(1, 1), 8))


def test_ids_beyond_the_vocabulary_are_refused(monkeypatch):
    monkeypatch.setattr(packing, "_CHECK_TOKENS", 4)
    check_ids(np.arange(97, dtype=np.uint16), 97)
    with pytest.raises(BadInput, match="vocab_size=96: the data holds token id 96"):
        check_ids(np.arange(97, dtype=np.uint16), 96)
    check_ids(np.zeros(0, dtype=np.uint16), 96)


def test_tokens_travel_by_name_of_their_file(tmp_path):
    np.arange(100_000, dtype=np.uint32).tofile(tmp_path / "ids.bin")
    ids = np.memmap(tmp_path / "ids.bin", dtype=np.uint32, mode="r")
    rows = PackedRows(Tokens(ids, np.array([0, 100_000]), 0), 8)
    sent = pickle.dumps(rows)
    assert len(sent) < 2000, "the ids themselves are not sent to a loader worker"
    assert np.array_equal(pickle.loads(sent)[7], rows[7])


# ---- micro-batches --------------------------------------------------------------------------------------------------

def test_collate_shifts_targets_and_pads():
    batch = collate([np.array([5, 6, 7]), np.array([1, 2, 3, 4, 5])], 4, 9, 3)
    assert batch["input_ids"].tolist() == [[5, 6, 9, 9], [1, 2, 3, 4], [9, 9, 9, 9]]
    assert batch["targets"].tolist() == [[6, 7, -100, -100], [2, 3, 4, 5], [-100] * 4]
    assert batch["input_ids"].dtype == batch["targets"].dtype == torch.int64 and set(batch) == {"input_ids", "targets"}


def test_a6_padding_alone_has_no_target():
    batch = collate([], 4, 0, 2)
    assert batch["input_ids"].shape == (2, 4) and (batch["targets"] == IGNORED_TARGET).all()


@pytest.mark.parametrize("pad_id", [0, 1])
def test_document_lengths_cut_at_rows_and_after_end_tokens(pad_id):
    rows = [np.array([5, 1, 6, 6, 1]), np.array([1, 7, 1, 8, 8]), np.array([6, 6, 6, 1, 6]), np.array([5, 1])]
    batch = collate(rows, 4, pad_id, 5, end_id=1)
    #                                   5 1|6 6     1|7 1|8       6 6 6 1    5 . . .  padding
    assert batch["document_lengths"] == [2, 2, 1, 2, 1, 4, 4, 4], "padding with the end token is not cut"
    assert sum(batch["document_lengths"]) == 5 * 4
