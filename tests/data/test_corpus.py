"""Reading: every kind of source, what is skipped and counted, what is refused and how it is said."""

import gc
import json
import os
import sysconfig
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from memtrain.command import BadInput
from memtrain.data import corpus
from memtrain.data.corpus import Corpus, CorpusReport, source_problems

NOT_UTF8 = b"good line one\n\xff\xfebad bytes here\n\nlast line\n"
EMPTY_RECORDS = (b'{"text": ""}\n{"text": null}\n{"text": "   "}\n{"other": 1}\n'
                 b'{"text": "one good line of text, long enough to make a few tokens."}\n')


def read(config):
    report = CorpusReport()
    return list(Corpus(config).documents(report)), report


def refused(config):
    with pytest.raises(BadInput) as caught:
        read(config)
    message = str(caught.value)
    assert "\n" not in message, f"want one line, got {message!r}"
    return message


def test_f1_bytes_that_are_not_utf8_are_named_or_replaced_and_counted(make, tmp_path):
    path = tmp_path / "not_utf8.txt"
    path.write_bytes(NOT_UTF8)
    message = refused(make(path))
    assert str(path) in message and "byte 14 " in message and "encoding_errors=replace" in message, message
    texts, report = read(make(path, encoding_errors="replace"))
    assert texts == [NOT_UTF8.decode("utf-8", "replace")] and "\ufffd\ufffdbad" in texts[0]
    assert report.replaced == 2, "two bytes, neither of which starts a character"


