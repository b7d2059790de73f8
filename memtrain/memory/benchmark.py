"""Side by side with a plain transformers loop: memory, speed, FLOPs and loss of one training step, recipe by recipe."""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain.command import BadInput
from memtrain.config import make_config
from memtrain.memory.device import TUNED_MALLOC
from memtrain.memory.peers import has_torchtune, torchtune_step, transformers_step
from memtrain.model.loss import linear_cross_entropy
from memtrain.model.presets import PRESETS, LlamaConfig
from memtrain.options import RunConfig

MIB = 2**20
WARMUP_STEPS = 2  # the first makes the optimizer's state, the second is the first ordinary one

SHAPES = {
    # name: (shape, rows, tokens in a row)
    "tiny": (PRESETS["tiny"], 8, 256),
    "small": (PRESETS["small"], 4, 512),
    "58m": (LlamaConfig(32000, 512, 1376, 8, 8, 8, 64), 2, 1024),
}


@dataclass(frozen=True)
class Rung:
    """One recipe. peer: not ours. options: of `RunConfig`. cost: what it does to training, beside the plain loop."""

    name: str
    cost: str
    options: dict[str, Any] = field(default_factory=dict)
    peer: str = ""


_BF16 = {"mixed_precision": "bf16"}
_IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": None}
_IN_BLOCKS = {**_IN_BACKWARD, "head_in_blocks": True, "recomputed_rows": 1}
_PURE = {"mixed_precision": "no", "param_dtype": "bfloat16", "gradient_checkpointing": "full"}
LADDER = [
    Rung("transformers, bf16 autocast", "-", peer="plain"),
    Rung("transformers + checkpointing", "time", peer="checkpointing"),
    Rung("memtrain, bf16 autocast", "rounding", _BF16),
    Rung("+ selective checkpointing", "rounding", {**_BF16, "gradient_checkpointing": "selective"}),
    Rung("+ selective_deep instead", "rounding, time", {**_BF16, "gradient_checkpointing": "selective_deep"}),
    Rung("+ full instead", "rounding, time", {**_BF16, "gradient_checkpointing": "full"}),
    Rung("+ full, update in backward", "rounding, time, no clipping",
         {**_BF16, "gradient_checkpointing": "full", **_IN_BACKWARD}),
    Rung("+ full, in backward, head in blocks", "rounding, time, no clipping",
         {**_BF16, "gradient_checkpointing": "full", **_IN_BLOCKS}),
    Rung("bf16 weights, AdamW", "changes the update", {**_PURE, "optimizer": "adamw"}),
    Rung("+ 8-bit state", "changes the update", {**_PURE, "optimizer": "adamw_8bit"}),
    Rung("+ 8-bit, update in backward", "changes the update", {**_PURE, "optimizer": "adamw_8bit", **_IN_BACKWARD}),
    Rung("+ 8-bit, in backward, head in blocks", "changes the update", {**_PURE, "optimizer": "adamw_8bit", **_IN_BLOCKS}),
    Rung("torchtune + torchao, the same recipe", "changes the update", peer="torchtune"),
    Rung("+ 4-bit, in backward, head in blocks", "changes the update", {**_PURE, "optimizer": "adamw_4bit", **_IN_BLOCKS}),
    Rung("+ Adafactor, in backward", "another optimizer", {**_PURE, "optimizer": "adafactor", **_IN_BACKWARD}),
]
# the same recipes as ours, twice: which is faster, and which is smaller, at equal settings
PAIRS = [(precision, checkpointing) for precision in ("no", "bf16") for checkpointing in ("none", "full")]


