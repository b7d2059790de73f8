"""Which rows each process sees: every row once per epoch, resumable anywhere, the same with any number of workers."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from memtrain.command import BadInput
from memtrain.data.order import (
    Share,
    StreamingUpdates,
    check_row_count,
    epoch_order,
    eval_batches,
    make_loader,
    row_index,
    update_loader,
)
from memtrain.data.packing import PaddedRows, Tokens
from memtrain.data.prepare import training_documents
from memtrain.data.tokenizer import document_ids
from memtrain.options import RunConfig

SEQ_LEN = 4


def numbered_rows(row_count):
    """Row i starts with the token 10 + i and has 1 to 4 targets."""
    documents = [np.array([10 + i, *[5] * (1 + i % 4)], dtype=np.uint16) for i in range(row_count)]
    return PaddedRows(Tokens(np.concatenate(documents), np.cumsum([0, *map(len, documents)]), 0), SEQ_LEN)


def loader(rows, **options):
    values = {"seed": 3, "start_position": 0, "total": None, "global_batch_size": 4, "micro_batch_size": 1, "rank": 0,
              "world_size": 1, "seq_len": SEQ_LEN, "pad_id": 0}
    return update_loader(rows, **{**values, **options})


def seen(batch):
    """Numbers of the real rows of a micro-batch."""
    return [int(row[0]) - 10 for row, targets in zip(batch["input_ids"], batch["targets"], strict=True)
            if (targets != -100).any()]


def seen_in(updates):
    return [row for update in updates for batch in update.micro_batches for row in seen(batch)]


def test_every_row_once_per_epoch_and_each_epoch_anew():
    orders = [[row_index(epoch * 50 + i, 50, 7) for i in range(50)] for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] and orders[0] != list(range(50))
    assert [row_index(i, 50, 8) for i in range(50)] != orders[0], "another seed, another order"


def test_order_is_pinned():
    """A checkpoint of today resumes with the same samples under tomorrow's numpy."""
    assert epoch_order(8, 0, 0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4], "resumed runs would see other samples than before"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_d1_resumed_anywhere_sees_what_is_left(num_workers):
    rows, total = numbered_rows(10), 25  # two epochs and a half; updates of 4 reach over the epochs' ends
    unbroken = list(loader(rows, total=total, num_workers=num_workers))
    samples = seen_in(unbroken)
    assert sorted(samples[:10]) == sorted(samples[10:20]) == list(range(10)) and len(samples) == total
    assert [update.end_position for update in unbroken] == [4, 8, 12, 16, 20, 24, 25]
    for stop in (1, 4):
        position = unbroken[stop - 1].end_position
        resumed = list(loader(rows, total=total, start_position=position, num_workers=num_workers))
        assert samples[:position] + seen_in(resumed) == samples
        for a, b in zip(resumed, unbroken[stop:], strict=True):
            assert a.target_count == b.target_count
            for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
                assert all(torch.equal(x[name], y[name]) for name in ("input_ids", "targets"))


@pytest.mark.parametrize(("global_batch_size", "micro_batch_size", "world_size"),
                         [(4, 2, 2), (8, 1, 3), (3, 4, 2), (6, 2, 1)])
def test_the_samples_of_an_update_do_not_depend_on_how_it_is_computed(global_batch_size, micro_batch_size, world_size):
    rows, total = numbered_rows(13), 31
    plain = list(loader(rows, total=total, global_batch_size=global_batch_size))
    ranks = [list(loader(rows, total=total, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size,
                         rank=rank, world_size=world_size)) for rank in range(world_size)]
    for updates in zip(plain, *ranks, strict=True):
        wanted, *shares = updates
        steps = -(-wanted.row_count // (micro_batch_size * world_size))
        assert {len(share.micro_batches) for share in shares} == {steps}, "processes would wait for each other"
        in_order = [row for step in range(steps) for share in shares for row in seen(share.micro_batches[step])]
        assert in_order == seen_in([wanted])
        counted = sum(int((b["targets"] != -100).sum()) for share in shares for b in share.micro_batches)
        assert {share.target_count for share in updates} == {counted}, "real targets over all processes"
        assert {share.end_position for share in updates} == {wanted.end_position}
        assert all(b["input_ids"].shape == (micro_batch_size, SEQ_LEN) for s in shares for b in s.micro_batches)


def test_h1_nine_rows_on_two_processes():
    first, second = (list(loader(numbered_rows(9), total=9, global_batch_size=2, rank=rank, world_size=2))
                     for rank in (0, 1))
    assert len(first) == len(second) == 5
    assert (len(seen_in(first)), len(seen_in(second))) == (5, 4), "the odd row goes to process 0, padding to process 1"
    assert sorted(seen_in(first) + seen_in(second)) == list(range(9))
    last = [updates[-1] for updates in (first, second)]
    assert [update.row_count for update in last] == [1, 1] and [len(u.micro_batches) for u in last] == [1, 1]
    assert last[0].target_count == last[1].target_count == int((last[0].micro_batches[0]["targets"] != -100).sum())
    assert (last[1].micro_batches[0]["targets"] == -100).all()


def test_h1_fewer_rows_than_processes_is_refused():
    check_row_count(2, 2, 2)
    with pytest.raises(BadInput, match="1 rows for 2 processes"):
        check_row_count(1, 4, 2)
    with pytest.raises(BadInput, match="global_batch_size=1 for 2 processes"):
        check_row_count(9, 1, 2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_global_random_state_is_neither_read_nor_changed(num_workers):
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before, before_numpy = torch.get_rng_state(), repr(np.random.get_state())
        runs.append(seen_in(loader(numbered_rows(6), total=12, num_workers=num_workers)))
        assert torch.equal(torch.get_rng_state(), before) and repr(np.random.get_state()) == before_numpy
    assert runs[0] == runs[1]


def test_a_run_without_end_goes_on():
    iterator = iter(loader(numbered_rows(3)))
    assert len(seen_in([next(iterator) for _ in range(50)])) == 200


def test_lengths_pinning_and_document_lengths():
    assert len(loader(numbered_rows(9), total=9, start_position=4)) == 2
    update = next(iter(loader(numbered_rows(9), micro_batch_size=2, end_id=5)))
    assert all(sum(batch["document_lengths"]) == 2 * SEQ_LEN for batch in update.micro_batches)
    if torch.cuda.is_available():
        assert update.pin_memory().micro_batches[0]["input_ids"].is_pinned()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 5])