def test_replacement_characters_that_were_there_are_not_counted(make, tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufffd".encode() + b"\xe2\xef\xbf\xbd x \xf0\x9f")
    texts, report = read(make(tmp_path / "a.txt", encoding_errors="replace"))
    assert texts == ["\ufffd\ufffd\ufffd x \ufffd"] and report.replaced == 2


def test_f2_records_without_text_are_skipped_and_counted(make, tmp_path):
    (tmp_path / "e.jsonl").write_bytes(EMPTY_RECORDS)
    texts, report = read(make(tmp_path / "e.jsonl"))
    assert texts == ["one good line of text, long enough to make a few tokens."]
    assert report.skipped == {"blank": 2, "null": 1, "missing": 1} and report.documents == 1
    assert report.text_bytes == len(texts[0])
    assert "2 blank, 1 missing, 1 null" in str(report)


def test_nothing_but_skipped_records_is_refused_with_counts(make, tmp_path):
    (tmp_path / "e.jsonl").write_bytes(b'{"text": ""}\n{"text": 7}\n{"body": "x"}\n')
    message = refused(make(tmp_path / "e.jsonl"))
    assert "all 3 records skipped (1 blank, 1 missing, 1 not text)" in message, message


@pytest.mark.parametrize("name", ["e.jsonl"])
def test_an_empty_file_is_refused(make, tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert "no documents" in refused(make(tmp_path / name))


def test_blank_file_is_refused(make, tmp_path):
    (tmp_path / "a.txt").write_bytes(b" \n")
    assert "1 blank" in refused(make(tmp_path / "a.txt"))


@pytest.mark.parametrize(("line", "words"), [
    (b'{"text": "a"', "line 2 is not JSON"), (b'["a"]', "line 2 holds list"),
    (b'{"text": "a\\ud800"}', "line 2 has a lone surrogate"), (b"[" * 100_000, "line 2 is not JSON")])
def test_a_bad_json_line_is_named(make, tmp_path, line, words):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    message = refused(make(tmp_path / "a.jsonl"))
    assert words in message and "a.jsonl" in message, message


def test_json_byte_offset_counts_from_the_start_of_the_file(make, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    assert "byte 27 " in refused(make(tmp_path / "a.jsonl"))


def test_json_lines_end_only_at_line_feeds(make, tmp_path):
    text = "one\u2028two\u0085three"
    record = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text("\ufeff" + record + "\n\n" + record, encoding="utf-8")
    assert read(make(tmp_path / "a.jsonl"))[0] == [text, text]


def test_lone_surrogates_are_replaced_on_request(make, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    texts, report = read(make(tmp_path / "a.jsonl", encoding_errors="replace"))
    assert texts == ["a\ufffdb \U0001f600"] and report.replaced == 1


def test_parquet(make, tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["eins", None, " ", "zwei"], "n": [1, 2, 3, 4]}), path)
    texts, report = read(make(path, text_column="body"))
    assert texts == ["eins", "zwei"] and report.skipped == {"null": 1, "blank": 1}
    message = refused(make(path))
    assert "no column text, found body, n" in message, message
    assert "4 not text" in refused(make(path, text_column="n"))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    assert "cannot be read as parquet" in refused(make(tmp_path / "b.parquet"))


def test_parquet_with_bytes_that_are_not_utf8(make, tmp_path):
    path = tmp_path / "a.parquet"
    column = pyarrow.array([b"fine", None, b"ba\xffd"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    assert "row 2: byte 2 is not UTF-8" in refused(make(path))
    texts, report = read(make(path, encoding_errors="replace"))
    assert texts == ["fine", "ba\ufffdd"] and report.replaced == 1


def test_text_files_are_one_document_each_in_sorted_order(make, tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_bytes(b"\xef\xbb\xbf" + f"line {name}\r\n\r\nmore".encode())
    texts, _ = read(make(tmp_path / "c.txt", tmp_path / "*.txt"))
    assert texts == [f"line {name}\r\n\r\nmore" for name in "cab"], "given order, then sorted; no file twice"


def test_the_standard_library_is_complete_and_without_tests(make):
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in corpus.standard_library_files()]
    assert names == sorted(names) and {"os.py", "json/decoder.py", "unittest/case.py"} <= set(names)
    assert not [n for n in names if {"test", "tests", "idle_test", "site-packages"} & set(n.split("/"))]
    texts, report = read(make("python-stdlib"))
    assert report.documents == len(texts) > 300 and report.replaced == 0
    assert report.documents + sum(report.skipped.values()) == len(names)
    assert (root / "os.py").read_bytes().decode() in texts


def test_library_sources_follow_their_declared_encoding(tmp_path):
    (tmp_path / "a.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    (tmp_path / "b.py").write_bytes(b"x = '\xe9'\n")
    assert next(corpus._read_library_source(str(tmp_path / "a.py"))) == "# coding: latin-1\nx = 'é'\n"
    assert next(corpus._read_library_source(str(tmp_path / "b.py"))) is corpus._NOT_TEXT


def test_all_problems_are_found_before_anything_is_read(make, tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "fine.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(os, "access", lambda name, mode: "secret" not in str(name))  # root may read anything
    words = ["missing.txt", "no*.jsonl", "a.csv", "secret.txt", "empty", "fine.txt", "no/such/folder"]
    problems = source_problems(make(*(tmp_path / word for word in words)))
    wanted = ["no such file", "no file matches", "suffix .csv", "no permission", "no data files", "not a hub id"]
    assert len(problems) == len(wanted), problems
    assert all(want in problem for want, problem in zip(wanted, problems, strict=True)), problems
    assert source_problems(make("owner/name", "python-stdlib", tmp_path / "fine.txt")) == []


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_is_read_by_load_dataset(make, tmp_path, streaming):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in ["x", None, "y"]))
    texts, report = read(make(folder, streaming=streaming))
    assert texts == ["x", "y"] and report.skipped == {"null": 1}
    assert "no column body, found text, n" in refused(make(folder, text_column="body", streaming=streaming))
    assert "cannot be loaded" in refused(make(folder, dataset_split="nope", streaming=streaming))


def test_a_hub_failure_is_one_line(make, monkeypatch):
    import datasets

    def fail(*args, **options):
        raise ConnectionError("Couldn't reach\n'owner/name' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    message = refused(make("owner/name"))
    assert "dataset owner/name: cannot be loaded (Couldn't reach 'owner/name' on the Hub)" in message, message


def test_fingerprint_follows_content_and_not_place_or_time(make, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("some text")
    os.utime(tmp_path / "two" / "a.txt", (1, 1))
    first = Corpus(make(tmp_path / "one" / "a.txt")).fingerprint()
    assert Corpus(make(tmp_path / "two" / "*.txt")).fingerprint() == first
    assert Corpus(make(tmp_path / "one" / "a.txt", encoding_errors="replace")).fingerprint() != first
    (tmp_path / "two" / "a.txt").write_text("some texT")
    assert Corpus(make(tmp_path / "two" / "a.txt")).fingerprint() != first
    (tmp_path / "one" / "b.txt").write_text("")
    both = Corpus(make(tmp_path / "one" / "*.txt")).fingerprint()
    assert both != first, "another file, though without a byte"


def test_reading_many_records_takes_constant_memory(make, tmp_path):
    with open(tmp_path / "a.jsonl", "w") as file:
        for _ in range(2000):
            file.write(json.dumps({"text": "x" * 5000}) + "\n")
    documents = Corpus(make(tmp_path / "a.jsonl")).documents()
    next(documents)
    gc.collect()
    tracemalloc.start()
    count = 1 + sum(1 for _ in documents)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 2000 and peak_bytes < 500_000, f"{peak_bytes} bytes for a file of 10 MB"
