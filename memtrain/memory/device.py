"""What a device adds to the tensors: on a GPU the allocator's rounding, cuBLAS and the context; on a CPU the process itself.

The GPU's numbers are a model and stated constants. They are not yet checked on a GPU.
"""

from __future__ import annotations

import bisect
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from memtrain.options import RunConfig

GPU_STATUS = "not yet checked on a GPU"

# c10/cuda/CUDACachingAllocator.cpp and its headers: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc,
# kRoundLarge
BLOCK_BYTES = 512
SMALL_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
OWN_SEGMENT_BYTES = 10 * 2**20
LARGE_ROUND_BYTES = 2 * 2**20

# aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 2 x 4096 KiB + 8 x 16 KiB; on Hopper 8 x 4096 KiB
CUBLAS_BYTES = (2 * 4096 + 8 * 16) * 1024
CUBLAS_HOPPER_BYTES = 8 * 4096 * 1024
# a CUDA 12 context with lazily loaded kernels; users report 300 to 600 MB by card and driver
CONTEXT_BYTES = 500_000_000

# mallopt(3). glibc keeps freed memory by default; with these a process holds what its tensors hold: large blocks are maps of
# their own, and go back when freed. The slices of an optimizer's update stay below and are used again, since clearing new
# pages for each would take longer than the update. Where addresses are capped, threads share one arena too: each other one
# reserves 64 MiB of them.
MMAP_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES = 2**19, 2**22
TUNED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES), "MALLOC_TRIM_THRESHOLD_": str(TRIM_THRESHOLD_BYTES)}


