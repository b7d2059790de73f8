"""Token ids on disk: made once per content, found again by its digest, split into training and held-out documents."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import shutil
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memtrain.command import BadInput
from memtrain.data.corpus import CorpusReport
from memtrain.data.tokenizer import document_ids, tokenizer_size

STORE_VERSION = 1  # part of every cache key: raise it when the same input is stored as other tokens
_WRITE_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EEXIST,
                 errno.ENOTDIR}


# ---- token stores ---------------------------------------------------------------------------------------------------

@dataclass
class Tokens:
    """Documents as ids [token_count] (uint16 or uint32, mapped from a file) and `offsets` int64 [documents + 1]:
    document i is ids[offsets[i]:offsets[i + 1]]. `text_bytes` are the UTF-8 bytes of their text."""

    ids: np.ndarray
    offsets: np.ndarray
    text_bytes: int

    def __getstate__(self) -> dict[str, Any]:
        # a loader worker that is not forked gets the name of the file and not gigabytes of ids
        state = dict(self.__dict__)
        if isinstance(self.ids, np.memmap):
            state["ids"] = (str(self.ids.filename), self.ids.dtype)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.ids, tuple):
            self.ids = np.memmap(self.ids[0], dtype=self.ids[1], mode="r")


class _Writer:
    """Appends documents to one `Tokens` folder, holding none of them."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.dtype = folder, dtype
        self.offsets = array("q", [0])
        self.text_bytes = 0
        self.file = open(folder / "ids.bin", "wb")  # noqa: SIM115 (closed by close)

    def append(self, ids: np.ndarray, text_bytes: int) -> None:
        self.file.write(ids.astype(self.dtype).tobytes())
        self.offsets.append(self.offsets[-1] + len(ids))
        self.text_bytes += text_bytes

    def close(self) -> dict[str, Any]:
        _flush(self.file)
        with open(self.folder / "offsets.npy", "wb") as file:
            np.save(file, np.array(self.offsets, dtype=np.int64))
            _flush(file)
        return {"dtype": self.dtype.name, "token_count": self.offsets[-1], "text_bytes": self.text_bytes}


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _open_tokens(folder: Path, values: dict[str, Any]) -> Tokens:
    """Raises ValueError, KeyError or OSError where the folder is not what `values` say."""
    offsets = np.load(folder / "offsets.npy")
    dtype = np.dtype(values["dtype"])
    if (offsets[0] != 0 or offsets[-1] != values["token_count"] or np.any(np.diff(offsets) < 0)
            or (folder / "ids.bin").stat().st_size != values["token_count"] * dtype.itemsize):
        raise ValueError(f"{folder} is not whole")
    if values["token_count"] == 0:  # an empty file cannot be mapped
        return Tokens(np.zeros(0, dtype), offsets, values["text_bytes"])
    return Tokens(np.memmap(folder / "ids.bin", dtype=dtype, mode="r"), offsets, values["text_bytes"])


# ---- cache ----------------------------------------------------------------------------------------------------------

