"""Writing behind the training: the same files, a short pause, one at a time, and no error without a word."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from jobs import checkpoint, differences, rows

from memtrain.training import saver as savers

OPTIONS = {"max_steps": 12, "save_every": 2, "keep_last": 99, "attention_dropout": 0.1, "micro_batch_size": 4}


@pytest.fixture(scope="module")
def blocking(job, tmp_path_factory):
    return job.trained(tmp_path_factory.mktemp("blocking") / "run", **OPTIONS)


def assert_same_files(one, other, steps):
    for step in steps:
        left, right = checkpoint(one, step), checkpoint(other, step)
        names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in (left, right)]
        assert names[0] == names[1] and len(names[0]) > 6
        for name in names[0]:
            if (left / name).is_file() and name != "run_state.json":
                assert (left / name).read_bytes() == (right / name).read_bytes(), (step, name)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_4bit"])
def test_the_same_files_as_a_blocking_save(job, blocking, tmp_path, monkeypatch, optimizer):
    """While the training changes the very tensors that are being written."""
    original = savers.save
    monkeypatch.setattr(savers, "save", lambda *a, **k: time.sleep(0.05) or original(*a, **k))
    if optimizer != "adamw":
        blocking = job.trained(tmp_path / "blocking", **OPTIONS, optimizer=optimizer)
    run = job.trained(tmp_path / "run", **OPTIONS, optimizer=optimizer, save_async=True)
    assert_same_files(blocking, run, range(2, 13, 2))
    assert rows(run) == rows(blocking)


def test_it_is_loaded_by_accelerate(job, blocking, tmp_path, fresh_accelerate):
    """`load_state` of a model and optimizer built by hand finds what was trained."""
    from accelerate import Accelerator

    from memtrain.config import load_config
    from memtrain.model.presets import model_config
    from memtrain.training.step import build

    run = job.trained(tmp_path / "run", **OPTIONS, save_async=True)
    config = load_config(job.arguments(run, **OPTIONS))
    state = build(config, model_config(config), Accelerator(cpu=True, step_scheduler_with_optimizer=False), 12)
    state.accelerator.load_state(str(checkpoint(run, 6)))
    saved = torch.load(checkpoint(blocking, 6) / "optimizer.bin", weights_only=True)
    assert not differences(saved["state"], state.optimizer.state_dict()["state"])
    assert state.scheduler.scheduler.last_epoch == 6


def slow_writing(monkeypatch, seconds):
    """Every background write takes so long; returns (when each began, when each ended)."""
    original, begun, ended = savers.complete, [], []

    def complete(*arguments):
        if threading.current_thread() is threading.main_thread():
            return original(*arguments)
        begun.append(time.monotonic())
        time.sleep(seconds)
        original(*arguments)
        ended.append(time.monotonic())

    monkeypatch.setattr(savers, "complete", complete)
    return begun, ended


def test_training_goes_on_and_one_is_written_at_a_time(job, blocking, tmp_path, monkeypatch):
    begun, ended = slow_writing(monkeypatch, 0.2)
    counts = []
    original = savers.Saver.check

    def check(self):
        counts.append(self.thread is not None and self.thread.is_alive())
        original(self)

    monkeypatch.setattr(savers.Saver, "check", check)
    run = job.trained(tmp_path / "run", **OPTIONS, save_async=True)
    assert any(counts), "an update was made while a checkpoint was being written"
    assert len(begun) == len(ended) == 5, "all but the last, which nothing follows"
    assert all(later >= earlier for later, earlier in zip(begun[1:], ended, strict=False)), "never two at a time"
    assert_same_files(blocking, run, range(2, 13, 2))


def test_a_stop_waits_for_what_is_being_written(job, tmp_path, monkeypatch):
    begun, ended = slow_writing(monkeypatch, 0.3)

    def send():
        while not begun:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    outcome = job.run(tmp_path / "run", **OPTIONS, save_async=True)
    assert outcome.code == 143 and len(begun) == len(ended) > 0
    assert not list((tmp_path / "run" / "checkpoints").glob(".partial-*"))
    assert not [thread for thread in threading.enumerate() if "_write" in thread.name]


def test_an_error_comes_with_the_next_update(job, blocking, tmp_path, monkeypatch):
    def full(*arguments):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")

    original = savers.complete
    monkeypatch.setattr(savers, "complete", full)
    run = tmp_path / "run"
    outcome = job.run(run, **{**OPTIONS, "save_every": 4}, save_async=True)
    assert outcome.code == 3 and "Traceback" not in outcome.err, outcome
    assert "No space left" in outcome.err and "there is no good checkpoint yet" in outcome.err
    assert 4 <= len(rows(run)) < 12 and not list((run / "checkpoints").iterdir()), "and the partial folder is gone"
    monkeypatch.setattr(savers, "complete", original)
    assert job.run(run, **OPTIONS, save_async=True).code == 0
    assert_same_files(blocking, run, [12])


@pytest.mark.parametrize("limit_bytes", [4096, 160_000])
def test_disk_full_behind_the_training(job, blocking, tmp_path, limit_bytes):
    """D5 with RLIMIT_FSIZE: no room for schedule and random numbers, or for the optimizer's state."""
    run = tmp_path / "run"
    assert job.run(run, **{**OPTIONS, "max_steps": 4}).code == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        outcome = job.run(run, **{**OPTIONS, "log_every": 10}, save_async=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome.code == 3 and "could not be written" in outcome.problems[-1] and "step-00000004;" in outcome.problems[-1]
    assert not list((run / "checkpoints").glob(".partial-*"))


def test_no_room_for_the_copy(job, blocking, tmp_path, monkeypatch):
    begun, _ = slow_writing(monkeypatch, 0)
    monkeypatch.setattr(savers.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    outcome = job.run(tmp_path / "run", **OPTIONS, save_async=True)
    said = [line for line in outcome.out.splitlines() if "save_async" in line]
    assert outcome.code == 0 and len(said) == 1 and "1,000 are free" in said[0] and not begun, outcome
    assert_same_files(blocking, tmp_path / "run", range(2, 13, 2))


def test_host_copies_are_copies():
    value = {"a": torch.arange(3), "b": [torch.ones(2), 5], "c": (1, 2)}
    copy = savers.host_copy(value)
    assert not differences(value, copy)
    value["a"].zero_(), value["b"][0].zero_()
    assert copy["a"].tolist() == [0, 1, 2] and copy["b"][0].tolist() == [1, 1]