def give_back_freed_memory() -> None:
    """Ask glibc for what it keeps of freed memory; the system has it then. Without glibc, nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class CachingAllocator:
    """The CUDA caching allocator, by its sizes alone: `reserved_bytes` is what it holds of the device. Segments are not given
    back, as in a run that never meets its limit."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self.free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # small pool?: (bytes, segment, offset)
        self.blocks: dict[tuple[int, int], tuple[int, bool]] = {}  # (segment, offset) -> (bytes, is free)
        self.after: dict[tuple[int, int], tuple[int, int]] = {}  # (segment, end) -> start of the block that ends there
        self.taken: dict[int, tuple[int, int]] = {}
        self.small_segments: list[bool] = [False]  # by number, from 1

    def replay(self, events: Iterable[tuple[int, int]]) -> int:
        """Most bytes reserved over (storage number, bytes; negative: freed) events."""
        for number, nbytes in events:
            if nbytes > 0 and number not in self.taken:
                self.taken[number] = self.take(nbytes)
            elif nbytes < 0 and number in self.taken:
                self.give(self.taken.pop(number))
        return self.reserved_bytes

    def take(self, nbytes: int) -> tuple[int, int]:
        """(segment, offset) of a new block: the smallest free one that holds it, else in a new segment."""
        nbytes = max(BLOCK_BYTES, -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES)
        small = nbytes <= SMALL_BYTES
        pool = self.free[small]
        at = bisect.bisect_left(pool, (nbytes, -1, -1))
        if at == len(pool):
            size = SMALL_SEGMENT_BYTES if small else (
                LARGE_SEGMENT_BYTES if nbytes < OWN_SEGMENT_BYTES else -(-nbytes // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES)
            self.reserved_bytes += size
            self.small_segments.append(small)
            self._add(small, size, len(self.small_segments) - 1, 0)
            at = bisect.bisect_left(pool, (nbytes, -1, -1))
        size, segment, offset = pool.pop(at)
        rest = size - nbytes
        if rest >= BLOCK_BYTES if small else rest > SMALL_BYTES:
            self._add(small, rest, segment, offset + nbytes)
            size = nbytes
        self.blocks[segment, offset] = (size, False)
        self.after[segment, offset + size] = (segment, offset)
        return segment, offset

    def give(self, block: tuple[int, int]) -> None:
        """Free a block and join it with free neighbours."""
        segment, offset = block
        size, _ = self.blocks[block]
        small = self.small_segments[segment]
        following = self.blocks.get((segment, offset + size))
        if following is not None and following[1]:
            self._remove(small, following[0], segment, offset + size)
            size += following[0]
        before = self.after.get((segment, offset))
        if before is not None and self.blocks[before][1]:
            before_size = self.blocks[before][0]
            self._remove(small, before_size, *before)
            del self.blocks[block]
            offset, size = before[1], size + before_size
        self._add(small, size, segment, offset)

    def _add(self, small: bool, size: int, segment: int, offset: int) -> None:
        bisect.insort(self.free[small], (size, segment, offset))
        self.blocks[segment, offset] = (size, True)
        self.after[segment, offset + size] = (segment, offset)

    def _remove(self, small: bool, size: int, segment: int, offset: int) -> None:
        pool = self.free[small]
        pool.pop(bisect.bisect_left(pool, (size, segment, offset)))
        del self.blocks[segment, offset]


def gpu_apart(events: Iterable[tuple[int, int]], tensor_peak_bytes: int) -> dict[str, int]:
    """What a GPU would add to these tensors. See `GPU_STATUS`."""
    import torch

    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return {"allocator": max(0, CachingAllocator().replay(events) - tensor_peak_bytes),
            "workspace": CUBLAS_HOPPER_BYTES if hopper else CUBLAS_BYTES, "context": CONTEXT_BYTES}


def device_type() -> str:
    """Type of the device a run would train on: that of Accelerate."""
    import torch

    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return "cuda" if torch.cuda.is_available() and not on_cpu else "cpu"


def free_bytes() -> int:
    """Free memory of the device a run would train on."""
    if device_type() == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    return free_host_bytes()


def free_host_bytes() -> int:
    """Host memory that can be had without swapping."""
    import psutil

    return psutil.virtual_memory().available


def start_real_run(config: RunConfig, **environment: str) -> subprocess.Popen[str]:
    """Two real updates of `config` on random rows in a child process with `TUNED_MALLOC`; see `real_run_result`."""
    child = subprocess.Popen([sys.executable, "-m", "memtrain.memory.device"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True,
                             env={**os.environ, **TUNED_MALLOC, "ACCELERATE_USE_CPU": "true", **environment})
    assert child.stdin is not None
    child.stdin.write(json.dumps(asdict(config)))
    child.stdin.close()
    child.stdin = None
    return child


def real_run_result(child: subprocess.Popen[str], timeout_seconds: float = 600) -> dict[str, int]:
    """{process_bytes, tensor_bytes}: the most that the process and its tensors took."""
    out, error = child.communicate(timeout=timeout_seconds)
    if child.returncode != 0:
        raise RuntimeError(f"the run that measures a process failed: {error.strip()[-500:]}")
    return json.loads(out.splitlines()[-1])


def smallest_run(config: RunConfig) -> RunConfig:
    """A run whose tensors are next to nothing: what its process takes is Python and libraries."""
    return replace(config, model="tiny", hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                   num_key_value_heads=2, head_dim=None, vocab_size=256, seq_len=32, global_batch_size=1, micro_batch_size=1,
                   tie_word_embeddings=False if config.head_in_blocks else config.tie_word_embeddings)


def process_bytes(child: subprocess.Popen[str], tensor_peak_bytes: int) -> int:
    """Most bytes of a training process with these tensors, from a `smallest_run` that was started."""
    found = real_run_result(child)
    return tensor_peak_bytes + found["process_bytes"] - found["tensor_bytes"]


def _real_run(options: dict[str, Any]) -> dict[str, int]:
    import torch

    import memtrain.data.prepare
    import memtrain.training.finish  # noqa: F401 (what pretrain.py imports is part of its process)
    from memtrain.data.order import Update
    from memtrain.memory.tracker import Tracker
    from memtrain.model.presets import model_config
    from memtrain.training.step import build, make_accelerator, micro_batch_size, train_step

    config = RunConfig(**options)
    shape = model_config(config)
    rows = micro_batch_size(config, 1)
    batches = []
    for _ in range(max(1, config.global_batch_size // rows)):
        ids = torch.randint(0, shape.vocab_size, (rows, config.seq_len + 1))
        batches.append({"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()})
    tracker = Tracker("cpu")
    for batch in batches:
        for tensor in batch.values():
            tracker.ignore(tensor)
    with tracker:
        state = build(config, shape, make_accelerator(config), 1000)
        tracker.attach(state)
        for _ in range(2):
            train_step(state, Update(batches, len(batches) * rows * config.seq_len, len(batches) * rows, 0))
        tracker.detach()
    with open("/proc/self/status", encoding="utf-8") as status:
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return {"process_bytes": peak, "tensor_bytes": tracker.ledger.snapshots()[""].peak_bytes}


if __name__ == "__main__":
    print(json.dumps(_real_run(json.load(sys.stdin))))
