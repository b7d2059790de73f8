"""What a run reports of itself: strict JSON lines, and the figures of an evaluation."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from memtrain.command import TrainingStopped
from memtrain.training.checkpoint_files import flush, last_good, stop_when_refused
from memtrain.training.progress import Progress
from memtrain.training.step import StepResult

# fp16 halves its scale at each overflow; below this, finite gradients would have fitted long ago
SMALLEST_SCALE = 1e-4


def evaluation_metrics(loss_sum: float, target_count: int, text_bytes: int) -> dict[str, float]:
    """loss (nats per token), perplexity, and bits per byte of the text, which compares across tokenizers.

    loss_sum: nats over all targets; text_bytes: UTF-8 bytes of the text that the targets spell.
    """
    loss = loss_sum / max(target_count, 1)
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0)),
            "eval_bits_per_byte": loss_sum / math.log(2) / max(text_bytes, 1)}


def strict_json(row: dict[str, Any]) -> str:
    """JSON without NaN or Infinity, which no standard parser reads: null in their place."""
    return json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value
                       for key, value in row.items()}, allow_nan=False)


def peak_bytes(device: torch.device) -> int:
    """Highest memory so far: the CUDA allocator's tensor bytes, on a CPU the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB


class TrainLog:
    """`metrics.jsonl`, a row per update and one per evaluation.

    Figures stay on the device until `flush`, which fetches all at once, stops the run if one is not finite, and writes. A
    resumed run first drops the rows after its checkpoint, which it will compute again.
    """

    def __init__(self, path: Path, accelerator: Accelerator) -> None:
        self.path, self.accelerator = path, accelerator
        self.rows: list[dict[str, Any]] = []
        self.figures: list[torch.Tensor] = []
        self.has_norm = True
        self.since = time.perf_counter()

    def keep_until(self, step: int) -> None:
        """Drop rows after update `step`, and a last line cut by a kill. Only one process may call this."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row.get("step", 0) <= step:
                kept.append(line + "\n")
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        flush(temporary)
        os.replace(temporary, self.path)

    def start_clock(self) -> None:
        """Time spent since the last flush was not training."""
        self.since = time.perf_counter()

    def add(self, progress: Progress, result: StepResult, learning_rate: float) -> None:
        """Note an update that was made; waits for nothing."""
        self.rows.append({"step": progress.step, "loss": None, "learning_rate": learning_rate, "grad_norm": None,
                          "tokens": progress.tokens, "targets": result.target_count})
        norm = result.loss_sum.new_zeros(()) if result.grad_norm is None else result.grad_norm.float()
        self.figures.append(torch.stack((result.loss_sum.float(), norm)))
        self.has_norm = result.grad_norm is not None

    def flush(self, progress: Progress) -> str:
        """Fetch, check and write the rows since the last flush; returns the newest in words. All processes call it.

        Raises TrainingStopped on a loss or gradient norm that is not finite.
        """
        if not self.rows:
            return ""
        rows, figures = self.rows, torch.stack(self.figures)
        self.rows, self.figures = [], []
        local_losses, norms = figures[:, 0], figures[:, 1].tolist()  # the only regular wait for the device
        losses = self.accelerator.reduce(local_losses, "sum").tolist()
        seconds = time.perf_counter() - self.since
        progress.seconds += seconds
        self.start_clock()
        speed = sum(row["targets"] for row in rows) / seconds
        for row, loss_sum, norm in zip(rows, losses, norms, strict=True):
            row["loss"], row["grad_norm"] = loss_sum / row.pop("targets"), norm if self.has_norm else None
            row |= {"tokens_per_second": speed, "peak_bytes": peak_bytes(self.accelerator.device)}
        self._write(rows)
        for row in rows:
            if not math.isfinite(row["loss"]) or not math.isfinite(row["grad_norm"] or 0.0):
                raise TrainingStopped(f"update {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}, not "
                                      f"finite; nothing was saved after it, {last_good(self.path.parent / 'checkpoints')}; "
                                      "lower learning_rate, or look at the data")
        return f"loss {rows[-1]['loss']:.3f}, {speed:,.0f} tokens/s"

    def sync(self, progress: Progress) -> None:
        """`flush`, down to the disk: before a checkpoint of which these rows are the past."""
        self.flush(progress)
        if self.accelerator.is_main_process and self.path.exists():
            with stop_when_refused(self.path, self.path.parent / "checkpoints"):
                flush(self.path)

    def write_evaluation(self, step: int, metrics: dict[str, float] | None) -> None:
        if metrics is not None:
            self._write([{"step": step, **metrics}])
        self.start_clock()

    def check_scale(self) -> None:
        """Raises TrainingStopped when fp16 gradients overflow at any scale."""
        scaler = self.accelerator.scaler
        if scaler is not None and scaler.get_scale() < SMALLEST_SCALE:
            raise TrainingStopped(f"gradients overflow in fp16 even at scale {scaler.get_scale():g}; use bf16, or lower "
                                  "learning_rate")

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self.accelerator.is_main_process:
            text = "".join(strict_json(row) + "\n" for row in rows)
            with stop_when_refused(self.path, self.path.parent / "checkpoints"), self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        for row in rows if self.accelerator.trackers else ():
            self.accelerator.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])
