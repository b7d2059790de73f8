"""What a prediction and a plan cost: seconds, and the most that a process of their own takes."""

from __future__ import annotations

import time
from typing import Any

import torch

from memtrain.config import make_config
from memtrain.memory.estimate import in_child, predict
from memtrain.memory.planner import Planner, planned
from memtrain.training.metrics import peak_bytes as process_peak_bytes

BIG = {"model": "8b", "seq_len": 4096, "max_steps": 10, "mixed_precision": "bf16"}


def planning_cost() -> list[dict[str, Any]]:
    """One prediction for 8 billion parameters, and the recipes of a plan for them; each in a process of its own."""
    return [in_child(_predict), in_child(_plan)]


def _predict() -> dict[str, Any]:
    start = time.perf_counter()
    config, shape = planned(make_config(BIG, {"global_batch_size": 1, "gradient_checkpointing": "full"}))
    found = predict(config, shape)
    return _row("prediction", 1, found.peak_bytes, start)


def _plan() -> dict[str, Any]:
    start = time.perf_counter()
    planner = Planner(*planned(make_config(BIG, {"global_batch_size": 8})))
    return _row("plan", len(planner.rows), min(row.peak_bytes for row in planner.rows), start)


def _row(work: str, recipes: int, peak_bytes: int, start: float) -> dict[str, Any]:
    return {"work": work, "recipes": recipes, "peak_bytes": peak_bytes, "seconds": time.perf_counter() - start,
            "process_bytes": process_peak_bytes(torch.device("cpu"))}