def memtrain_step(shape: LlamaConfig, options: dict[str, Any], rows: int, tokens: int) -> Callable[[Tensor], float]:
    """Our training step, built as pretrain.py builds it, over ids [rows, tokens + 1]. Returns the loss."""
    from memtrain.data.order import Update
    from memtrain.training.step import build, make_accelerator, train_step

    config: RunConfig = make_config({
        "max_steps": 1000, "warmup_steps": 0, "lr_schedule": "constant", "learning_rate": 1e-3, "global_batch_size": rows,
        "seq_len": tokens, "max_grad_norm": None, **options})
    state = build(config, shape, make_accelerator(config), total_steps=1000)

    def step(ids: Tensor) -> float:
        batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
        count = batch["targets"].numel()
        return train_step(state, Update([batch], count, rows, rows)).loss_sum.item() / count

    return step


def make_step(rung: Rung, shape_name: str) -> Callable[[Tensor], float]:
    shape, rows, tokens = SHAPES[shape_name]
    if rung.peer == "torchtune":
        return torchtune_step(shape)
    if rung.peer:
        return transformers_step(shape, "bf16", rung.peer == "checkpointing")
    return memtrain_step(shape, rung.options, rows, tokens)


def warmed_step(make: Callable[[], Callable[[Tensor], float]], ids: Tensor) -> Callable[[Tensor], float]:
    """The step that `make` builds, after its first WARMUP_STEPS."""
    step = make()
    for _ in range(WARMUP_STEPS):
        step(ids)
    return step


def token_rows(shape_name: str) -> Tensor:
    """int64 [rows, tokens + 1], the same for all recipes: ids with the frequencies of words (Zipf), so a loss can fall."""
    shape, rows, tokens = SHAPES[shape_name]
    odds = 1.0 / torch.arange(1, shape.vocab_size + 1, dtype=torch.float64)
    return torch.multinomial(odds, rows * (tokens + 1), replacement=True,
                             generator=torch.Generator().manual_seed(0)).view(rows, -1)


def peak_tensor_bytes(work: Callable[[], Any]) -> int:
    """Peak of the CPU allocator's live bytes while `work` runs, by the profiler's own events: no part of our code counts."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # what was left before must not be freed within
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def count_flops(work: Callable[[], Any]) -> int:
    """FLOPs of matrix products and attention; also of the in-place products that torch's counter leaves out."""
    from torch.utils.flop_counter import FlopCounterMode

    def addmm_flops(total: Any, left: Any, right: Any, **rest: Any) -> int:
        return 2 * left[0] * left[1] * right[1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flops}) as counter:
        work()
    return counter.get_total_flops()


