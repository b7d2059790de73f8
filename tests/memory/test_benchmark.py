"""The benchmarks run, and say what is true where that is known."""

from __future__ import annotations

import pytest

from memtrain.memory import benchmark, optimizer_benchmark
from memtrain.model.presets import LlamaConfig

SHAPE = LlamaConfig(512, 64, 128, 2, 4, 4, 16)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(benchmark, "SHAPES", {"tiny": (SHAPE, 2, 32)})
    for name, size in {"MATRICES": 1, "ROWS": 64, "COLUMNS": 256}.items():
        monkeypatch.setattr(optimizer_benchmark, name, size)


def test_step(small, own_accelerate):
    rows = benchmark.run_pairs("tiny", 1)
    assert [(row["mixed_precision"], row["gradient_checkpointing"]) for row in rows] == benchmark.PAIRS
    for row in rows:
        # both hold weights and two moments, and gradients at the end
        assert row["memtrain_peak_bytes"] > 16 * SHAPE.parameter_count
        assert row["transformers_peak_bytes"] > 16 * SHAPE.parameter_count
    assert benchmark.format_rows("step", rows).count("\n") == 1 + len(rows)


def test_an_update_in_the_backward_holds_less(small, own_accelerate):
    peaks = {}
    for index, rung in enumerate(benchmark.LADDER):
        if rung.name in ("+ 8-bit state", "+ 8-bit, update in backward"):
            benchmark._reset_accelerate()
            peaks[rung.name] = benchmark.measure({"what": "peak", "shape": "tiny", "rung": index})["peak_bytes"]
    assert peaks["+ 8-bit, update in backward"] < peaks["+ 8-bit state"]


def test_optimizers(small):
    rows = {row["optimizer"]: row for row in optimizer_benchmark.run_optimizers(1)}
    for name, wanted in {"torch AdamW, fused": 8, "memtrain adamw": 8, "memtrain adamw_8bit": 2 + 8 / 256,
                         "memtrain adamw_4bit": 1 + 8 / 128, "memtrain lion_8bit": 1 + 4 / 256}.items():
        # a file adds some hundred bytes to each tensor: 0.1 of a number here
        assert wanted <= rows[name]["state_bytes_per_parameter"] < wanted + 0.2, name
        assert rows[name]["resumes_exactly"]
    assert "| memtrain adamw_8bit | bfloat16 |" in optimizer_benchmark.format_optimizers(list(rows.values()))
