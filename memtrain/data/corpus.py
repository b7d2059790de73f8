"""Where text comes from: the standard library of this Python, files, or a hub data set, read document by document.

Nothing here keeps more than one document (of a .parquet file: one batch of rows) in memory.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memtrain.command import BadInput
from memtrain.options import RunConfig

STANDARD_LIBRARY = "python-stdlib"
SUFFIXES = (".txt", ".py", ".jsonl", ".parquet")
CORPUS_VERSION = 1  # part of every fingerprint: raise it when the same bytes are read as other text
ROWS_PER_READ = 1024  # of a .parquet file or a hub data set
_TEST_FOLDERS = {"test", "tests", "idle_test"}
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MISSING, _NOT_TEXT = object(), object()  # stand for a record without the key, and for one that holds something else
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FOLDER_SUFFIXES = {*SUFFIXES, ".json", ".csv", ".tsv", ".arrow", ".zip", ".gz", ".zst", ".bz2", ".xz", ".tar"}


@dataclass
class CorpusReport:
    """What was read. `skipped` counts records without usable text by reason, `replaced` byte sequences (or lone
    surrogates) that became U+FFFD, `text_bytes` the UTF-8 bytes of the documents."""

    documents: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    replaced: int = 0
    text_bytes: int = 0

    def skipped_text(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items())) or "none"

    def __str__(self) -> str:
        return (f"{self.documents} documents, {self.text_bytes} bytes of text; skipped: {self.skipped_text()}; "
                f"replaced byte sequences: {self.replaced}")


@dataclass(frozen=True)
class Source:
    """`kind` is a suffix of SUFFIXES, "stdlib" or "hub"; `name` a path, or the id or folder of a data set."""

    kind: str
    name: str


def one_line(error: BaseException, limit: int = 300) -> str:
    """The message of an exception of another library, on one line."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def standard_library_files() -> list[Path]:
    """The .py files of the running interpreter, without its tests and installed packages, by relative path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _TEST_FOLDERS | _NOT_LIBRARY]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_file_word(word: str) -> bool:
    return not Path(word).is_dir() and (Path(word).exists() or glob.has_magic(word) or word.endswith(SUFFIXES))


def find_sources(config: RunConfig) -> tuple[list[Source], list[str]]:
    """(sources in reading order, problems). A file named twice is read once. Opens nothing but folders."""
    sources: dict[Source, None] = {}
    problems: list[str] = []
    for given in config.dataset:
        if given == STANDARD_LIBRARY:
            files = standard_library_files()
            sources |= dict.fromkeys(Source("stdlib", str(path)) for path in files)
            if not files:
                problems.append(f"dataset {given}: this Python has no library sources; give files instead")
            continue
        word = os.path.expanduser(given)
        if _is_file_word(word):
            names = [word] if Path(word).exists() else [n for n in sorted(glob.glob(word, recursive=True))
                                                        if not Path(n).is_dir()]
            if not names:
                what = "no file matches" if glob.has_magic(word) else "no such file"
                problems.append(f"dataset {given}: {what}; give an existing file, a quoted glob, or a hub id")
            for name in names:
                suffix = Path(name).suffix
                if suffix not in SUFFIXES:
                    problems.append(f"dataset {name}: suffix {suffix or 'missing'}, want one of {' '.join(SUFFIXES)}; "
                                    "rename or convert the file")
                elif not os.access(name, os.R_OK):
                    problems.append(f"dataset {name}: no permission to read it; change its mode")
                else:
                    sources[Source(suffix, name)] = None
        elif Path(word).is_dir():
            if not os.access(word, os.R_OK | os.X_OK):
                problems.append(f"dataset {given}: no permission to read this folder; change its mode")
            elif not any(path.suffix in _FOLDER_SUFFIXES for path in Path(word).rglob("*")):
                problems.append(f"dataset {given}: this folder holds no data files; want some of {' '.join(SUFFIXES)}")
            else:
                sources[Source("hub", word)] = None
        elif _HUB_ID.fullmatch(word):
            sources[Source("hub", word)] = None
        else:
            problems.append(f"dataset {given}: no such file or folder, and not a hub id (owner/name); correct the path")
    return list(sources), problems


def source_problems(config: RunConfig) -> list[str]:
    """What can be seen to be wrong with `dataset` before anything is read, a line each."""
    return find_sources(config)[1]


class Corpus:
    """The documents of `config.dataset`. Raises BadInput (a line for every problem) where a source cannot be used."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.sources, problems = find_sources(config)
        if problems:
            raise BadInput("\n".join(problems))

    def documents(self, report: CorpusReport | None = None) -> Iterator[str]:
        """Every usable text in source order, counted in `report`. Raises BadInput when there is none at all."""
        report = CorpusReport() if report is None else report
        skipped: Counter[str] = Counter()
        for source in self.sources:
            for value in self._values(source, report):
                text = value if isinstance(value, str) else None
                reason = "" if text and not text.isspace() else (
                    "blank" if text is not None else "null" if value is None
                    else "missing" if value is _MISSING else "not text")
                if reason:
                    skipped[reason] += 1
                    report.skipped = dict(skipped)
                    continue
                assert text is not None
                report.documents += 1
                report.text_bytes += len(text.encode("utf-8"))
                yield text
        if report.documents == 0:
            names = " ".join(self.config.dataset)
            if skipped:
                raise BadInput(f"dataset {names}: all {sum(skipped.values())} records skipped "
                               f"({report.skipped_text()}); want text under text_column={self.config.text_column}")
            raise BadInput(f"dataset {names}: empty, no documents found; give files with text")

    def fingerprint(self) -> str:
        """Hex digest of what the documents are made of, independent of where files lie and when they were written.

        Files: kind, size and bytes of each in order. Hub data sets: their name, options and `Dataset._fingerprint`
        (a digest of builder, version, data files and split). A stream is not read for this: names and sizes only.
        """
        config = self.config
        digest = hashlib.blake2b(digest_size=16)

        def add(*parts: Any) -> None:
            digest.update(json.dumps(parts).encode("utf-8"))

        add(CORPUS_VERSION, config.text_column, config.encoding_errors, config.streaming)
        for source in self.sources:
            if source.kind == "hub":
                add("hub", source.name, config.dataset_config, config.dataset_split,
                    None if config.streaming else self._hub_dataset(source.name)._fingerprint)
                continue
            with _open(source.name) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                add(source.kind, size_bytes, source.name if config.streaming else None)
                while not config.streaming and (block := file.read(1 << 20)):
                    digest.update(block)
        return digest.hexdigest()

    def _values(self, source: Source, report: CorpusReport) -> Iterator[Any]:
        """Text, None, _MISSING or anything else that a record holds where text is wanted."""
        if source.kind == "stdlib":
            yield from _read_library_source(source.name)
        elif source.kind in (".txt", ".py"):
            with _open(source.name) as file:
                yield self._decode(file.read(), source.name, 0, report).removeprefix("\ufeff")
        elif source.kind == ".jsonl":
            yield from self._json_lines(source.name, report)
        elif source.kind == ".parquet":
            yield from self._parquet(source.name, report)
        else:
            yield from self._hub(source.name)

    def _decode(self, data: bytes, place: str, offset_bytes: int, report: CorpusReport) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            if self.config.encoding_errors == "strict":
                raise BadInput(f"{place}: byte {offset_bytes + error.start} is not UTF-8 (0x{data[error.start]:02x}); "
                               "convert the file, or set encoding_errors=replace") from None
        text = data.decode("utf-8", "replace")
        report.replaced += text.count("\ufffd") - data.count("\ufffd".encode())  # those already in the file stay
        return text

    def _json_lines(self, name: str, report: CorpusReport) -> Iterator[Any]:
        key = self.config.text_column
        offset_bytes = 0
        with _open(name) as file:
            for number, line in enumerate(file, start=1):
                text = self._decode(line, name, offset_bytes, report)
                offset_bytes += len(line)
                text = text.removeprefix("\ufeff") if number == 1 else text
                if text.isspace() or not text:
                    continue
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise BadInput(f"{name}: line {number} is not JSON ({one_line(error)}); correct the line") from None
                if not isinstance(record, dict):
                    raise BadInput(f"{name}: line {number} holds {type(record).__name__}, want an object "
                                   f'like {{"{key}": "..."}}; correct the line')
                value = record.get(key, _MISSING)
                if isinstance(value, str) and (lone := len(_LONE_SURROGATE.findall(value))):
                    # JSON can escape half of a surrogate pair, which is no character and has no UTF-8
                    if self.config.encoding_errors == "strict":
                        raise BadInput(f"{name}: line {number} has a lone surrogate escape, which is not text; "
                                       "correct the line, or set encoding_errors=replace")
                    report.replaced += lone
                    value = _LONE_SURROGATE.sub("\ufffd", value)
                yield value

    def _parquet(self, name: str, report: CorpusReport) -> Iterator[Any]:
        import pyarrow
        import pyarrow.parquet

        column = self.config.text_column
        try:
            with pyarrow.parquet.ParquetFile(name) as file:
                if column not in file.schema_arrow.names:
                    raise BadInput(f"{name}: no column {column}, found {', '.join(file.schema_arrow.names)}; "
                                   "set text_column to one of them")
                row = 0
                for batch in file.iter_batches(batch_size=ROWS_PER_READ, columns=[column]):
                    values = batch.column(0)
                    try:
                        texts = values.to_pylist()
                    except UnicodeDecodeError:
                        texts = [data if data is None else self._decode(data, f"{name}: row {row + i}", 0, report)
                                 for i, data in enumerate(values.cast(pyarrow.large_binary()).to_pylist())]
                    yield from texts
                    row += len(texts)
        except (pyarrow.ArrowException, OSError) as error:
            raise BadInput(f"{name}: cannot be read as parquet ({one_line(error)}); write the file again") from None

    def _hub_dataset(self, name: str) -> Any:
        """`load_dataset(...)` reduced to the text column. Raises BadInput."""
        import datasets

        config = self.config
        try:
            loaded = datasets.load_dataset(name, config.dataset_config, split=config.dataset_split,
                                           streaming=config.streaming)
            columns = loaded.column_names
            if columns is None:  # a stream that does not say: look at its first record
                columns = list(next(iter(loaded), {}))
        except Exception as error:  # any of a dozen kinds, all of them about what was asked for
            raise BadInput(f"dataset {name}: cannot be loaded ({one_line(error)}); want a file, a folder or a hub id, "
                           "see also dataset_config and dataset_split") from None
        if columns and config.text_column not in columns:
            raise BadInput(f"dataset {name}: no column {config.text_column}, found {', '.join(columns)}; "
                           "set text_column to one of them")
        return loaded.select_columns([config.text_column]) if columns else loaded

    def _hub(self, name: str) -> Iterator[Any]:
        # `iter(batch_size=...)` and not `for record in ...`: inside a loader worker the latter hands out only that
        # worker's shards, while the order of a stream here is the same in every worker
        for batch in self._hub_dataset(name).iter(batch_size=ROWS_PER_READ if not self.config.streaming else 16):
            yield from batch.get(self.config.text_column, ())


def _open(name: str) -> io.BufferedReader:
    try:
        return open(name, "rb")
    except OSError as error:
        raise BadInput(f"{name}: cannot be opened ({error.strerror}); give a readable file") from None


def _read_library_source(name: str) -> Iterator[Any]:
    """The source in its declared encoding (PEP 263); one whose declaration does not hold is counted as not text."""
    with _open(name) as file:
        data = file.read()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        yield data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        yield _NOT_TEXT
