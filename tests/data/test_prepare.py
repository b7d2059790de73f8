"""From options to rows: the same on every process, and every refusal one line."""

import json
import subprocess
import sys

import pytest

from memtrain.command import BadInput
from memtrain.data import prepare as module
from memtrain.data import token_store
from memtrain.data.prepare import prepare, prepare_evaluation
from memtrain.data.token_store import held_out_share

LINES = [f"line {i} of some text, made of words\n" for i in range(40)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return path


@pytest.fixture
def folder(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def all_rows(rows):
    return [rows[i].tolist() for i in range(len(rows))]


def refused(*arguments):
    with pytest.raises(BadInput) as caught:
        prepare(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_hold_all_text_once(make, jsonl):
    data = prepare(make(jsonl, eval_fraction=0.2), 300)
    held_out = [line for line in LINES if held_out_share(line) < 0.2]
    texts = [line for line in LINES if line not in held_out]
    for rows, wanted in ((data.train, texts), (data.evaluation, held_out)):
        cut = all_rows(rows)
        stream = [token for row in cut for token in row[:-1]] + cut[-1][-1:]
        assert data.tokenizer.decode(stream) == "".join(f"<|begin_of_text|>{t}<|end_of_text|>" for t in wanted)
    assert data.eval_bytes == sum(len(line.encode()) for line in held_out) > 0
    assert (data.begin_id, data.end_id, data.pad_id) == (0, 1, 2) and data.report.documents == len(LINES)
    lengths = [len(row) for row in all_rows(data.train)]
    assert data.row_count == len(lengths) and data.target_count == sum(lengths) - len(lengths)


def test_a_second_process_finds_the_same(make, jsonl, monkeypatch):
    config = make(jsonl, eval_fraction=0.2)
    first = prepare(config, 300)
    for name in ("train_tokenizer", "document_ids"):
        monkeypatch.setattr(module, name, lambda *a: pytest.fail("done again"))
    monkeypatch.setattr(token_store, "document_ids", lambda *a: pytest.fail("done again"))
    second = prepare(config, 300)
    assert second.fingerprint == first.fingerprint and second.report == first.report
    assert second.eval_bytes == first.eval_bytes
    assert all_rows(second.train) == all_rows(first.train) and all_rows(second.evaluation) == all_rows(first.evaluation)


def test_the_fingerprint_follows_rows(make, jsonl):
    plain = prepare(make(jsonl), 300).fingerprint
    others = [prepare(make(jsonl, **options), vocab_size).fingerprint for options, vocab_size in (
        ({"seq_len": 9}, 300), ({"packing": "padded"}, 300), ({"eval_fraction": 0.3}, 300), ({}, 290))]
    assert len({plain, *others}) == 5
    assert prepare(make(jsonl, seed=5, num_workers=3), 300).fingerprint == plain


def test_f3_tiny_text(make, tmp_path):
    (tmp_path / "tiny.txt").write_bytes(b"five words are here now.\n")
    message = refused(make(tmp_path / "tiny.txt", seq_len=1024), 259)
    assert "has 27 tokens" in message and "at least 1025" in message, message
    assert "at least 1025" in refused(make(tmp_path / "tiny.txt", seq_len=1024, eval_fraction=0.01), 259)


def test_tokenizer_choices(make, jsonl, folder, tokenizer):
    trained = prepare(make(jsonl), 270)
    assert len(trained.tokenizer) == 270
    for data in (prepare(make(jsonl), 300, folder), prepare(make(jsonl, tokenizer=folder), 300, "not looked at")):
        assert data.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert len(prepare(make(jsonl, tokenizer="train"), 270, folder).tokenizer) == 270
    assert "at least 259" in refused(make(jsonl), 100)


def test_a_vocabulary_smaller_than_its_tokenizer_is_refused(make, jsonl, folder):
    prepare(make(jsonl, tokenizer=folder), 257)  # padded to 320
    message = refused(make(jsonl, tokenizer=folder), 256)
    assert "vocabulary smaller than its tokenizer" in message and "300" in message, message


def test_problems_of_sources_come_together(make, tmp_path):
    with pytest.raises(BadInput) as caught:
        prepare(make(tmp_path / "a.txt", tmp_path / "b.txt"), 300)
    assert str(caught.value).count("no such file") == 2


def test_evaluation_of_another_dataset(make, jsonl, tokenizer):
    rows, text_bytes = prepare_evaluation(make(jsonl, eval_fraction=0.2, packing="padded", seq_len=100), tokenizer)
    assert text_bytes == sum(map(len, LINES)), "nothing is held out"
    assert [tokenizer.decode(row[1:-1]) for row in all_rows(rows)] == LINES
    streamed, streamed_bytes = prepare_evaluation(make(jsonl, streaming=True, packing="padded", seq_len=100), tokenizer)
    assert all_rows(streamed) == all_rows(rows) and streamed_bytes == text_bytes


@pytest.mark.parametrize("streaming", [False, True])
def test_updates_and_evaluation_batches(make, jsonl, folder, streaming):
    config = make(jsonl, tokenizer=folder, streaming=streaming, eval_fraction=0.2, packing="padded", seq_len=64)
    data = prepare(config, 300)
    ends = []
    for update, _ in zip(data.updates(seed=0, start_position=0, total=None, global_batch_size=4, micro_batch_size=2,
                                      rank=0, world_size=1), range(3), strict=False):
        ends.append(update.end_position)
        assert [tuple(batch["input_ids"].shape) for batch in update.micro_batches] == [(2, 64)] * 2
        assert "document_lengths" not in update.micro_batches[0]
    assert ends == [4, 8, 12]
    held_out = [line for line in LINES if held_out_share(line) < 0.2]
    found = [row[1:int((t != -100).sum())].tolist() for batch in data.evaluation_batches(3, 0, 1)
             for row, t in zip(batch["input_ids"], batch["targets"], strict=True) if (t != -100).any()]
    assert [data.tokenizer.decode(ids) for ids in found] == held_out
    assert data.eval_bytes == sum(map(len, held_out))


def test_a_stream_trains_on_what_it_is_not_evaluated_on(make, jsonl, folder):
    config = make(jsonl, tokenizer=folder, streaming=True, eval_fraction=0.2)
    data = prepare(config, 300)
    assert data.row_count is None and data.target_count is None
    assert callable(data.train) and list(data.train()) == [line for line in LINES if held_out_share(line) >= 0.2]
    assert prepare(config, 300).fingerprint == data.fingerprint
    assert "holds out none" in refused(make(jsonl, tokenizer=folder, streaming=True, eval_fraction=1e-9), 300)
    nothing = prepare(make(jsonl, tokenizer=folder, streaming=True), 300)
    assert nothing.evaluation is None and nothing.eval_bytes == 0 and list(nothing.evaluation_batches(1, 0, 1)) == []
    assert "cannot be trained on a stream" in refused(make(jsonl, streaming=True), 300)


def test_document_mask_reaches_the_micro_batches(make, jsonl):
    data = prepare(make(jsonl, document_mask=True, eval_fraction=0.2), 300)
    update = next(iter(data.updates(seed=0, start_position=0, total=None, global_batch_size=2, micro_batch_size=2,
                                    rank=0, world_size=1)))
    assert sum(update.micro_batches[0]["document_lengths"]) == 2 * 8
    assert sum(next(data.evaluation_batches(2, 0, 1))["document_lengths"]) == 2 * 8


def test_cheap_checks_do_not_import_heavy_packages():
    code = ("import sys; import memtrain.data.prepare, memtrain.data.corpus;"
            "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules])")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
