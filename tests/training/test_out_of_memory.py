"""Out of memory in a run. The allocator really fails: under a limit in a child, or asked for more than any machine has."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jobs import (
    ROOT,
    SHAPE,
    assert_same_run,
    checkpoint,
    checkpoint_contents,
    differences,
    end_all,
    environment,
    ranks,
    rows,
    stopped_after,
    write_corpus,
)

MIB = 2**20
# what is freed goes back, and a thread (tqdm has one) reserves no 64 MiB of addresses for its own
TUNED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@pytest.fixture(scope="module")
def large(tmp_path_factory, cache):
    """A job whose activations outweigh everything: 363, 184 and 94 MiB of tensors with 8, 4 and 2 rows at a time."""
    from jobs import Job

    job = Job(tmp_path_factory.mktemp("large"), cache)
    job.model.write_text(json.dumps({**SHAPE, "intermediate_size": 1024}))
    write_corpus(job.corpus, documents=700)
    return job


LARGE: dict[str, Any] = {"seq_len": 512, "max_steps": 4, "save_every": 2, "keep_last": 9, "attention_dropout": 0.1}


def start_capped(arguments, room_bytes, folder, **extra):
    log = (folder / f"out.{extra.get('RANK', 0)}").open("wb")
    command = [sys.executable, str(Path(__file__).with_name("capped.py")), str(room_bytes),
               str(folder / f"tries.{extra.get('RANK', 0)}"), *arguments]
    with log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                                env=environment(**TUNED_MALLOC, **extra))


@pytest.fixture(scope="module")
def fitted(large, tmp_path_factory):
    """G1: a run of 8 rows an update in room for 2, the folder of what it said, and its tries."""
    folder = tmp_path_factory.mktemp("fitted")
    process = start_capped(large.arguments(folder / "run", **LARGE), 135 * MIB, folder)
    assert end_all([process], 200) == [0], (folder / "out.0").read_text()[-2000:]
    return folder, [json.loads(line) for line in (folder / "tries.0").read_text().splitlines()]


def test_smaller_micro_batches_of_the_same_samples(fitted, large, tmp_path):
    folder, tries = fitted
    said = (folder / "out.0").read_text()
    assert [one["rows"] for one in tries] == [8, 4, 2, 2, 2, 2], tries
    assert len({one["samples"] for one in tries[:3]}) == 1 and len({one["samples"] for one in tries}) == 4
    assert said.count("the same 8 samples again with micro_batch_size=") == 2 and "DefaultCPUAllocator" in said
    whole = large.trained(tmp_path / "whole", **LARGE, micro_batch_size=2)
    assert_same_run(whole, folder / "run", 4)


def test_nothing_of_a_failed_try_is_left(fitted):
    _, tries = fitted
    first, *again = [one["live_bytes"] for one in tries[:3]]
    assert all(abs(nbytes - first) < MIB // 4 for nbytes in again), tries  # a try takes 100 MiB and more


def test_the_fitted_recipe_is_kept(fitted, large, tmp_path):
    """In the resolved options, in each checkpoint, and by a resume with the first command, which asks for 8 again."""
    folder, _ = fitted
    assert yaml.safe_load((folder / "run" / "config.yaml").read_text())["micro_batch_size"] == 2
    state = json.loads((checkpoint(folder / "run", 2) / "run_state.json").read_text())
    assert state["config"]["micro_batch_size"] == 2 and state["asked"]["micro_batch_size"] == "auto"
    assert json.loads((folder / "run" / "memory.json").read_text())["recipe"]["micro_batch_size"] == 2
    run = stopped_after(folder / "run", tmp_path / "run", 2)
    outcome = large.run(run, **LARGE)
    assert outcome.code == 0 and "going on with micro_batch_size=2" in outcome.out, outcome
    assert_same_run(folder / "run", run, 4)
    again = stopped_after(run, tmp_path / "again", 2)
    assert "going on with micro" not in large.run(again, **LARGE, micro_batch_size=4).out, "unless something else is asked for"
    assert yaml.safe_load((again / "config.yaml").read_text())["micro_batch_size"] == 4


def test_two_processes_end_together(large, tmp_path):
    """Memory runs out in one; the other waits for its gradients."""
    arguments = large.arguments(tmp_path / "run", **LARGE)
    processes = [start_capped(arguments, 40 * MIB, tmp_path, **extra) for extra in ranks(2)]
    codes = end_all(processes, 120)
    said = [(tmp_path / f"out.{rank}").read_text() for rank in range(2)]
    assert codes == [3, 3], said[0][-1500:] + said[1][-1500:]
    last = [text.strip().splitlines()[-1] for text in said]
    assert last[0] == last[1] and last[0].startswith("out of memory in phase "), last
    assert "Traceback" not in said[0] + said[1]


# ---- asked for more than there is ------------------------------------------------------------------------------------

def too_much() -> torch.Tensor:
    return torch.empty(2**50)


@pytest.fixture
def fail_at(monkeypatch):
    """fail_at(name, *numbers): those calls of that function of training/step.py find no memory."""
    from memtrain.training import step as steps

    def patch(name, *numbers):
        original, calls = getattr(steps, name), []

        def function(*arguments, **options):
            calls.append(1)
            if len(calls) in numbers:
                too_much()
            return original(*arguments, **options)

        monkeypatch.setattr(steps, name, function)
        return calls

    return patch


def test_in_the_middle_of_an_update(job, tmp_path, fail_at):
    """The third of four micro-batches of update 3: gradients of the first two are forgotten, dropout is drawn again."""
    options = {"max_steps": 5, "attention_dropout": 0.1, "save_every": 2, "keep_last": 9}
    fail_at("forward_loss", 2 * 4 + 3)
    run = job.trained(tmp_path / "run", **options, micro_batch_size=2)
    before = stopped_after(run, tmp_path / "small", 2)
    (before / "memory.json").unlink()
    job.trained(before, **options, micro_batch_size=1)
    assert_same_run(before, run, 5)
    assert yaml.safe_load((run / "config.yaml").read_text())["micro_batch_size"] == 1


def test_evaluation_in_smaller_batches(job, tmp_path, fail_at, monkeypatch):
    whole = job.trained(tmp_path / "whole", max_steps=2)
    from memtrain.training import finish
    from memtrain.training import step as steps

    original, sizes = steps.evaluate, []

    def evaluate(model, accelerator, batches):
        batches = list(batches)
        sizes.append(len(batches[0]["input_ids"]))
        if sizes[-1] > 2:
            too_much()
        return original(model, accelerator, batches)

    monkeypatch.setattr(finish, "evaluate", evaluate)
    outcome = job.run(tmp_path / "run", max_steps=2)
    assert outcome.code == 0 and "going on with 2 rows at a time" in outcome.out, outcome
    assert sizes == [8, 4, 2, 2], "measured once, then whole"
    last = [[row["eval_loss"] for row in rows(run) if "eval_loss" in row] for run in (whole, tmp_path / "run")]
    assert last[0] == pytest.approx(last[1], rel=1e-6)
    assert not differences(*[checkpoint_contents(checkpoint(run, 2)) for run in (whole, tmp_path / "run")])


def fail_in_optimizer(monkeypatch, number):
    """That step of the optimizer moves a weight and then finds no memory."""
    from memtrain.optim.factory import FusedAdamW

    original, calls = FusedAdamW.step, []

    def step(self, closure=None, rows=None):
        calls.append(1)
        result = original(self, closure, rows)
        if len(calls) == number:
            too_much()
        return result

    monkeypatch.setattr(FusedAdamW, "step", step)
    return calls


def test_half_an_update_within_the_backward_starts_again(job, tmp_path, monkeypatch):
    """From the newest checkpoint, with a smaller recipe of the same result."""
    options = {"max_steps": 6, "optimizer_in_backward": True, "max_grad_norm": "none", "save_every": 2, "keep_last": 9}
    whole = job.trained(tmp_path / "whole", **options)
    for name, number in (("from a checkpoint", 3), ("from the seed", 1)):
        with monkeypatch.context() as patch:
            calls = fail_in_optimizer(patch, 20 * number - 10)
            outcome = job.run(tmp_path / name, **options, resume="none")
        assert outcome.code == 0 and "half an update was made" in outcome.out and len(calls) > 60, outcome
        assert ("going on from" in outcome.out) == (number == 3), outcome.out
        assert yaml.safe_load((tmp_path / name / "config.yaml").read_text())["gradient_checkpointing"] == "selective"
        assert_same_run(whole, tmp_path / name, 6)


@pytest.mark.parametrize("explained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_half_an_update_by_the_optimizer_ends_the_run(job, tmp_path, monkeypatch, explained):
    """Its peak has no activations: no smaller recipe would help."""
    from memtrain.memory import child

    with monkeypatch.context() as patch:
        if not explained:  # the child that finds out takes seconds
            patch.setattr(child, "ask", lambda *arguments, **more: too_much())
        fail_in_optimizer(patch, 4)
        outcome = job.run(tmp_path / "run", max_steps=6, save_every=2, keep_last=9)
    assert outcome.code == 3 and "Traceback" not in outcome.err
    last = outcome.problems[-1]
    assert last.startswith("out of memory in phase optimizer: update 4 was half made") and "step-00000002" in last
    if explained:
        assert "the largest part is optimizer" in last, last
        assert "the smallest change that takes less" in last and " is optimizer=adafactor (" in last, last
    assert not checkpoint(tmp_path / "run", 4).exists() and not (tmp_path / "run" / "export").exists()
    job.trained(tmp_path / "run", max_steps=6, save_every=2, keep_last=9)
    assert_same_run(job.trained(tmp_path / "whole", max_steps=6), tmp_path / "run", 6)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory, says a bug"), ValueError("memory"),
                                   RuntimeError("shapes differ")], ids=str)
def test_a_bug_is_not_tried_again(job, tmp_path, monkeypatch, error):
    from memtrain.training import step as steps

    calls = []

    def forward_loss(*arguments):
        calls.append(1)
        raise error

    monkeypatch.setattr(steps, "forward_loss", forward_loss)
    with pytest.raises(type(error), match=str(error)):
        job.run(tmp_path / "run", max_steps=2)
    assert len(calls) == 1


def test_a_save_that_finds_no_memory_blames_no_disk(job, tmp_path, monkeypatch):
    from memtrain.memory import child
    from memtrain.training import checkpoint as checkpoints

    monkeypatch.setattr(checkpoints, "seal", lambda *arguments: too_much())
    monkeypatch.setattr(child, "ask", lambda *arguments, **more: too_much())  # and neither does what would explain it
    outcome = job.run(tmp_path / "run", max_steps=2)
    last = outcome.problems[-1]
    assert outcome.code == 3 and last.startswith("out of memory in phase save") and "plan_memory.py" in last, outcome


# ---- rules -----------------------------------------------------------------------------------------------------------

def test_what_is_out_of_memory():
    from memtrain.training.out_of_memory import is_out_of_memory

    with pytest.raises(RuntimeError) as real:
        too_much()
    assert is_out_of_memory(real.value) and is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("x"))
    assert not is_out_of_memory(RuntimeError("out of memory")) and not is_out_of_memory(OSError(12, "Cannot allocate memory"))


@pytest.mark.parametrize(("options", "expected"), [
    ({"global_batch_size": 8}, [4, 2, 1, "selective", "full", 128, 32]),
    ({"global_batch_size": 9}, [3, 1, "selective", "full", 128, 32]),
    ({"global_batch_size": 14, "micro_batch_size": 7}, [2, 1, "selective", "full", 128, 32]),
    ({"global_batch_size": 1, "offload_activations": True}, ["full", 128, 32]),
    ({"global_batch_size": 1, "gradient_checkpointing": "selective_deep", "checkpointed_layers": 1}, ["all", "full", 128, 32]),
    ({"global_batch_size": 8, "optimizer_in_backward": True, "gradient_checkpointing": "full"}, [4, 2, 1, 1024, 256, 64, 16]),
    ({"global_batch_size": 1, "gradient_checkpointing": "full", "loss_chunk_tokens": 70}, [17]),
], ids=str)
def test_the_order_of_smaller_recipes(options, expected, make_shape):
    from memtrain.options import RunConfig
    from memtrain.training.out_of_memory import smaller_recipe

    config, found = RunConfig(seq_len=512, **options), []
    while (changes := smaller_recipe(config, make_shape(vocab_size=512), "cpu")) is not None:
        config = replace(config, **changes)
        found.append(next(iter(changes.values())))
    assert found == expected
