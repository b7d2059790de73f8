"""What stands beside the tensors: the allocator's model on cases worked out by hand, and the process on a CPU."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from real_runs import tiny_config

from memtrain.memory.device import (
    BLOCK_BYTES,
    CachingAllocator,
    process_bytes,
    real_run_result,
    smallest_run,
    start_real_run,
)

MIB = 2**20


@pytest.mark.parametrize(("sizes", "reserved"), [
    ([1], 2 * MIB),  # a small block in a small segment
    ([512] * 4096, 2 * MIB), ([512] * 4097, 4 * MIB),
    ([MIB + 1], 20 * MIB),  # a large block below 10 MiB opens a segment of 20
    ([2 * MIB] * 10, 20 * MIB), ([2 * MIB] * 11, 40 * MIB),
    ([10 * MIB + 1], 12 * MIB),  # from 10 MiB on, a segment of its own
    ([19 * MIB, MIB // 2], 22 * MIB),
    ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB),
])
def test_segments(sizes, reserved):
    assert CachingAllocator().replay(enumerate(sizes)) == reserved


def test_freed_blocks_are_joined_and_used_again():
    allocator = CachingAllocator()
    events = [(0, 8 * MIB), (1, 8 * MIB), (0, -8 * MIB), (1, -8 * MIB), (2, 18 * MIB)]
    assert allocator.replay(events) == 20 * MIB
    assert [block for pool in allocator.free.values() for block in pool] == [(2 * MIB, 1, 18 * MIB)]


def test_a_block_too_large_for_the_holes_opens_a_segment():
    allocator = CachingAllocator()
    assert allocator.replay([(0, 8 * MIB), (1, 8 * MIB), (0, -8 * MIB), (2, 9 * MIB)]) == 40 * MIB


def test_random_sequences_lose_nothing():
    """After all is freed, every segment is one free block again."""
    draw, allocator, live = random.Random(0), CachingAllocator(), {}
    for number in range(3000):
        size = draw.choice([draw.randint(1, MIB), draw.randint(MIB, 30 * MIB)])
        allocator.replay([(number, size)])
        live[number] = size
        if len(live) > 40:
            gone = draw.choice(list(live))
            allocator.replay([(gone, -live.pop(gone))])
        taken = sum(block[0] for block in allocator.blocks.values() if not block[1])
        assert taken >= sum(live.values())
    allocator.replay([(number, -size) for number, size in live.items()])
    free = [block for pool in allocator.free.values() for block in pool]
    assert sum(size for size, *_ in free) == allocator.reserved_bytes and all(offset == 0 for *_, offset in free)
    assert all(size % BLOCK_BYTES == 0 for size, *_ in free)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": "full", "mixed_precision": "bf16"}], ids=str)
def test_process_bytes(options):
    """A real process with a tuned malloc, within 3 %."""
    from memtrain.memory.estimate import predict
    from memtrain.model.presets import model_config

    config = tiny_config(hidden_size=512, intermediate_size=1376, num_hidden_layers=8, vocab_size=16000, seq_len=512,
                         global_batch_size=2, micro_batch_size=2, num_attention_heads=8, num_key_value_heads=8, **options)
    real = real_run_result(start_real_run(config))
    predicted = process_bytes(start_real_run(smallest_run(config)), predict(config, model_config(config)).peak_bytes)
    assert abs(predicted - real["process_bytes"]) <= 0.03 * real["process_bytes"], (predicted, real)


def test_freed_memory_is_given_back():
    """Small blocks with one in use above them stay with glibc, until asked for."""
    code = """
from memtrain.memory.device import give_back_freed_memory
def held(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
before = held()
blocks = [libc.malloc(ctypes.c_size_t(10_000)) for _ in range(6000)]
for block in blocks: ctypes.memset(block, 1, 10_000)
for block in blocks[:-1]: libc.free(ctypes.c_void_p(block))
kept = held() - before
give_back_freed_memory()
print(kept, held() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    kept, left = map(int, done.stdout.split())
    assert kept > 50_000 > 10_000 > left, (kept, left)