def run_child(job: dict[str, Any]) -> dict[str, Any]:
    """`measure(job)` in a process of its own."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        code = "import json, sys; from memtrain.memory.benchmark import measure; " \
               "json.dump(measure(json.loads(sys.argv[1])), open(sys.argv[2], 'w'))"
        done = subprocess.run([sys.executable, "-c", code, json.dumps(job), result.name], env=os.environ | TUNED_MALLOC,
                              capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{job}: {done.stderr.strip()[-2000:]}")
        return json.load(result)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """job: {"what": "peak" or "speed", "shape": name, "rung": index in LADDER, "repeats": n}. Runs in this process."""
    rung, shape_name = LADDER[job["rung"]], job["shape"]
    ids = token_rows(shape_name)
    make = partial(make_step, rung, shape_name)
    if job["what"] == "peak":
        return {"peak_bytes": peak_tensor_bytes(partial(warmed_step, make, ids))}
    step = warmed_step(make, ids)
    process_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, losses = [], []
    for _ in range(job["repeats"]):
        start = time.perf_counter()
        losses.append(step(ids))
        seconds.append(time.perf_counter() - start)
    # torchao compiles its optimizer whole, and a compiled whole refuses to be watched
    flops = None if rung.peer == "torchtune" else count_flops(lambda: step(ids))
    return {"process_bytes": process_bytes, "step_seconds": seconds, "loss": losses[-1], "flops": flops}


def run_ladder(shape_name: str, repeats: int) -> list[dict[str, Any]]:
    """A row per rung of LADDER. Speeds are taken in rounds over all rungs, so that a busy moment does not hit one alone."""
    _, rows, tokens = SHAPES[shape_name]
    found: list[dict[str, Any]] = []
    for index, rung in enumerate(LADDER):
        if rung.peer == "torchtune" and not has_torchtune():
            continue
        found.append({"recipe": rung.name, "cost": rung.cost, "rung": index, "seconds": [],
                      **run_child({"what": "peak", "shape": shape_name, "rung": index})})
        print(f"{rung.name}: {found[-1]['peak_bytes'] / MIB:.0f} MiB", file=sys.stderr)
    for _ in range(repeats):
        for row in found:
            result = run_child({"what": "speed", "shape": shape_name, "rung": row["rung"], "repeats": 2})
            row["seconds"] += result.pop("step_seconds")
            row |= result
    for row in found:
        row["step_seconds"] = statistics.median(row.pop("seconds"))
        row["tokens_per_second"] = rows * tokens / row["step_seconds"]
        for name in ("peak_bytes", "process_bytes", "step_seconds", "flops"):
            row[name + "_ratio"] = None if row[name] is None else row[name] / found[0][name]
    return found


def run_pairs(shape_name: str, repeats: int) -> list[dict[str, Any]]:
    """Our step and transformers' at equal settings: medians of interleaved times, and peaks. Ratios are ours / theirs."""
    ids = token_rows(shape_name)
    shape, rows, tokens = SHAPES[shape_name]
    found = []
    for precision, checkpointing in PAIRS:
        options = {"mixed_precision": precision, "gradient_checkpointing": checkpointing}
        makers = {"transformers": partial(transformers_step, shape, precision, checkpointing == "full"),
                  "memtrain": partial(memtrain_step, shape, options, rows, tokens)}
        row: dict[str, Any] = dict(options)
        for name, make in makers.items():
            reset_accelerate()
            row[name + "_peak_bytes"] = peak_tensor_bytes(partial(warmed_step, make, ids))
        reset_accelerate()
        steps: dict[str, Callable[[Tensor], float]] = {name: make() for name, make in makers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(WARMUP_STEPS + repeats):
            for name, step in steps.items():
                start = time.perf_counter()
                step(ids)
                if repeat >= WARMUP_STEPS:
                    seconds[name].append(time.perf_counter() - start)
        for name, values in seconds.items():
            row[name + "_seconds"] = statistics.median(values)
        row["time_ratio"] = row["memtrain_seconds"] / row["transformers_seconds"]
        row["peak_ratio"] = row["memtrain_peak_bytes"] / row["transformers_peak_bytes"]
        found.append(row)
    return found


def reset_accelerate() -> None:
    """Accelerate keeps the precision of the first Accelerator of a process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def plain_head(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Product, float32 logits, cross-entropy: what a plain loop does."""
    return F.cross_entropy(F.linear(hidden_TD, weight_VD).float(), targets_T, reduction="sum")


def head_results(head: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, Tensor, Tensor],
                 dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """(loss, gradient of hidden, gradient of weight) of a head on copies of (hidden, weight, targets), maybe in `dtype`."""
    hidden_TD, weight_VD = (tensor.to(dtype or tensor.dtype, copy=True).requires_grad_() for tensor in inputs[:2])
    loss = head(hidden_TD, weight_VD, inputs[2])
    return loss.detach(), *torch.autograd.grad(loss, (hidden_TD, weight_VD))


def run_head(shape_name: str, repeats: int) -> list[dict[str, Any]]:
    """Forward and backward of the loss head alone, interleaved: seconds, peak bytes (inputs left out), error of the gradients
    against float64 relative to their largest."""
    shape, rows, tokens = SHAPES[shape_name]
    heads: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"plain": plain_head, "memtrain": linear_cross_entropy}
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and newer
        heads["torch linear_cross_entropy"] = lambda h, w, t: F.linear_cross_entropy(h, w, t, reduction="sum")
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        hidden_TD = torch.randn(rows * tokens, shape.hidden_size, generator=generator).to(dtype)
        weight_VD = (0.05 * torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)).to(dtype)
        targets_T = torch.randint(shape.vocab_size, (rows * tokens,), generator=generator)

        inputs = (hidden_TD, weight_VD, targets_T)
        truth = head_results(lambda h, w, t: F.cross_entropy(F.linear(h, w), t, reduction="sum"), inputs, torch.float64)
        seconds: dict[str, list[float]] = {name: [] for name in heads}
        for repeat in range(1 + repeats):
            for name, head in heads.items():
                start = time.perf_counter()
                head_results(head, inputs)
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
        copies = hidden_TD.nbytes + weight_VD.nbytes
        for name, head in heads.items():
            errors = [((mine.double() - true).abs().max() / true.abs().max()).item()
                      for mine, true in zip(head_results(head, inputs), truth, strict=True)]
            peak_bytes = peak_tensor_bytes(partial(head_results, head, inputs)) - copies
            found.append({"head": name, "dtype": str(dtype).removeprefix("torch."), "peak_bytes": peak_bytes,
                          "step_seconds": statistics.median(seconds[name]), "loss_error": errors[0],
                          "gradient_error": max(errors[1:])})
    return found


