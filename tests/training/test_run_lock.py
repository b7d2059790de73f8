"""One run at a time in a folder, whatever became of the last one."""

from __future__ import annotations

import os
import signal
import time

import pytest
from jobs import end_all, line_count, start, wait_for

from memtrain.command import BadInput
from memtrain.training.check import LOCK_NAME
from memtrain.training.run_lock import _locked, run_lock


def hold(path, with_child=False):
    """A process that holds the lock until it is killed (`with_child`: and has a child that lives on)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _locked(path, lambda line: None)
        if with_child and os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    os.close(read), os.close(write)
    return pid


def test_a_living_holder_is_named_and_a_dead_one_is_no_hindrance(tmp_path):
    path = tmp_path / LOCK_NAME
    for with_child in (False, True):
        pid = hold(path, with_child)
        with pytest.raises(BadInput, match=f"process {pid} on .* is training there now; .*another output_dir"):
            _locked(path, print)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        said: list[str] = []
        os.close(_locked(path, said.append))
        assert len(said) == 1 and f"process {pid} on" in said[0] and "taken over" in said[0]


def test_a_number_used_again_holds_nothing(tmp_path):
    """The file of a dead run names a process that lives: this one."""
    (tmp_path / LOCK_NAME).write_text(f"process {os.getpid()} on here\n")
    said: list[str] = []
    os.close(_locked(tmp_path / LOCK_NAME, said.append))
    assert "taken over" in said[0]


def test_nothing_is_left(tmp_path, fresh_accelerate):
    from accelerate import Accelerator

    output, said = tmp_path / "a" / "b", []
    with run_lock(output, Accelerator(cpu=True), said.append):
        assert (output / LOCK_NAME).read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / "a").exists() and not said, "a run that wrote nothing leaves no folder"
    with run_lock(output, Accelerator(cpu=True), said.append):
        (output / "config.yaml").write_text("x")
    assert [path.name for path in output.iterdir()] == ["config.yaml"] and not said


def test_two_real_runs(job, tmp_path):
    run = tmp_path / "run"
    options = {"max_steps": 100_000, "save_every": 5}
    first = start("pretrain", job.arguments(run, **options), tmp_path / "log")
    try:
        wait_for(lambda: line_count(run / "metrics.jsonl") > 6, [first])
        outcome = job.run(run, **options)
        assert outcome.code == 2 and len(outcome.problems) == 1, outcome
        assert f"process {first.pid} on" in outcome.err and "is training there now" in outcome.err
        first.kill()
    finally:
        end_all([first], 10)
    assert not (run / "export").exists()
    outcome = job.run(run, **options, resume="none")
    assert outcome.code == 2 and "resume=auto" in outcome.err, "its own lock is gone, the checkpoint is there"
    outcome = job.run(run, max_steps=1, save_every=5)
    assert outcome.code == 0 and "taken over" not in outcome.out, "the refused run gave it back"


def test_killed_before_anything_was_written(job, tmp_path):
    """The lock and a half-written config.yaml are no files of somebody else."""
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK_NAME).write_text("process 1 on there\n")
    (run / "config.yaml.tmp").write_text("mod")
    outcome = job.run(run, max_steps=1)
    assert outcome.code == 0 and "ended without a word" in outcome.out and "config.yaml.tmp: removed" in outcome.out
    assert not list(run.glob(".*"))