@pytest.mark.parametrize("world_size", [1, 2])
def test_h3_evaluation_covers_every_row_once(micro_batch_size, world_size):
    rows = numbered_rows(5)
    ranks = [list(eval_batches(rows, micro_batch_size, rank, world_size, SEQ_LEN, 0)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1, "processes would wait for each other"
    order = [row for step in zip(*ranks, strict=True) for batch in step for row in seen(batch)]
    assert order == list(range(5))
    targets = sum(int((batch["targets"] != -100).sum()) for batches in ranks for batch in batches)
    assert targets == rows.total_target_count


# ---- streams --------------------------------------------------------------------------------------------------------

TEXTS = [f"text {i}" + " more" * (i % 3) for i in range(11)]


def stream(tokenizer, packing, *, rank=0, world_size=1, documents=None, epochs=1, start_position=0, seq_len=64):
    share = Share(4, 1, rank, world_size, seq_len, 2)
    return StreamingUpdates(documents or partial(iter, TEXTS), tokenizer, packing, share, epochs=epochs,
                            start_position=start_position)


def texts_in(tokenizer, updates):
    """Documents in padded rows."""
    found = []
    for update in updates:
        for batch in update.micro_batches:
            for row, targets in zip(batch["input_ids"], batch["targets"], strict=True):
                if (real := int((targets != -100).sum())):
                    assert int(targets[real - 1]) == 1
                    found.append(tokenizer.decode(row[1:real].tolist()))
    return found


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("source", ["iterator", "folder"])
def test_f6_a_stream_gives_every_document_once_per_epoch(tokenizer, tmp_path, num_workers, world_size, source):
    documents = None
    if source == "folder":  # through load_dataset(streaming=True), of which workers would each get their shards only
        for shard in (0, 1):
            lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[shard * 6:shard * 6 + 6]]
            (tmp_path / f"{shard}.jsonl").write_text("".join(lines))
        documents = partial(training_documents, RunConfig(dataset=[str(tmp_path)], streaming=True, eval_fraction=0.0))
    ranks = [list(make_loader(stream(tokenizer, "padded", rank=rank, world_size=world_size, documents=documents),
                              num_workers=num_workers)) for rank in range(world_size)]
    assert sorted(text for updates in ranks for text in texts_in(tokenizer, updates)) == sorted(TEXTS)
    assert {len(updates) for updates in ranks} == {3} and [u.end_position for u in ranks[0]] == [4, 8, 11]
    for updates in zip(*ranks, strict=True):
        counted = sum(int((b["targets"] != -100).sum()) for update in updates for b in update.micro_batches)
        assert {update.target_count for update in updates} == {counted}
        assert len({len(update.micro_batches) for update in updates}) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_packed_stream_predicts_the_tokens_of_the_source_in_order(tokenizer, num_workers):
    wanted = np.concatenate(list(document_ids(tokenizer, TEXTS))).tolist()[1:]
    updates = list(make_loader(stream(tokenizer, "packed", epochs=2, seq_len=8), num_workers=num_workers))
    found = [int(t) for u in updates for b in u.micro_batches for t in b["targets"][b["targets"] != -100]]
    assert found == wanted * 2, "an epoch ends with its last short row, and the next starts anew"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_resumes_at_any_position(tokenizer, num_workers):
    unbroken = list(make_loader(stream(tokenizer, "padded", epochs=2), num_workers=num_workers))
    position = unbroken[3].end_position
    assert position == 16, "in the second epoch"
    resumed = list(make_loader(stream(tokenizer, "padded", epochs=2, start_position=position), num_workers=num_workers))
    assert texts_in(tokenizer, unbroken[4:]) == texts_in(tokenizer, resumed) == (TEXTS * 2)[16:]
    assert [u.end_position for u in resumed] == [u.end_position for u in unbroken[4:]]


def test_an_endless_stream_without_documents_is_refused(tokenizer):
    with pytest.raises(BadInput, match="holds no document to train on"):
        next(iter(stream(tokenizer, "padded", documents=partial(iter, []), epochs=None)))
