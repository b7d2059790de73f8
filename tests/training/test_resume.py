"""20 updates equal 10 + kill + the rest, bit for bit; and what is used when files are broken."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import threading
import time

import pytest
from jobs import (
    Job,
    assert_same_run,
    checkpoint,
    checkpoint_contents,
    differences,
    end_all,
    line_count,
    rows,
    run_main,
    start_all,
    stopped_after,
    wait_for,
)

# an epoch is less than 20 updates of 8: every run here crosses its end
HARD = {"attention_dropout": 0.1, "micro_batch_size": 2, "save_every": 1, "keep_last": 99, "eval_every": 6}


def row_count(job: Job) -> int:
    """Training rows of an epoch, counted from a run's own tokens."""
    from memtrain.config import load_config
    from memtrain.data.prepare import prepare

    count = prepare(load_config(job.arguments(None)), 512).row_count
    assert count is not None
    return count


@pytest.fixture(scope="module")
def unbroken(job, tmp_path_factory):
    """Runs that nothing stopped, by precision and workers, each made once."""
    made = {}

    def make(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            made[key] = job.trained(tmp_path_factory.mktemp("unbroken") / "run", **changes)
        return made[key]

    return make


def test_epoch_ends_within_the_runs(job):
    assert 8 * 3 < row_count(job) < 8 * 18, "the runs below must cross the end of an epoch after update 3"


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("step", [1, 10, 13])
def test_going_on_equals_the_unbroken_run(job, unbroken, tmp_path, precision, step):
    options = {**HARD, "mixed_precision": precision}
    whole = unbroken(**options)
    run = stopped_after(whole, tmp_path / "run", step)
    outcome = job.run(run, **options)
    assert outcome.code == 0 and f"update {step} of 20" in outcome.out, outcome
    assert [row["step"] for row in rows(run) if "loss" in row] == list(range(1, 21))
    assert_same_run(whole, run, 20)


def test_no_weights_are_made_to_be_read_over(job, unbroken, tmp_path, monkeypatch):
    """Of a large model random weights take as long as reading them."""
    from memtrain.model.llama import LlamaForCausalLM

    whole = unbroken(**HARD, mixed_precision="no")
    run = stopped_after(whole, tmp_path / "run", 10)
    monkeypatch.setattr(LlamaForCausalLM, "_initialise", lambda *_: pytest.fail("made random weights"))
    assert job.run(run, **HARD, mixed_precision="no").code == 0
    assert_same_run(whole, run, 20)


def test_the_unbroken_run_is_sensitive(job, unbroken, tmp_path):
    """Dropout and the order of rows do change the result, else the tests above would prove little."""
    whole = checkpoint_contents(checkpoint(unbroken(**HARD, mixed_precision="no"), 20))
    for name, change in (("dropout", {"attention_dropout": 0.0}), ("seed", {"seed": 1})):
        other = job.trained(tmp_path / name, **{**HARD, "mixed_precision": "no", **change})
        assert differences(whole["model"], checkpoint_contents(checkpoint(other, 20))["model"]), name


def test_workers_change_nothing(job, unbroken, tmp_path):
    whole = unbroken(**HARD, mixed_precision="no")
    run = stopped_after(whole, tmp_path / "run", 10)
    assert job.run(run, **HARD, mixed_precision="no", num_workers=2).code == 0
    assert_same_run(whole, run, 20)


def test_stopped_at_3_of_10_with_accumulation_4(job, tmp_path):
    options = {"max_steps": 10, "micro_batch_size": 2, "save_every": 3, "keep_last": 9}
    whole = job.trained(tmp_path / "whole", **options)
    run = stopped_after(whole, tmp_path / "run", 3)
    job.trained(run, **options)
    assert [row["step"] for row in rows(run) if "loss" in row] == list(range(1, 11))
    assert_same_run(whole, run, 10)


def test_second_epoch_sees_exactly_the_remaining_samples(job, tmp_path, monkeypatch):
    """D1: the samples of every update, taken from the positions of rows, end to end through the script."""
    from memtrain.data import order

    count = row_count(job)
    steps = -(-2 * count // 8)
    options = {"epochs": 2, "save_every": 1, "keep_last": 99}
    seen: list[int] = []
    original = order.row_index

    def spy(position, row_count, seed):
        row = original(position, row_count, seed)
        seen.append(row)
        return row

    monkeypatch.setattr(order, "row_index", spy)
    whole = job.trained(tmp_path / "whole", **options)
    first, second = seen[:count], seen[count:]
    assert sorted(first) == sorted(second) == list(range(count)), "each row once per epoch"
    assert first != second, "shuffled anew"
    step = count // 8 + 2  # in the second epoch
    seen.clear()
    run = stopped_after(whole, tmp_path / "run", step)
    job.trained(run, **options)
    assert seen == second[8 * step - count:]
    assert_same_run(whole, run, steps)


# ---- real processes, really killed -----------------------------------------------------------------------------------

def kill_and_go_on(job, tmp_path, world_size, seconds_after, **options):
    """A run of real processes, killed somewhere after update 12, and gone on with by real processes."""
    run = tmp_path / "run"
    arguments = job.arguments(run, **options)
    processes = start_all("pretrain", arguments, tmp_path / "killed", world_size)
    try:
        wait_for(lambda: line_count(run / "metrics.jsonl") > 12, processes)
        time.sleep(seconds_after)
        assert all(process.poll() is None for process in processes), "ended before the kill"
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
    finally:
        codes = end_all(processes, 10)
    assert codes == [-signal.SIGKILL] * world_size
    assert not checkpoint(run, options["max_steps"]).exists(), "killed too late"
    if world_size == 1:
        assert job.run(run, **options).code == 0
    else:
        assert end_all(start_all("pretrain", arguments, tmp_path / "second", world_size)) == [0] * world_size
    assert f"on {world_size} x cpu" in (tmp_path / "killed.0").read_text()
    return run


def test_sigkill(job, tmp_path):
    options = {**HARD, "max_steps": 60, "save_every": 5, "eval_every": 60}
    run = kill_and_go_on(job, tmp_path, 1, 0.05, **options)
    assert_same_run(job.trained(tmp_path / "whole", **options), run, 60)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_sigkill_grid(job, tmp_path, precision, num_workers, world_size):
    options = {**HARD, "max_steps": 60, "save_every": 5, "eval_every": 60, "mixed_precision": precision,
               "num_workers": num_workers}
    run = kill_and_go_on(job, tmp_path, world_size, 0.02 * num_workers + 0.03 * world_size, **options)
    whole = tmp_path / "whole"
    processes = start_all("pretrain", job.arguments(whole, **options), tmp_path / "log", world_size)
    assert end_all(processes) == [0] * world_size
    assert_same_run(whole, run, 60)
    assert len(list(checkpoint(run, 60).glob("random_states_*.pkl"))) == world_size


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_and_says_how_to_go_on(job, unbroken, tmp_path, number, code):
    options = {**HARD, "mixed_precision": "no"}
    run, whole = tmp_path / "a run", unbroken(**options)  # a space, so that the command has something to quote
    options |= {"save_every": 100}

    def send():
        while line_count(run / "metrics.jsonl") < 4:
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    outcome = job.run(run, **options)
    thread.join(10)
    assert outcome.code == code, outcome
    assert handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)], "handlers must be put back"
    saved = [path.name for path in (run / "checkpoints").iterdir()]
    assert len(saved) == 1 and 4 <= int(saved[0].split("-")[1]) < 20
    printed = outcome.out.strip().splitlines()[-1]
    words = shlex.split(printed)
    assert words[0] == "ACCELERATE_USE_CPU=true" and words[1].startswith("python") and words[2] == "pretrain.py", printed
    assert run_main("pretrain", words[3:]).code == 0
    assert_same_run(whole, run, 20)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_signal_to_whole_process_groups(job, tmp_path, world_size, number, code):
    """A terminal and a batch system signal loader workers too."""
    run = tmp_path / "run"
    options = {**HARD, "max_steps": 100, "num_workers": 2, "save_every": 99, "eval_every": 99}
    processes = start_all("pretrain", job.arguments(run, **options), tmp_path / "log", world_size)
    try:
        wait_for(lambda: line_count(run / "metrics.jsonl") > 3, processes)
        for process in processes:
            os.killpg(process.pid, number)
    finally:
        codes = end_all(processes, 60)
    log = (tmp_path / "log.0").read_text()
    assert codes == [code] * world_size, log
    assert "to go on:" in log and "Traceback" not in log
    assert len(list((run / "checkpoints").iterdir())) == 1


