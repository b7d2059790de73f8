"""Predictions against a real GPU's allocator, on the grid that the CPU's are compared on. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from jobs import reset_accelerate
from memory_grid import GRID
from real_runs import Steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TRAINING = ("init", "forward", "backward", "optimizer")
# large enough that the 512 bytes to which the allocator rounds a tensor are nothing
SHAPE = {"model": "160m", "seq_len": 512, "global_batch_size": 4, "micro_batch_size": 4, "max_steps": 10}


@pytest.fixture(autouse=True)
def own_accelerate() -> Iterator[None]:
    reset_accelerate()
    yield
    reset_accelerate()


def cuda_peaks(steps: Steps) -> dict[str, int]:
    """Most bytes allocated within each part of a run, and (`reserved`) most reserved in all, over those before it."""
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()  # the run's own is made anew, and counted
    torch.cuda.reset_peak_memory_stats()
    before, peaks, reserved = torch.cuda.memory_allocated(), {}, torch.cuda.memory_reserved()

    @contextmanager
    def named(name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - before
        peaks["reserved"] = max(peaks.get("reserved", 0), torch.cuda.max_memory_reserved() - reserved)

    steps.run(named)
    return peaks


@pytest.mark.parametrize("options", GRID, ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()) or "plain")
def test_prediction_against_the_cuda_allocator(options, tmp_path):
    from memtrain.config import make_config
    from memtrain.memory.estimate import in_child, predict
    from memtrain.model.presets import model_config

    config = make_config(SHAPE, options)
    predicted = in_child(predict, config, model_config(config))
    steps = Steps(config, tmp_path)
    measured = cuda_peaks(steps)
    # cuBLAS takes its workspace from the same allocator
    workspace = predicted.apart["workspace"]
    peaks = {"train": max(predicted.phases[phase] for phase in TRAINING),
             "evaluate": predicted.phases["evaluate"], "save": predicted.phases["save"]}
    for name, peak in peaks.items():
        assert abs(peak + workspace - measured[name]) <= 0.01 * measured[name], (name, peak, measured, predicted.operation)
    reserved = predicted.peak_bytes + predicted.apart["allocator"] + workspace
    assert abs(reserved - measured["reserved"]) <= 0.1 * measured["reserved"], (reserved, measured, predicted.apart)
