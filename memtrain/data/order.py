"""Which rows an update is made of: a pure function of the position in samples, the seed and the number of processes.

No global random state is read or changed, so a run that is resumed at any position sees what the unbroken run sees.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from memtrain.command import BadInput
from memtrain.data.packing import Rows, collate, stream_rows
from memtrain.data.tokenizer import document_ids


@lru_cache(maxsize=2)  # an update may reach from one epoch into the next
def epoch_order(row_count: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [row_count], a permutation. Sorts raw Philox draws, which numpy promises to keep the same in all versions
    (unlike `Generator.permutation`, see NEP 19)."""
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(row_count)
    return np.argsort(keys, kind="stable")


def row_index(position: int, row_count: int, seed: int) -> int:
    """The row at `position` samples since the start of the run: every row once per epoch, anew shuffled in each."""
    epoch, offset = divmod(position, row_count)
    return int(epoch_order(row_count, seed, epoch)[offset])


def check_row_count(row_count: int, global_batch_size: int, world_size: int) -> None:
    """Raises BadInput where some process would never get a row.

    A last update with fewer rows than processes is no error: the others compute on padding that counts for nothing.
    """
    if row_count < world_size:
        raise BadInput(f"training data has {row_count} rows for {world_size} processes; start fewer processes, lower "
                       "seq_len, or give more text")
    if global_batch_size < world_size:
        raise BadInput(f"global_batch_size={global_batch_size} for {world_size} processes: some would never get a row; "
                       "raise global_batch_size or start fewer processes")


