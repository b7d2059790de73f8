"""What small weights and optimizers cost in loss: a small model trained on the default corpus by each, and by float32 AdamW."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from memtrain.config import make_config
from memtrain.data.prepare import Data, prepare
from memtrain.memory.benchmark import reset_accelerate
from memtrain.model.presets import model_config
from memtrain.options import RunConfig
from memtrain.training.finish import evaluate_data
from memtrain.training.step import build, make_accelerator, train_step, training_updates

# 2.6M parameters
RUN: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 6, "tie_word_embeddings": False, "seq_len": 128, "global_batch_size": 8}
_INT8 = {"param_dtype": "int8", "optimizer_in_backward": True, "max_grad_norm": None, "head_in_blocks": True}
RUNS: dict[str, tuple[dict[str, Any], Sequence[float]]] = {
    "float32 AdamW": ({}, (5e-4, 1e-3, 2e-3)),
    "int8, adamw_factored": ({**_INT8, "optimizer": "adamw_factored"}, (5e-4, 1e-3, 2e-3)),
    # whose steps are relative to the size of what they change
    "int8, adafactor": ({**_INT8, "optimizer": "adafactor"}, (0.01, 0.02, 0.04)),
}


def final_loss(options: dict[str, Any], learning_rate: float, seed: int, updates: int) -> tuple[float, float]:
    """(loss on the held-out text after `updates`, bytes of weights and optimizer state a parameter)."""
    reset_accelerate()
    config: RunConfig = make_config(RUN, {"max_steps": updates, "mixed_precision": "no"}, options,
                                    {"learning_rate": learning_rate, "seed": seed})
    shape, accelerator = model_config(config), make_accelerator(config)
    data: Data = prepare(config, shape.vocab_size)
    state = build(config, shape, accelerator, updates)
    for number, update in enumerate(training_updates(config, data, 0, accelerator)):
        if number == updates:
            break
        train_step(state, update)
    tensors = [*state.model.parameters(), *(value for values in state.optimizer.optimizer.state.values()
                                            for value in values.values() if isinstance(value, torch.Tensor))]
    found = evaluate_data(state.model, accelerator, data, config)
    assert found is not None, "the default corpus holds text out"
    return found["eval_loss"], sum(tensor.nbytes for tensor in tensors) / shape.parameter_count


def run_quality(updates: int, seeds: int, names: Sequence[str] = tuple(RUNS)) -> list[dict[str, Any]]:
    """A row for each of RUNS: the learning rate that is best on the first seed, and the mean loss of all seeds there."""
    rows: list[dict[str, Any]] = []
    for name in names:
        options, rates = RUNS[name]
        losses = {}
        for rate in rates:
            losses[rate], size = final_loss(options, rate, 0, updates)
            print(f"{name}, learning rate {rate:g}: {losses[rate]:.4f}", file=sys.stderr)
        best = min(losses, key=lambda rate: losses[rate])
        found = [losses[best], *(final_loss(options, best, seed, updates)[0] for seed in range(1, seeds))]
        rows.append({"recipe": name, "bytes_per_parameter": size, "learning_rate": best, "losses": found, "tried": losses,
                     "loss": statistics.mean(found)})
        rows[-1]["ratio"] = rows[-1]["loss"] / rows[0]["loss"]
    return rows


def format_quality(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| weights, optimizer | bytes a parameter | learning rate | loss | ratio |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {row['recipe']} | {row['bytes_per_parameter']:.2f} | {row['learning_rate']:g} | {row['loss']:.4f} | "
              f"{row['ratio']:.3f} |" for row in rows]
    return "\n".join(lines)