# ---- broken files ----------------------------------------------------------------------------------------------------

def empty_folder(path):
    shutil.rmtree(path)
    path.mkdir()


def truncate(name):
    def do(path):
        file = path / name
        os.truncate(file, file.stat().st_size // 2)
    return do


DAMAGE = {
    "empty folder": (empty_folder, "no readable run_state.json"),
    "no run_state.json": (lambda path: (path / "run_state.json").unlink(), "no readable run_state.json"),
    "half a run_state.json": (truncate("run_state.json"), "no readable run_state.json"),
    "half an optimizer": (truncate("optimizer.bin"), "optimizer.bin has"),
    "empty model": (lambda path: os.truncate(path / "model.safetensors", 0), "model.safetensors has 0 bytes"),
    "no model": (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no random state": (lambda path: (path / "random_states_0.pkl").unlink(), "random_states_0.pkl is missing"),
    "writing did not end": (lambda path: path.rename(path.with_name(f".partial-{path.name}")),
                            "its writing did not end"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_newest_checkpoint_is_named_and_passed_over(job, unbroken, tmp_path, damage):
    whole = unbroken(**HARD, mixed_precision="no")
    run = stopped_after(whole, tmp_path / "run", 18)
    do, reason = DAMAGE[damage]
    do(checkpoint(run, 18))
    outcome = job.run(run, **HARD, mixed_precision="no")
    assert outcome.code == 0
    named = [line for line in outcome.out.splitlines() if "ignored" in line or "removed" in line]
    assert len(named) == 1 and "step-00000018" in named[0] and reason in named[0], outcome.out
    assert "update 17 of 20" in outcome.out
    assert_same_run(whole, run, 20)
    assert not list((run / "checkpoints").glob(".partial-*")), "cleared away once it is written anew"


def test_evaluation_and_export_name_what_they_pass_over(job, unbroken, tmp_path):
    run = stopped_after(unbroken(**HARD, mixed_precision="no"), tmp_path / "run", 2)
    (checkpoint(run, 2) / "run_state.json").unlink()
    outcome = run_main("export_safetensors", [run, tmp_path / "out"])
    assert outcome.code == 0 and "step-00000001" in outcome.out
    assert len(outcome.problems) == 1 and "step-00000002: ignored, no readable run_state.json" in outcome.err


def test_missing_random_state_is_said(job, unbroken, tmp_path):
    """A checkpoint of another number of processes has no random state for some: it may be used, and it is said."""
    run = stopped_after(unbroken(**HARD, mixed_precision="no"), tmp_path / "run", 18)
    path = checkpoint(run, 18)
    (path / "random_states_0.pkl").unlink()
    state = json.loads((path / "run_state.json").read_text())
    del state["files"]["random_states_0.pkl"]
    (path / "run_state.json").write_text(json.dumps(state))
    outcome = job.run(run, **HARD, mixed_precision="no")
    assert outcome.code == 0
    assert "holds no random state for process 0" in outcome.out and "update 18 of 20" in outcome.out


def test_old_checkpoints_go_after_the_new_one_is_complete(job, tmp_path, monkeypatch):
    from memtrain.training import checkpoint as checkpoints
    from memtrain.training.checkpoint_files import complete_checkpoints

    original, counts = checkpoints.seal, []

    def spy(partial, run):
        counts.append(len(complete_checkpoints(partial.parent)))
        return original(partial, run)

    monkeypatch.setattr(checkpoints, "seal", spy)
    run = job.trained(tmp_path / "run", max_steps=6, save_every=1, keep_last=2)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000005", "step-00000006"]
    assert counts == [0, 1, 2, 2, 2, 2], "both are still there while the next one is written"


def test_resume_from_a_named_checkpoint(job, unbroken, tmp_path):
    whole = unbroken(**HARD, mixed_precision="no")
    run = tmp_path / "run"
    assert job.run(run, **HARD, mixed_precision="no", resume=checkpoint(whole, 10)).code == 0
    pair = [checkpoint_contents(checkpoint(folder, 20)) for folder in (whole, run)]
    assert not differences(*pair)


def test_nothing_left_to_do(job, unbroken, tmp_path):
    run = shutil.copytree(unbroken(**HARD, mixed_precision="no"), tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    outcome = job.run(run, **HARD, mixed_precision="no")
    assert outcome.code == 0 and "nothing left to do" in outcome.out
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}, "and nothing is written"


def test_killed_between_last_checkpoint_and_export(job, unbroken, tmp_path):
    whole = unbroken(**HARD, mixed_precision="no")
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "export")
    assert job.run(run, **HARD, mixed_precision="no").code == 0
    assert (run / "export" / "model.safetensors").read_bytes() == (whole / "export" / "model.safetensors").read_bytes()
    assert rows(run) == rows(whole)
