"""How long training waits for a checkpoint: written at once, and behind the training."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from memtrain.config import make_config
from memtrain.data.order import Update
from memtrain.memory.benchmark import SHAPES
from memtrain.training.agreement import Agreement
from memtrain.training.checkpoint import RunState
from memtrain.training.disk import model_bytes, optimizer_bytes
from memtrain.training.progress import Progress
from memtrain.training.saver import Saver
from memtrain.training.step import build, make_accelerator, train_step

TOKENIZER = SimpleNamespace(save_pretrained=lambda folder: None)


def run_save(shape_name: str, repeats: int) -> list[dict[str, Any]]:
    """Rounds of a blocking save and one behind the training, in turn, of fp32 weights with AdamW: seconds that training waits
    for each, seconds of the writing, and the ratio of the medians."""
    shape = SHAPES[shape_name][0]
    with tempfile.TemporaryDirectory() as folder:
        config = make_config({"max_steps": 1000, "save_async": True, "keep_last": 1, "seq_len": 16, "global_batch_size": 1,
                              "output_dir": folder})
        state = build(config, shape, make_accelerator(config), total_steps=1000)
        ids = torch.zeros(1, 16, dtype=torch.int64)
        run = RunState(Progress(), 1, asdict(config), asdict(shape), "")
        saver = Saver(state, run, TOKENIZER, Path(folder) / "checkpoints", config, Agreement(state.accelerator))

        def seconds(work: Callable[[], Any]) -> float:
            train_step(state, Update([{"input_ids": ids, "targets": ids}], 16, 1, 1))
            run.progress.step += 1
            start = time.perf_counter()
            work()
            return time.perf_counter() - start

        seconds(saver.check)  # takes memory for the copy, as a run does after its first update
        saver.wait()
        rounds = []
        for _ in range(repeats):
            blocking = seconds(saver.save)
            pause = seconds(lambda: saver.save(behind=True))
            assert saver.thread is not None, "there was no room for the copy"
            start = time.perf_counter()
            saver.wait()
            rounds.append((blocking, pause, time.perf_counter() - start))
        saved_bytes = model_bytes(state.model) + optimizer_bytes(state.optimizer)
    blocking, pause, writing = (statistics.median(column) for column in zip(*rounds, strict=True))
    return [{"shape": shape_name, "saved_bytes": saved_bytes, "blocking_seconds": blocking, "pause_seconds": pause,
             "writing_seconds": writing, "ratio": pause / blocking}]


def format_save(rows: list[dict[str, Any]]) -> str:
    return "\n".join(f"{row['shape']}, {row['saved_bytes'] / 1e6:,.0f} MB: training waits {row['blocking_seconds']:.3f} s "
                     f"for a checkpoint written at once, {row['pause_seconds']:.3f} s for one written behind it (ratio "
                     f"{row['ratio']:.3f}), which then takes {row['writing_seconds']:.3f} s" for row in rows)
