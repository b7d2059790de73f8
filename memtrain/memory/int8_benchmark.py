"""What widening and updating int8 weights cost beside the matrix products: steps of 1 x 1024 tokens, interleaved in one run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtrain.config import make_config
from memtrain.memory.benchmark import memtrain_step, reset_accelerate
from memtrain.model.presets import LlamaConfig
from memtrain.training.step import build_model

SHAPE = LlamaConfig(8192, 2048, 5504, 4, 16, 16, 128)  # the proportions of 7B, at half its width
TOKENS = 1024
INT8: dict[str, Any] = {"param_dtype": "int8", "optimizer_in_backward": True, "head_in_blocks": True,
                        "gradient_checkpointing": "full"}


def held_still(gradients: bool) -> Callable[[Tensor], float]:
    """Forward and backward of bfloat16 weights that nothing changes; their gradients are freed at once, or not made."""
    config = make_config({"param_dtype": "bfloat16", "gradient_checkpointing": "full", "max_steps": 1})
    model = build_model(config, SHAPE).train()

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        if gradients:
            parameter.register_post_accumulate_grad_hook(free)
        elif parameter is not model.model.embed_tokens.weight:  # from which the backward has to begin
            parameter.requires_grad_(False)

    def step(ids: Tensor) -> float:
        loss = model(ids[:, :-1], ids[:, 1:]) / TOKENS
        loss.backward()
        model.zero_grad()
        return loss.item()

    return step


def run_int8(repeats: int) -> list[dict[str, Any]]:
    """A row per kind of step, with its seconds and their ratio to the first row's."""
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    ids = torch.randint(0, SHAPE.vocab_size, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    steps: dict[str, Callable[[Tensor], float]] = {
        "bfloat16 held still, all gradients": held_still(True), "bfloat16 held still, no weight's gradient": held_still(False)}
    for optimizer in ("adafactor", "adamw_factored"):
        reset_accelerate()
        steps[f"int8, {optimizer}"] = memtrain_step(SHAPE, {**INT8, "optimizer": optimizer}, 1, TOKENS)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(1 + repeats):
        for name, step in steps.items():
            start = time.process_time()  # of all threads; a busy machine does not lengthen it
            step(ids)
            if repeat:
                seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    first = next(iter(medians.values()))
    return [{"step": name, "cpu_seconds": value, "ratio": value / first} for name, value in medians.items()]


def format_int8(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| step of 1 x 1024 tokens | CPU seconds | ratio |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {row['step']} | {row['cpu_seconds']:.2f} | {row['ratio']:.2f} |" for row in rows])
