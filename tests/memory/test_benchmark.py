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
            benchmark.reset_accelerate()
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


def test_int8(monkeypatch, own_accelerate):
    from memtrain.memory import int8_benchmark

    monkeypatch.setattr(int8_benchmark, "SHAPE", SHAPE)
    monkeypatch.setattr(int8_benchmark, "TOKENS", 32)
    rows = int8_benchmark.run_int8(1)
    assert rows[0]["ratio"] == 1 and all(row["cpu_seconds"] > 0 for row in rows)
    assert int8_benchmark.format_int8(rows).count("\n") == 5


def test_quality(monkeypatch, own_accelerate, tmp_path):
    from jobs import write_corpus

    from memtrain.memory import quality_benchmark

    monkeypatch.setattr(quality_benchmark, "RUN", {
        **quality_benchmark.RUN, "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "seq_len": 32,
        "dataset": str(write_corpus(tmp_path / "text.jsonl")),
        "eval_fraction": 0.2, "cache_dir": str(tmp_path / "cache")})
    rows = quality_benchmark.run_quality(3, 2, ["float32 AdamW", "int8, adafactor"])
    assert [len(row["losses"]) for row in rows] == [2, 2] and [len(row["tried"]) for row in rows] == [3, 3]
    assert rows[0]["bytes_per_parameter"] > 12 > 2 > rows[1]["bytes_per_parameter"]
    assert 0.5 < rows[1]["ratio"] < 2 and "| int8, adafactor |" in quality_benchmark.format_quality(rows)