def format_rows(kind: str, rows: list[dict[str, Any]]) -> str:
    """The rows of a benchmark as a Markdown table."""
    def mib(value: float) -> str:
        return f"{value / MIB:,.0f}"

    if kind == "step":
        header = ["mixed_precision", "checkpointing", "transformers s", "memtrain s", "time ratio", "transformers MiB",
                  "memtrain MiB", "peak ratio"]
        body = [[row["mixed_precision"], row["gradient_checkpointing"], f"{row['transformers_seconds']:.3f}",
                 f"{row['memtrain_seconds']:.3f}", f"{row['time_ratio']:.2f}", mib(row["transformers_peak_bytes"]),
                 mib(row["memtrain_peak_bytes"]), f"{row['peak_ratio']:.2f}"] for row in rows]
    elif kind == "ladder":
        header = ["recipe", "what it changes", "tensors MiB", "ratio", "process MiB", "s/step", "ratio", "tokens/s",
                  "GFLOP", "ratio", "loss"]
        body = [[row["recipe"], row["cost"], mib(row["peak_bytes"]), f"{row['peak_bytes_ratio']:.3f}",
                 mib(row["process_bytes"]), f"{row['step_seconds']:.2f}", f"{row['step_seconds_ratio']:.2f}",
                 f"{row['tokens_per_second']:,.0f}",
                 *(("-", "-") if row["flops"] is None else (f"{row['flops'] / 1e9:,.0f}", f"{row['flops_ratio']:.2f}")),
                 f"{row['loss']:.3f}"] for row in rows]
    else:
        header = ["head", "dtype", "s", "peak MiB", "loss error", "gradient error"]
        body = [[row["head"], row["dtype"], f"{row['step_seconds']:.3f}", mib(row["peak_bytes"]), f"{row['loss_error']:.1e}",
                 f"{row['gradient_error']:.1e}"] for row in rows]
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
             for line in [header, ["-" * width for width in widths], *body]]
    return "\n".join(lines)


def plot_ladder(shape_name: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of the peaks, the plain loop on top."""
    try:
        import matplotlib
    except ImportError:
        raise BadInput("--plot: matplotlib is not installed; run pip install 'memtrain[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(rows) + 1.2))
    axes.barh([row["recipe"] for row in rows], [row["peak_bytes"] / MIB for row in rows])
    for index, row in enumerate(rows):
        text = f" {row['peak_bytes'] / MIB:,.0f} ({row['peak_bytes_ratio']:.2f})"
        axes.text(row["peak_bytes"] / MIB, index, text, va="center")
    axes.invert_yaxis()
    axes.set_xlabel(f"peak tensor bytes of a training step, MiB ({shape_name})")
    axes.margins(x=0.2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
