"""Rows cut from token ids, and micro-batches made of rows.

Legend: B rows of a micro-batch, S seq_len (tokens predicted in a full row).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from memtrain.command import BadInput
from memtrain.data.token_store import Tokens

IGNORED_TARGET = -100  # the label that torch's cross_entropy leaves out by default
_CHECK_TOKENS = 1 << 22


class PackedRows:
    """The stream of all documents cut into rows of S + 1 tokens with stride S: every token but the first is predicted
    exactly once. The last row may be shorter."""

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len
        self.total_target_count = max(len(tokens.ids) - 1, 0)

    def __len__(self) -> int:
        return -(-self.total_target_count // self.seq_len)

    def __getitem__(self, row: int) -> np.ndarray:
        """int64 [2 .. S + 1]"""
        start = _checked(row, len(self)) * self.seq_len
        return self.tokens.ids[start:start + self.seq_len + 1].astype(np.int64)

    def target_count(self, row: int) -> int:
        return min(self.seq_len, self.total_target_count - row * self.seq_len)


class PaddedRows:
    """A document a row. A longer one takes consecutive rows, and each of its tokens but the first is predicted once."""

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len
        target_counts = np.maximum(np.diff(tokens.offsets) - 1, 0)
        self.total_target_count = int(target_counts.sum())
        self.first_rows = np.concatenate([[0], np.cumsum(-(-target_counts // seq_len))])

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def __getitem__(self, row: int) -> np.ndarray:
        """int64 [2 .. S + 1]"""
        start, stop = self._span(row)
        return self.tokens.ids[start:stop].astype(np.int64)

    def target_count(self, row: int) -> int:
        start, stop = self._span(row)
        return stop - start - 1

    def _span(self, row: int) -> tuple[int, int]:
        document = int(np.searchsorted(self.first_rows, _checked(row, len(self)), side="right")) - 1
        start = int(self.tokens.offsets[document]) + (row - int(self.first_rows[document])) * self.seq_len
        return start, min(start + self.seq_len + 1, int(self.tokens.offsets[document + 1]))


Rows = PackedRows | PaddedRows
PACKINGS: dict[str, type[PackedRows] | type[PaddedRows]] = {"packed": PackedRows, "padded": PaddedRows}


def _checked(row: int, row_count: int) -> int:
    if not 0 <= row < row_count:
        raise IndexError(f"row {row} of {row_count}")
    return row


def stream_rows(documents_ids: Iterable[np.ndarray], seq_len: int, packing: str) -> Iterator[np.ndarray]:
    """The rows (int64) that `PACKINGS[packing]` cuts from these documents, made as they arrive."""
    held = np.zeros(0, dtype=np.int64)
    for ids in documents_ids:
        held = np.concatenate([held, ids.astype(np.int64)])
        start = 0
        while len(held) - start > seq_len:
            yield held[start:start + seq_len + 1]
            start += seq_len
        held = held[start:]
        if packing == "padded":
            if len(held) > 1:
                yield held
            held = held[:0]
    if len(held) > 1:
        yield held


def check_training_rows(rows: Rows, held_out_tokens: int = 0) -> None:
    """Raises BadInput for a training corpus without a single full packed row, or without any row."""
    found, needed = len(rows.tokens.ids), rows.seq_len + 1 if isinstance(rows, PackedRows) else 2
    if found < needed or not len(rows):
        raise BadInput(f"training text has {found} tokens ({held_out_tokens} more are held out), "
                       f"seq_len={rows.seq_len} needs at least {needed}; lower seq_len, or give more text")


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raises BadInput where an id has no row in the embedding. Reads all ids once, block by block."""
    for start in range(0, len(ids), _CHECK_TOKENS):
        largest = int(ids[start:start + _CHECK_TOKENS].max())
        if largest >= vocab_size:
            raise BadInput(f"vocab_size={vocab_size}: the data holds token id {largest}; raise vocab_size to "
                           f"{largest + 1} or more, or use the tokenizer that belongs to the model")


def collate(rows: Sequence[np.ndarray], seq_len: int, pad_id: int, row_count: int, end_id: int | None = None
            ) -> dict[str, Any]:
    """A micro-batch of B = `row_count` rows, the missing ones all padding.

    `input_ids` int64 [B, S]; `targets` int64 [B, S], the token after each input, IGNORED_TARGET where there is none.
    With `end_id` also `document_lengths`: list of int with sum B * S, the flattened positions cut at every row start
    and after every end token (padding after a row belongs to its last document, or is one of its own).
    """
    import torch

    input_ids = np.full((row_count, seq_len), pad_id, dtype=np.int64)
    targets = np.full((row_count, seq_len), IGNORED_TARGET, dtype=np.int64)
    cuts = [np.arange(row_count + 1) * seq_len]
    for i, row in enumerate(rows):
        input_ids[i, :len(row) - 1] = row[:-1]
        targets[i, :len(row) - 1] = row[1:]
        if end_id is not None:
            cuts.append(i * seq_len + np.flatnonzero(row[:-1] == end_id) + 1)
    batch: dict[str, Any] = {"input_ids": torch.from_numpy(input_ids), "targets": torch.from_numpy(targets)}
    if end_id is not None:
        batch["document_lengths"] = np.diff(np.unique(np.concatenate(cuts))).tolist()
    return batch
