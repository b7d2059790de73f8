"""Space on disk: what is expected is what is written, and too little is found before anything is lost."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jobs import Job, reset_accelerate

from memtrain.command import BadInput, TrainingStopped
from memtrain.config import make_config

SHAPE = {"model": "tiny", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "seq_len": 16, "global_batch_size": 2, "max_steps": 10}
TOKENIZER = SimpleNamespace(save_pretrained=lambda folder: None)
OPTIMIZERS = ["adamw", "adamw_8bit", "adamw_4bit", "adamw_factored", "adafactor", "lion_8bit"]


@pytest.fixture
def make_state(monkeypatch):
    from memtrain.model.presets import model_config
    from memtrain.training.step import build, make_accelerator

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    reset_accelerate()

    def make(**options):
        config = make_config(SHAPE, options)
        return build(config, model_config(config), make_accelerator(config), 10)

    yield make
    reset_accelerate()


def train(state):
    from memtrain.data.order import Update
    from memtrain.training.step import train_step

    ids = torch.zeros(2, 16, dtype=torch.int64)
    train_step(state, Update([{"input_ids": ids, "targets": ids}], 32, 2, 2))


def save(state, folder: Path) -> Path:
    from memtrain.training.checkpoint import RunState, save_checkpoint
    from memtrain.training.progress import Progress

    return save_checkpoint(state, RunState(Progress(step=1), 1, {}, {}, ""), TOKENIZER, folder, keep_last=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bytes_of_a_checkpoint(make_state, optimizer, dtype, tmp_path):
    """Known before the first update, to the byte in the tensors; the files take a little more, which is allowed for."""
    from memtrain.training import disk

    state = make_state(optimizer=optimizer, param_dtype=dtype)
    before = disk.optimizer_bytes(state.optimizer), disk.checkpoint_bytes(state)
    train(state)
    assert before == (disk.optimizer_bytes(state.optimizer), disk.checkpoint_bytes(state))
    written = sum(path.stat().st_size for path in save(state, tmp_path).rglob("*") if path.is_file())
    tensors = disk.model_bytes(state.model) + disk.optimizer_bytes(state.optimizer)
    assert tensors < written <= before[1] < written + 2 * disk.OTHER_BYTES, (tensors, written, before)


def test_not_enough_before_the_start(make_state, tmp_path, monkeypatch):
    from memtrain.training import disk

    state = make_state()
    needed = 3 * disk.checkpoint_bytes(state) + disk.model_bytes(state.model)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(BadInput, match=f"{needed:,} bytes are wanted .* and {needed - 1:,} are free; .* lower keep_last"):
        disk.check_disk(state, tmp_path / "new" / "run", keep_last=2)
    disk.check_disk(state, tmp_path / "new" / "run", keep_last=1)
    there = tmp_path / "run" / "checkpoints" / "step-00000001"
    there.mkdir(parents=True)
    (there / "file").write_bytes(b"x")  # a byte of what is wanted is there already
    disk.check_disk(state, tmp_path / "run", keep_last=2)


def test_not_enough_for_the_next_checkpoint(make_state, tmp_path, monkeypatch):
    from memtrain.training import disk
    from memtrain.training.checkpoint_files import complete_checkpoints

    state = make_state()
    train(state)
    first = save(state, tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=disk.checkpoint_bytes(state) - 1))
    with pytest.raises(TrainingStopped, match=f"bytes, and .* are free.*the last good checkpoint is {re.escape(str(first))}"):
        save(state, tmp_path)
    assert complete_checkpoints(tmp_path) == [first]


@pytest.fixture
def small_disk(tmp_path: Path):
    """mount(size) -> an own file system of that many bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: int) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True,
                              text=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


def test_a_small_file_system(small_disk, make_state, tmp_path):
    """A real disk: a run is refused before it starts, a save before it writes."""
    folder = small_disk(16 * 2**20)
    state = make_state()
    train(state)
    first = save(state, folder / "checkpoints")
    filler = folder / "filler"
    filler.write_bytes(bytes(8 * 2**20))
    with pytest.raises(TrainingStopped, match=f"a checkpoint takes .*the last good checkpoint is {re.escape(str(first))}"):
        save(state, folder / "checkpoints")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [first.name]
    filler.write_bytes(bytes(15 * 2**20 - sum(path.stat().st_size for path in first.rglob("*") if path.is_file())))
    outcome = Job(tmp_path / "job", tmp_path / "cache").run(folder / "run")
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and not (folder / "run").exists(), outcome
    assert "bytes are wanted for 3 checkpoints and the export" in outcome.err
