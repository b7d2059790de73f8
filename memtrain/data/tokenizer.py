"""Text to token ids: a byte-level BPE trained on the corpus, or any tokenizer that transformers opens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memtrain.command import BadInput
from memtrain.data.corpus import one_line

BEGIN, END, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
SMALLEST_VOCABULARY = 256 + 3  # every byte, and the three tokens above
BATCH_CHARACTERS = 1 << 21  # text handed to the tokenizer at a time; changes memory and speed, never the result
PIECE_CHARACTERS = 1 << 18  # texts longer than this are tokenised in pieces, where that is exact


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Any:
    """Byte-level BPE with at most `vocab_size` tokens; ids 0, 1, 2 are begin, end, pad. A pure function of its input.

    Any text comes back exactly from `decode`. Called as `tokenizer(text)` it adds the begin token and no end token, as
    a prompt needs it. Raises BadInput for a `vocab_size` that does not hold the bytes.
    """
    check_trainable_vocab_size(vocab_size)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=[BEGIN, END, PAD], show_progress=False)
    # in pieces, because the trainer needs about 90 times the memory of each text it is handed
    pieces = (piece for text in documents for piece in _pieces(text, PIECE_CHARACTERS))
    backend.train_from_iterator(pieces, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, backend.token_to_id(BEGIN))])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BEGIN, eos_token=END, pad_token=PAD,
                                   clean_up_tokenization_spaces=False)


def check_trainable_vocab_size(vocab_size: int) -> None:
    if vocab_size < SMALLEST_VOCABULARY:
        raise BadInput(f"vocab_size={vocab_size}: a byte-level tokenizer needs at least {SMALLEST_VOCABULARY} (256 "
                       "bytes and 3 special tokens); raise vocab_size, or set tokenizer to a folder or hub id")


def load_tokenizer(spec: str) -> Any:
    """The tokenizer of a folder or hub id. Raises BadInput, also where it has no end token."""
    from transformers import AutoTokenizer

    path = Path(spec).expanduser()
    if not path.is_dir() and (path.exists() or spec.startswith((".", "~", "/")) or spec.count("/") > 1):
        raise BadInput(f"tokenizer {spec}: no such folder; give a folder with tokenizer.json, a hub id, or train")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else spec)
    except Exception as error:  # any of a dozen kinds, all of them about what was asked for
        raise BadInput(f"tokenizer {spec}: cannot be loaded ({one_line(error)}); give a folder with tokenizer.json, "
                       "a hub id, or train") from None
    if tokenizer.eos_token_id is None:
        raise BadInput(f"tokenizer {spec}: has no end token, so documents could not be told apart; set eos_token in "
                       "its tokenizer_config.json, or use another tokenizer")
    return tokenizer


def tokenizer_size(tokenizer: Any) -> int:
    """Largest token id + 1, which is more than the number of tokens where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def begin_token_id(tokenizer: Any) -> int | None:
    """The token that starts a document: none where the tokenizer has none, or uses one token for both ends."""
    begin = tokenizer.bos_token_id
    return None if begin is None or begin == tokenizer.eos_token_id else int(begin)


def pad_token_id(tokenizer: Any) -> int:
    """Padding is never a target, so the end token serves where there is no pad token."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hex digest of what decides the ids of a text; where the tokenizer lies does not matter."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        content.pop("truncation", None)  # both are set anew by every call
        content.pop("padding", None)
    else:
        content = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    ends = [begin_token_id(tokenizer), tokenizer.eos_token_id]
    return hashlib.blake2b(json.dumps([content, ends]).encode("utf-8"), digest_size=16).hexdigest()


def document_ids(tokenizer: Any, documents: Iterable[str], batch_characters: int = BATCH_CHARACTERS,
                 piece_characters: int = PIECE_CHARACTERS) -> Iterator[np.ndarray]:
    """uint32 ids of each document: [begin] + text + [end], one of each whatever the tokenizer adds by itself.

    The names of special tokens inside a text are text. The result does not depend on `batch_characters`.
    Raises BadInput where a text yields the begin or end token all the same.
    """
    if not _pieces_are_exact(tokenizer):
        piece_characters = 0
    batch: list[list[str]] = []
    held_characters = 0
    for text in documents:
        batch.append(_pieces(text, piece_characters))
        held_characters += len(text)
        if held_characters >= batch_characters:
            yield from _encode(tokenizer, batch, batch_characters)
            batch, held_characters = [], 0
    yield from _encode(tokenizer, batch, batch_characters)


def _encode(tokenizer: Any, batch: list[list[str]], batch_characters: int) -> Iterator[np.ndarray]:
    begin_id, end_id = begin_token_id(tokenizer), int(tokenizer.eos_token_id)
    head = [np.array([begin_id], dtype=np.uint32)] if begin_id is not None else []
    tail = [np.array([end_id], dtype=np.uint32)]
    encoded = _encode_pieces(tokenizer, [piece for pieces in batch for piece in pieces], batch_characters)
    for pieces in batch:
        ids = np.concatenate([*head, *(next(encoded) for _ in pieces), *tail])
        if np.count_nonzero(ids == end_id) != 1 or (begin_id is not None and np.count_nonzero(ids == begin_id) != 1):
            raise BadInput(f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}: turns text of the "
                           f"document {pieces[0][:40]!r} into its begin or end token; use another tokenizer")
        yield ids


def _encode_pieces(tokenizer: Any, pieces: list[str], batch_characters: int) -> Iterator[np.ndarray]:
    start = 0
    while start < len(pieces):
        stop, held_characters = start, 0
        while stop < len(pieces) and held_characters < batch_characters:
            held_characters += len(pieces[stop])
            stop += 1
        lists = tokenizer(pieces[start:stop], add_special_tokens=False, split_special_tokens=True, verbose=False,
                          return_attention_mask=False, return_token_type_ids=False)["input_ids"]
        yield from (np.array(ids, dtype=np.uint32) for ids in lists)
        start = stop


def _pieces(text: str, piece_characters: int) -> list[str]:
    """The text cut after single line ends between other characters; in one piece where `piece_characters` is 0."""
    pieces, start = [], 0
    while piece_characters and len(text) - start > piece_characters:
        cut = next(_LINE_END.finditer(text, start + piece_characters), None)
        if cut is None:
            break
        pieces.append(text[start:cut.end()])
        start = cut.end()
    return [*pieces, text[start:]]


# Common pre-tokenizer patterns join a line end to what stands before it, never to a word after it; runs of white space
# are left alone because what they join to depends on what follows.
_LINE_END = re.compile(r"(?<=\S)\n(?=\w)")
_PROBES = ("word.\n", "word\n", "(9)\n"), ("word", "The", "9", "ß", "_a")


def _pieces_are_exact(tokenizer: Any) -> bool:
    """Whether ids of pieces are the ids of the whole: not where a tokenizer marks the start of what it is given."""
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    return all(ids(left + right) == ids(left) + ids(right) for left in _PROBES[0] for right in _PROBES[1])
