"""From the options of a run to its rows: corpus, tokenizer, hold-out and tokens, all found again in the cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrain.command import BadInput
from memtrain.data.corpus import Corpus, CorpusReport
from memtrain.data.packing import PACKINGS, Rows, check_ids, check_training_rows
from memtrain.data.token_store import Tokens, cached_folder, held_out_share, tokenize_split
from memtrain.data.tokenizer import (
    begin_token_id,
    check_trainable_vocab_size,
    document_ids,
    load_tokenizer,
    pad_token_id,
    tokenizer_fingerprint,
    tokenizer_size,
    train_tokenizer,
)
from memtrain.options import RunConfig, padded_vocab_size

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

STREAM_EVALUATION_DOCUMENTS = 256  # a stream is evaluated on its first held-out documents, at most so many,
STREAM_EVALUATION_SEARCH = 100_000  # found among so many documents


@dataclass
class Data:
    """What a run trains and is evaluated on.

    `train` are rows, or for a stream a function that starts its documents anew. `evaluation` is None without hold-out.
    `eval_bytes` are the UTF-8 bytes of the evaluated text. `fingerprint` is equal when tokens and rows are.
    """

    tokenizer: Any
    train: Rows | Callable[[], Iterator[str]]
    evaluation: Rows | None
    eval_bytes: int
    report: CorpusReport
    fingerprint: str
    seq_len: int
    packing: str
    pad_id: int
    end_id: int
    begin_id: int | None
    document_mask: bool

    @property
    def row_count(self) -> int | None:
        """Training rows of an epoch; None for a stream."""
        return None if callable(self.train) else len(self.train)

    @property
    def target_count(self) -> int | None:
        """Tokens predicted in an epoch; None for a stream."""
        return None if callable(self.train) else self.train.total_target_count

    def updates(self, *, seed: int, start_position: int, total: int | None, global_batch_size: int,
                micro_batch_size: int, rank: int, world_size: int, num_workers: int = 0,
                pin_memory: bool = False) -> DataLoader:
        """Loader of `order.Update` from `start_position`. `total` (positions of the run, None for no end) is not for
        streams, which repeat for ever."""
        from memtrain.data import order

        end_id = self.end_id if self.document_mask else None
        if not callable(self.train):
            return order.update_loader(
                self.train, seed=seed, start_position=start_position, total=total, global_batch_size=global_batch_size,
                micro_batch_size=micro_batch_size, rank=rank, world_size=world_size, seq_len=self.seq_len,
                pad_id=self.pad_id, end_id=end_id, num_workers=num_workers, pin_memory=pin_memory)
        share = order.Share(global_batch_size, micro_batch_size, rank, world_size, self.seq_len, self.pad_id, end_id)
        dataset = order.StreamingUpdates(self.train, self.tokenizer, self.packing, share, start_position=start_position)
        return order.make_loader(dataset, num_workers=num_workers, pin_memory=pin_memory)

    def evaluation_batches(self, micro_batch_size: int, rank: int, world_size: int) -> Iterator[dict[str, Any]]:
        """See `order.eval_batches`; nothing without hold-out."""
        from memtrain.data import order

        if self.evaluation is None:
            return iter(())
        return order.eval_batches(self.evaluation, micro_batch_size, rank, world_size, self.seq_len, self.pad_id,
                                  self.end_id if self.document_mask else None)


def prepare(config: RunConfig, vocab_size: int, tokenizer_folder: str | None = None) -> Data:
    """Everything that `config` says about data, for a model of `vocab_size` tokens (padded to a multiple of 64 here).

    `tokenizer_folder` is the tokenizer of the model that training continues from, used unless `config.tokenizer` names
    another. A second call finds the cache and gives the same. Raises BadInput.
    """
    spec = config.tokenizer or tokenizer_folder or "train"
    if spec == "train":
        if config.streaming:
            raise BadInput("streaming=true with tokenizer=train: a tokenizer cannot be trained on a stream; set "
                           "tokenizer to a folder or hub id")
        check_trainable_vocab_size(vocab_size)
    corpus = Corpus(config)
    tokenizer = None if spec == "train" else load_tokenizer(spec)
    corpus_fingerprint = corpus.fingerprint()
    if tokenizer is None:
        tokenizer = _trained_tokenizer(corpus, corpus_fingerprint, vocab_size, config.cache_dir)
    _check_vocabulary(tokenizer, spec, vocab_size)

    key = [corpus_fingerprint, tokenizer_fingerprint(tokenizer)]
    make_rows = PACKINGS[config.packing]
    train: Rows | Callable[[], Iterator[str]]
    if config.streaming:
        held_out, report = _stream_held_out(config, tokenizer)
        train = partial(training_documents, config)
    else:
        split = tokenize_split(corpus.documents, tokenizer, config.eval_fraction, config.cache_dir, key)
        held_out, report = split.evaluation, split.report
        train = make_rows(split.train, config.seq_len)
        check_training_rows(train, len(held_out.ids))
        check_ids(split.train.ids, padded_vocab_size(vocab_size))
    check_ids(held_out.ids, padded_vocab_size(vocab_size))
    evaluation = make_rows(held_out, config.seq_len)
    fingerprint = (f"text {key[0]}, tokenizer {key[1]}, eval_fraction {config.eval_fraction}, "
                   f"rows {config.packing} {config.seq_len}")
    return Data(tokenizer=tokenizer, train=train, evaluation=evaluation if len(evaluation) else None,
                eval_bytes=held_out.text_bytes if len(evaluation) else 0, report=report,
                fingerprint=fingerprint,
                seq_len=config.seq_len, packing=config.packing, pad_id=pad_token_id(tokenizer),
                end_id=int(tokenizer.eos_token_id), begin_id=begin_token_id(tokenizer),
                document_mask=config.document_mask)


def prepare_evaluation(config: RunConfig, tokenizer: Any) -> tuple[Rows, int]:
    """(rows, UTF-8 bytes of their text) of all documents of `config.dataset`, or the first ones of a stream."""
    corpus = Corpus(config)
    if config.streaming:
        documents = itertools.islice(corpus.documents(), STREAM_EVALUATION_DOCUMENTS)
        tokens = _tokens_in_memory(tokenizer, documents)
    else:
        key = [corpus.fingerprint(), tokenizer_fingerprint(tokenizer)]
        tokens = tokenize_split(corpus.documents, tokenizer, 0.0, config.cache_dir, key).train
    rows = PACKINGS[config.packing](tokens, config.seq_len)
    return rows, tokens.text_bytes


def training_documents(config: RunConfig) -> Iterator[str]:
    """The documents of a stream without the held-out ones."""
    return (text for text in Corpus(config).documents() if held_out_share(text) >= config.eval_fraction)


def _stream_held_out(config: RunConfig, tokenizer: Any) -> tuple[Tokens, CorpusReport]:
    """The evaluation documents of a stream, and a report of what was read to find them."""
    report = CorpusReport()
    if config.eval_fraction == 0:
        return _tokens_in_memory(tokenizer, ()), report
    searched = itertools.islice(Corpus(config).documents(report), STREAM_EVALUATION_SEARCH)
    held_out = (text for text in searched if held_out_share(text) < config.eval_fraction)
    tokens = _tokens_in_memory(tokenizer, itertools.islice(held_out, STREAM_EVALUATION_DOCUMENTS))
    if len(tokens.offsets) == 1:
        raise BadInput(f"eval_fraction={config.eval_fraction:g}: holds out none of the first {report.documents} "
                       "documents of the stream; raise it, or set it to 0")
    return tokens, report


def _tokens_in_memory(tokenizer: Any, documents: Iterator[str] | tuple[()]) -> Tokens:
    texts = list(documents)
    ids = list(document_ids(tokenizer, texts))
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    text_bytes = sum(len(text.encode("utf-8")) for text in texts)
    return Tokens(np.concatenate([np.zeros(0, dtype=np.uint32), *ids]), offsets, text_bytes)


def _trained_tokenizer(corpus: Corpus, corpus_fingerprint: str, vocab_size: int, cache_dir: str) -> Any:
    def build(folder: Path) -> None:
        train_tokenizer(corpus.documents(), vocab_size).save_pretrained(str(folder))

    return cached_folder(cache_dir, "tokenizers", [corpus_fingerprint, vocab_size], build,
                         lambda folder: load_tokenizer(str(folder)))


def _check_vocabulary(tokenizer: Any, spec: str, vocab_size: int) -> None:
    size = tokenizer_size(tokenizer)
    if size > padded_vocab_size(vocab_size):
        raise BadInput(f"vocab_size={vocab_size}: vocabulary smaller than its tokenizer ({spec} has {size} tokens); "
                       f"raise vocab_size to {size}, or use a smaller tokenizer")
