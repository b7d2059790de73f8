"""A budget as a hard cap, so that a large machine stands in for a small one: beyond it the allocator fails."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from memtrain.command import BadInput
from memtrain.memory.device import CONTEXT_BYTES, MMAP_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES, device_type, smallest_run

if TYPE_CHECKING:
    from memtrain.options import RunConfig

# What a process still maps beside its tensors after `_load_everything`: kernels compiled for other shapes, buffers of writers,
# Python's objects, and the rounding of blocks to pages. Measured: 13 to 42 MiB for 43 to 840 MiB of tensors.
BESIDE_TENSORS_BYTES = 64 * 2**20
BESIDE_TENSORS_SHARE = 1 / 50
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # mallopt(3)
MALLOC_SETTINGS = {M_TRIM_THRESHOLD: TRIM_THRESHOLD_BYTES, M_MMAP_THRESHOLD: MMAP_THRESHOLD_BYTES, M_ARENA_MAX: 1}


def address_space_bytes() -> int:
    """Addresses that this process has mapped (Linux)."""
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def lift() -> None:
    """Let this process have all the addresses that it may ask for."""
    if sys.platform == "linux":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


@contextmanager
def enforced_budget(config: RunConfig) -> Iterator[None]:
    """With `enforce_budget`, no more than `memory_budget` within: of a GPU by PyTorch's allocator, of a CPU by a limit on the
    addresses of this process. Raises BadInput where a system has no such limit."""
    if not config.enforce_budget:
        yield
        return
    from memtrain.options import parse_bytes

    budget_bytes = parse_bytes(str(config.memory_budget))
    if device_type() == "cuda":
        import torch

        # the allocator's share of the card; the context stands outside of it
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, budget_bytes - CONTEXT_BYTES) / total))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    if sys.platform != "linux":
        raise BadInput("enforce_budget=true: only Linux limits the memory of a process without a GPU; leave enforce_budget out")
    import resource

    libc = ctypes.CDLL(None)
    for name, value in MALLOC_SETTINGS.items() if hasattr(libc, "mallopt") else ():
        libc.mallopt(name, value)
    _load_everything(config)
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = address_space_bytes() + budget_bytes + BESIDE_TENSORS_BYTES + int(budget_bytes * BESIDE_TENSORS_SHARE)
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _load_everything(config: RunConfig) -> None:
    """Two updates and an evaluation of next to nothing with the options of the run: libraries, kernels and threads are there
    before the addresses are counted."""
    import torch

    from memtrain.data.order import Update
    from memtrain.model.presets import model_config
    from memtrain.training.step import build, evaluate, make_accelerator, train_step

    small = replace(smallest_run(config), report_to=None)
    accelerator = make_accelerator(small)
    state = build(small, model_config(small), accelerator, 2)
    batch = {name: torch.zeros(1, small.seq_len, dtype=torch.int64) for name in ("input_ids", "targets")}
    for _ in range(2):
        train_step(state, Update([batch], small.seq_len, 1, 0))
    evaluate(state.model, accelerator, [batch])
    torch.ones(2**20).add_(1)  # large enough for several threads: their stacks are 8 MiB each
    accelerator.free_memory()