def cached_folder(cache_dir: str, kind: str, key: Sequence[Any], build: Callable[[Path], object],
                  read: Callable[[Path], Any]) -> Any:
    """`read(folder)` of the cache folder of this key, after `build(new folder)` where it is absent or `read` fails.

    A folder appears under its name only when whole. Two writers of one key do the work twice and one result stays.
    Raises BadInput where the cache cannot be written.
    """
    name = hashlib.blake2b(json.dumps([STORE_VERSION, *key]).encode("utf-8"), digest_size=16).hexdigest()
    folder = Path(cache_dir).expanduser() / kind / name
    found = _read_or_none(folder, read)
    if found is not None:
        return found
    new = folder.with_name(f"{name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    with _writable(cache_dir):
        folder.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
    try:
        with _writable(cache_dir):
            build(new)
            found = _read_or_none(folder, read)  # another process may have been faster
            if found is not None:
                return found
            if folder.exists():
                os.rename(folder, new / "broken")
            try:
                os.rename(new, folder)
            except OSError:
                if _read_or_none(folder, read) is None:
                    raise
            shutil.rmtree(folder / "broken", ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return read(folder)


def _read_or_none(folder: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(folder) if folder.is_dir() else None
    except Exception:  # whatever is wrong with it, it is built again
        return None


@contextmanager
def _writable(cache_dir: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        root = str(Path(cache_dir).expanduser())
        if error.errno not in _WRITE_ERRORS or not str(error.filename or root).startswith(root):
            raise  # about a source (a network error is an OSError too), not about the cache
        raise BadInput(f"cache_dir={cache_dir}: cannot be written ({error.strerror or error}); set cache_dir to a "
                       "folder with write permission and room") from None


# ---- hold-out -------------------------------------------------------------------------------------------------------

HoldOut = Callable[[str], list[tuple[str, bool]]]  # text -> its parts, and whether each is held out

def held_out_share(text: str) -> float:
    """A number in [0, 1), uniform over texts: those below `eval_fraction` are held out, whatever their order."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53  # 53 bits: what a float64 below 1 holds exactly


@dataclass
class Split:
    train: Tokens
    evaluation: Tokens
    report: CorpusReport


def tokenize_split(documents: Callable[[CorpusReport], Iterable[str]], tokenizer: Any, eval_fraction: float,
                   cache_dir: str, key: Sequence[Any]) -> Split:
    """Tokens of the training and of the held-out documents, cached under `key` (what decides text and ids).

    A document is held out when `held_out_share(text) < eval_fraction`; where that leaves none, those with the smallest
    share are; a single document gives the end of its text. Raises BadInput where nothing is left to train on.
    """
    def build(folder: Path) -> None:
        is_single = sum(1 for _ in itertools.islice(documents(CorpusReport()), 2)) == 1
        rule = _hold_out_end(eval_fraction) if is_single and eval_fraction > 0 else _hold_out_below(eval_fraction)
        written = _write_split(folder, documents, tokenizer, rule)
        if eval_fraction > 0 and written.document_counts["evaluation"] == 0:
            smallest = math.nextafter(written.smallest_share, 1.0)
            written = _write_split(folder, documents, tokenizer, _hold_out_below(smallest))
        if written.document_counts["train"] == 0:
            raise BadInput(f"eval_fraction={eval_fraction:g}: holds out all {written.report.documents} documents "
                           "(equal ones stay together) and leaves none to train on; lower it, or give more text")
        with open(folder / "store.json", "w", encoding="utf-8") as file:
            json.dump({**written.stores, "report": asdict(written.report)}, file)
            _flush(file)

    def read(folder: Path) -> Split:
        values = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        return Split(_open_tokens(folder / "train", values["train"]),
                     _open_tokens(folder / "evaluation", values["evaluation"]), CorpusReport(**values["report"]))

    split: Split = cached_folder(cache_dir, "tokens", [*key, eval_fraction], build, read)
    return split


@dataclass
class _Written:
    report: CorpusReport
    smallest_share: float
    document_counts: dict[str, int]
    stores: dict[str, dict[str, Any]]


def _write_split(folder: Path, documents: Callable[[CorpusReport], Iterable[str]], tokenizer: Any,
                 rule: HoldOut) -> _Written:
    """Both sides as `folder`/train and `folder`/evaluation, over what an earlier pass has written there."""
    dtype = np.dtype(np.uint16 if tokenizer_size(tokenizer) <= 1 << 16 else np.uint32)
    report = CorpusReport()
    smallest_share = 1.0
    sides: deque[tuple[str, int]] = deque()  # of the parts that the tokenizer still works on
    writers = {part: _Writer(folder / part, dtype) for part in ("train", "evaluation")}

    def parts() -> Iterator[str]:
        nonlocal smallest_share
        for text in documents(report):
            smallest_share = min(smallest_share, held_out_share(text))
            for part, is_held_out in rule(text):
                sides.append(("evaluation" if is_held_out else "train", len(part.encode("utf-8"))))
                yield part

    for ids in document_ids(tokenizer, parts()):
        side, text_bytes = sides.popleft()
        writers[side].append(ids, text_bytes)
    counts = {side: len(writer.offsets) - 1 for side, writer in writers.items()}
    return _Written(report, smallest_share, counts, {side: writer.close() for side, writer in writers.items()})


def _hold_out_below(share: float) -> HoldOut:
    return lambda text: [(text, held_out_share(text) < share)]


def _hold_out_end(eval_fraction: float) -> HoldOut:
    """The two parts of the only document: cut at a line end near the wanted place, or in the middle of a short text."""
    def rule(text: str) -> list[tuple[str, bool]]:
        wanted = int(len(text) * (1 - eval_fraction))
        for cut in (text.rfind("\n", 0, wanted) + 1, text.find("\n", wanted) + 1, wanted, len(text) // 2):
            if text[:cut].strip() and text[cut:].strip():
                return [(text[:cut], False), (text[cut:], True)]
        raise BadInput(f"dataset holds one document of {len(text)} characters, too short to hold out a part; "
                       "set eval_fraction=0, or give more text")
    return rule
