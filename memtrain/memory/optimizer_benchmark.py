"""Optimizers alone, ours beside those of torch, torchao and bitsandbytes where they are installed."""

from __future__ import annotations

import importlib.util
import io
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memtrain.optim.factory import OPTIMIZERS
from memtrain.optim.low_memory import LowMemoryOptimizer

MATRICES, ROWS, COLUMNS = 4, 2048, 1024
LR, BETAS = 1e-3, (0.9, 0.95)

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def _ours(name: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    rule, bits = OPTIMIZERS[name]
    return LowMemoryOptimizer([{"params": parameters}], rule=rule, state_bits=bits, lr=LR, betas=BETAS)


def candidates() -> dict[str, tuple[torch.dtype, Make]]:
    """Name -> (dtype of the weights, optimizer over parameters)."""
    found: dict[str, tuple[torch.dtype, Make]] = {
        "torch AdamW, fused": (torch.float32, lambda parameters: torch.optim.AdamW(parameters, lr=LR, betas=BETAS, fused=True))}
    found |= {f"memtrain {name}": (torch.bfloat16, partial(_ours, name)) for name in OPTIMIZERS}
    if importlib.util.find_spec("torchao") is not None:
        from torchao.optim import AdamW4bit, AdamW8bit

        for bits, torchao_kind in ((8, AdamW8bit), (4, AdamW4bit)):
            found[f"torchao AdamW{bits}bit"] = torch.bfloat16, partial(torchao_kind, lr=LR, betas=BETAS,
                                                                       bf16_stochastic_round=True)
    if importlib.util.find_spec("bitsandbytes") is not None:
        import bitsandbytes

        # rounds bfloat16 weights to nearest
        found["bitsandbytes AdamW8bit"] = torch.bfloat16, partial(bitsandbytes.optim.AdamW8bit, lr=LR, betas=BETAS)
    return found


def start(dtype: torch.dtype, make: Make) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """(parameters, optimizer over them)."""
    generator = torch.Generator().manual_seed(0)
    parameters: list[Tensor] = [torch.nn.Parameter((0.02 * torch.randn(ROWS, COLUMNS, generator=generator)).to(dtype))
                                for _ in range(MATRICES)]
    return parameters, make(parameters)


def update(parameters: list[Tensor], optimizer: torch.optim.Optimizer, step: int) -> float:
    """Seconds of an update by gradients that depend on `step`."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    torch.manual_seed(step)
    begin = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - begin


def resumes_exactly(dtype: torch.dtype, make: Make) -> bool:
    """Whether two updates, a save, a load into a new optimizer and a third update are three updates, bit for bit."""
    whole, optimizer = start(dtype, make)
    for step in range(2):
        update(whole, optimizer, step)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed, fresh = start(dtype, make)
    with torch.no_grad():
        for target, source in zip(resumed, whole, strict=True):
            target.copy_(source)
    fresh.load_state_dict(torch.load(file, weights_only=False))
    update(whole, optimizer, 2)
    update(resumed, fresh, 2)
    return all(torch.equal(left, right) for left, right in zip(whole, resumed, strict=True))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the state, as they would be saved (which looks into tensor subclasses)."""
    file = io.BytesIO()
    torch.save([value for state in optimizer.state.values() for value in state.values()], file)
    return file.tell()


def run_optimizers(repeats: int) -> list[dict[str, Any]]:
    """A row for each optimizer: state, first update, later updates (medians of interleaved rounds), and whether it resumes."""
    numbers = MATRICES * ROWS * COLUMNS
    rows: list[dict[str, Any]] = []
    running = {}
    for name, (dtype, make) in candidates().items():
        parameters, optimizer = start(dtype, make)
        rows.append({"optimizer": name, "weights": str(dtype).removeprefix("torch."),
                     "first_seconds": update(parameters, optimizer, 0),
                     "state_bytes_per_parameter": state_bytes(optimizer) / numbers})
        running[name] = parameters, optimizer
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for step in range(1, 1 + repeats):
        for name, (parameters, optimizer) in running.items():
            seconds[name].append(update(parameters, optimizer, step))
    for row in rows:
        row["nanoseconds_per_parameter"] = 1e9 * statistics.median(seconds[row["optimizer"]]) / numbers
        row["resumes_exactly"] = resumes_exactly(*candidates()[row["optimizer"]])
    return rows


def format_optimizers(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| optimizer | weights | state, bytes a parameter | first update, s | later, ns a parameter | exact resume |",
             "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        cells = [row["optimizer"], row["weights"], f"{row['state_bytes_per_parameter']:.2f}", f"{row['first_seconds']:.2f}",
                 f"{row['nanoseconds_per_parameter']:.1f}", "yes" if row["resumes_exactly"] else "no"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