@dataclass(frozen=True)
class Share:
    """How one process computes its share of an update: in which micro-batches, and which rows are its own.

    Row j of an update belongs to micro-step j // (world_size * micro_batch_size), and in it to process
    j % (world_size * micro_batch_size) // micro_batch_size.
    """

    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int
    seq_len: int
    pad_id: int
    end_id: int | None = None  # given: micro-batches say where documents end (for a document mask)

    def own_rows(self, row_count: int) -> list[range]:
        """For each micro-step of an update (or evaluation) of `row_count` rows: this process's rows, maybe none."""
        step = self.world_size * self.micro_batch_size
        starts = range(self.rank * self.micro_batch_size, -(-row_count // step) * step, step)
        return [range(min(start, row_count), min(start + self.micro_batch_size, row_count)) for start in starts]

    def collate(self, rows: Sequence[np.ndarray]) -> dict[str, Any]:
        return collate(rows, self.seq_len, self.pad_id, self.micro_batch_size, self.end_id)


@dataclass
class Update:
    """All micro-batches of one process for one update. `target_count` and `row_count` are of the whole update over all
    processes; `end_position` is where the next update starts. The number of micro-batches is the same everywhere."""

    micro_batches: list[dict[str, Any]]
    target_count: int
    row_count: int
    end_position: int

    def pin_memory(self) -> Update:
        self.micro_batches = [{name: value.pin_memory() if isinstance(value, Tensor) else value
                               for name, value in batch.items()} for batch in self.micro_batches]
        return self


class Updates(Dataset):
    """Start position -> Update, of rows that are all there. `total` positions, or None for no end."""

    def __init__(self, rows: Rows, share: Share, *, seed: int, total: int | None = None) -> None:
        self.rows, self.share, self.seed, self.total = rows, share, seed, total

    def __getitem__(self, position: int) -> Update:
        size = self.share.global_batch_size
        row_count = size if self.total is None else min(size, self.total - position)
        rows = [row_index(position + j, len(self.rows), self.seed) for j in range(row_count)]
        own_rows = self.share.own_rows(row_count)
        micro_batches = [self.share.collate([self.rows[rows[j]] for j in own]) for own in own_rows]
        return Update(micro_batches, sum(map(self.rows.target_count, rows)), row_count, position + row_count)


@dataclass
class _Starts:
    """The positions at which updates start, from `first` on."""

    first: int
    total: int | None
    global_batch_size: int

    def __iter__(self) -> Iterator[int]:
        if self.total is None:
            return itertools.count(self.first, self.global_batch_size)
        return iter(range(self.first, self.total, self.global_batch_size))

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("a run without an end has no length")
        return len(range(self.first, self.total, self.global_batch_size))


class StreamingUpdates(IterableDataset):
    """The same updates from a source without length: row r of the stream is position r, in the order of the source.

    `documents()` starts the stream anew. Every process and every worker reads and tokenises the whole stream by itself,
    which keeps updates equal for any number of them at the price of that work; so does `start_position`, up to which
    rows are read and dropped. `epochs` None: the stream is repeated for ever; the last short row ends an epoch.
    """

    def __init__(self, documents: Callable[[], Iterable[str]], tokenizer: Any, packing: str, share: Share, *,
                 start_position: int = 0, epochs: int | None = None) -> None:
        self.documents, self.tokenizer, self.packing, self.share = documents, tokenizer, packing, share
        self.start_position, self.epochs = start_position, epochs

    def _rows(self) -> Iterator[np.ndarray]:
        for _ in itertools.count() if self.epochs is None else range(self.epochs):
            row_count = 0
            for row in stream_rows(document_ids(self.tokenizer, self.documents(), STREAM_BATCH_CHARACTERS),
                                   self.share.seq_len, self.packing):
                row_count += 1
                yield row
            if not row_count:
                raise BadInput("the stream holds no document to train on; lower eval_fraction, or give more text")

    def __iter__(self) -> Iterator[Update]:
        worker = get_worker_info()
        if worker is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of the parent do not live on in a forked worker
        worker_count, worker_number = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        rows = itertools.islice(self._rows(), self.start_position, None)
        position = self.start_position
        for number in itertools.count():
            chunk = list(itertools.islice(rows, self.share.global_batch_size))
            if not chunk:
                return
            position += len(chunk)
            if number % worker_count == worker_number:  # the loader takes from its workers in turn
                own_rows = self.share.own_rows(len(chunk))
                micro_batches = [self.share.collate([chunk[j] for j in own]) for own in own_rows]
                yield Update(micro_batches, sum(len(row) - 1 for row in chunk), len(chunk), position)


STREAM_BATCH_CHARACTERS = 1 << 16  # small: the first update need not wait for more text than it holds


def _same(item: Any) -> Any:
    return item


def make_loader(dataset: Dataset, *, starts: Iterable[int] | None = None, num_workers: int = 0,
                pin_memory: bool = False) -> DataLoader:
    """A loader whose items are the items of `dataset`, with a generator of its own for the seeds of workers."""
    if num_workers:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unset, every forked worker prints a warning
    return DataLoader(dataset, batch_size=None, sampler=starts, collate_fn=_same, num_workers=num_workers,
                      pin_memory=pin_memory, generator=Generator().manual_seed(0), worker_init_fn=_leave_signals)


def _leave_signals(worker: int) -> None:
    """A terminal and a batch system signal workers too; the training process alone decides, saves, and then ends them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def update_loader(rows: Rows, *, seed: int, start_position: int, total: int | None, global_batch_size: int,
                  micro_batch_size: int, rank: int, world_size: int, seq_len: int, pad_id: int,
                  end_id: int | None = None, num_workers: int = 0, pin_memory: bool = False) -> DataLoader:
    """The updates of one process from `start_position` (samples since the start of the run) to `total`, in order."""
    share = Share(global_batch_size, micro_batch_size, rank, world_size, seq_len, pad_id, end_id)
    return make_loader(Updates(rows, share, seed=seed, total=total),
                       starts=_Starts(start_position, total, global_batch_size),
                       num_workers=num_workers, pin_memory=pin_memory)


def eval_batches(rows: Rows, micro_batch_size: int, rank: int, world_size: int, seq_len: int, pad_id: int,
                 end_id: int | None = None) -> Iterator[dict[str, Any]]:
    """Micro-batches of one process which over all processes hold every row once, in row order; the same number on each,
    so some may be all padding."""
    share = Share(len(rows), micro_batch_size, rank, world_size, seq_len, pad_id, end_id)
    for own in share.own_rows(len(rows)):
        yield share.collate([rows[j] for j in own])
