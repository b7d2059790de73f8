"""What was predicted, measured and planned, in words, tables and pictures."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memtrain.memory.device import GPU_STATUS
from memtrain.memory.estimate import Prediction
from memtrain.memory.ledger import PARTS, PHASES
from memtrain.memory.planner import Plan
from memtrain.options import RunConfig

COLOURS = dict(zip(PARTS, ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377"), strict=True))
HOST_WORDS = {"disk_checkpoint": "a checkpoint on disk", "disk_export": "the export", "disk_run": "all that the run keeps",
              "ram_save": "copies in host memory while saving", "ram_offload": "offloaded activations in host memory",
              "ram_workers": "loader workers"}


def size(nbytes: float) -> str:
    """Bytes for people: GB are 10^9."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:,.3f} {unit}"
    return f"{nbytes:.0f} B"


def table(rows: Sequence[Sequence[str]], words: Sequence[int]) -> str:
    """Aligned columns; the first row is the head. Columns of `words` start at the left, numbers end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) if index in words else cell.rjust(width)
                               for index, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)


def bill(prediction: Prediction) -> str:
    """Bytes by part (down) and phase (across), at the peak of each phase; then what stands beside the tensors."""
    phases = list(prediction.phases)
    rows = [["at the peak of", *phases]]
    rows += [[part, *(size(prediction.phase_parts[phase][part]) for phase in phases)] for part in PARTS]
    rows += [["all tensors", *(size(prediction.phases[phase]) for phase in phases)]]
    lines = [table(rows, [0]),
             f"peak {size(prediction.peak_bytes)} ({prediction.peak_bytes} bytes), set by {prediction.operation}"]
    lines += [f"beside the tensors: {name} {size(nbytes)}" for name, nbytes in prediction.apart.items()]
    if "disk_run" in prediction.host:
        lines.append("around the device: " + ", ".join(f"{HOST_WORDS[name]} {size(nbytes)}"
                                                       for name, nbytes in prediction.host.items() if nbytes))
    if prediction.gpu_model and "context" not in prediction.apart:
        words = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in prediction.gpu_model.items())
        lines.append(f"a GPU would add about: {words} ({GPU_STATUS})")
    return "\n".join(lines)


def changed(changes: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in changes.items()) or "as given"


def ranked(plan: Plan, most_rows: int) -> str:
    """The recipes in their order of preference: `most_rows` around the chosen one, and the smallest."""
    at = plan.rows.index(plan.chosen)
    first = max(0, min(at - most_rows // 2, len(plan.rows) - most_rows))
    shown = list(range(first, min(first + most_rows, len(plan.rows))))
    smallest = min(range(len(plan.rows)), key=lambda index: plan.rows[index].peak_bytes)
    if smallest not in shown:
        shown.append(smallest)
    rows = [["", "rank", "peak", "time", "result", "changes"]]
    for index in shown:
        row = plan.rows[index]
        mark = "->" if row is plan.chosen and plan.fits else ("fits" if row.fits else "")
        rows.append([mark, str(index + 1), size(row.peak_bytes), f"{row.relative_time:.3f}",
                     "same" if row.accuracy == 0 else "changes", changed(row.changes)])
    return table(rows, [0, 4, 5])


def command(config: RunConfig) -> str:
    """The command of the run that `config` is."""
    defaults, words = RunConfig(), []
    for name, value in asdict(config).items():
        if value == getattr(defaults, name):
            continue
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else ["none" if value is None else str(value)])]
    words = [word.lower() if word in ("True", "False") else word for word in words]
    return "accelerate launch scripts/pretrain.py " + shlex.join(words)


def yaml_text(config: RunConfig) -> str:
    """The recipe as YAML: what differs from the defaults."""
    import yaml

    defaults = RunConfig()
    values = {name: value for name, value in asdict(config).items() if value != getattr(defaults, name)}
    return yaml.safe_dump(values, sort_keys=False)


def plot(predictions: Mapping[str, Prediction], path: Path, budget_bytes: int | None = None) -> None:
    """Stacked bars, phase after phase, in each a bar for each prediction (or measurement) that has it, as an image. Raises
    BadInput."""
    from memtrain.command import BadInput

    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput(f"{path}: not drawn, matplotlib is not installed; run pip install matplotlib") from None
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.add_subplot()
    bars = [(f"{phase}\n{name}" if len(predictions) > 1 else phase, prediction.phase_parts[phase])
            for phase in PHASES for name, prediction in predictions.items() if phase in prediction.phases]
    bottom = [0.0] * len(bars)
    for part in PARTS:
        heights = [parts[part] / 1e9 for _, parts in bars]
        axes.bar(range(len(bars)), heights, bottom=bottom, color=COLOURS[part], label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
    axes.set_ylabel("GB of tensors at the peak of a phase")
    if budget_bytes is not None:
        axes.axhline(budget_bytes / 1e9, color="black", linestyle="--", label="budget")
    axes.legend()
    figure.savefig(path, dpi=120)
