"""Space on disk for what a run writes, asked for before it is needed."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memtrain.command import BadInput
from memtrain.optim import low_memory, rule
from memtrain.optim.low_memory import LowMemoryOptimizer

# beside the tensors of a checkpoint: names, padding and one record for each of them; tokenizer, random states, run_state.json
BYTES_A_TENSOR = 1024
OTHER_BYTES = 2**20


def model_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def export_bytes(model: torch.nn.Module) -> int:
    """As `model_bytes`, but int8 weights are exported in bfloat16."""
    return sum(tensor.nbytes * (2 if tensor.dtype == torch.int8 else 1) for tensor in model.state_dict().values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state: of its tensors, or before the first update of those that this update will make."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if optimizer.state:
        return sum(tensor.nbytes for values in optimizer.state.values() for tensor in values.values()
                   if isinstance(tensor, Tensor))
    kinds = Counter((parameter.shape, parameter.dtype, group.get("first_moment", False))
                    for group in optimizer.param_groups for parameter in group["params"])
    return sum(count * _state_bytes(optimizer, *kind) for kind, count in kinds.items())


def _state_bytes(optimizer: torch.optim.Optimizer, shape: torch.Size, dtype: torch.dtype, first_moment: bool) -> int:
    """Of one parameter, by an update of one that has no data."""
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=dtype != torch.int8)
    if isinstance(optimizer, LowMemoryOptimizer):
        twin: torch.optim.Optimizer = LowMemoryOptimizer([{"params": [parameter], "first_moment": first_moment}],
                                                         rule=optimizer.rule, state_bits=optimizer.state_bits, lr=0.0)
    else:
        twin = torch.optim.AdamW([parameter])
    if isinstance(twin, LowMemoryOptimizer) and dtype == torch.int8:
        twin.step(rows=low_memory.no_rows(parameter))
        return optimizer_bytes(twin)
    parameter.grad = torch.empty_like(parameter)
    slice_numbers, rule.SLICE = rule.SLICE, max(1, parameter.numel())  # in one piece: it takes no memory
    try:
        twin.step()
    finally:
        rule.SLICE = slice_numbers
    return optimizer_bytes(twin)


def checkpoint_bytes(state: Any) -> int:
    """Bytes of one checkpoint of this `TrainState`: exact in its tensors, and an allowance for all else."""
    tensors = len(state.model.state_dict()) + 4 * sum(len(group["params"]) for group in state.optimizer.param_groups)
    return model_bytes(state.model) + optimizer_bytes(state.optimizer) + BYTES_A_TENSOR * tensors + OTHER_BYTES


def free_disk_bytes(folder: Path) -> int:
    """Free space where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_disk(state: Any, output: Path, keep_last: int) -> None:
    """Raises BadInput where a run does not fit on the disk of `output`: keep_last checkpoints, the next one before the oldest
    goes, and the export, without what is there of an earlier part of the run."""
    one, export = checkpoint_bytes(state), export_bytes(state.model)
    there = sum(path.stat().st_size for name in ("checkpoints", "export") for path in (output / name).rglob("*")
                if path.is_file())
    needed, free = max(0, (keep_last + 1) * one + export - there), free_disk_bytes(output)
    if needed > free:
        raise BadInput(f"output_dir={output}: {needed:,} bytes are wanted for {keep_last + 1} checkpoints and the export, and "
                       f"{free:,} are free; free some space, lower keep_last, or choose an output_dir on another disk")


def require_space(state: Any, folder: Path) -> None:
    """Raises OSError where another checkpoint does not fit beside those in `folder`."""
    needed, free = checkpoint_bytes(state), free_disk_bytes(folder)
    if needed > free:
        raise OSError(errno.ENOSPC, f"a checkpoint takes {needed:,} bytes, and {free:,} are free")
