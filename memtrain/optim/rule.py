"""What update rules share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Step:
    """What one update of one parameter needs to know."""

    number: int  # updates of this parameter, this one included
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    parameter_seed: int = 0  # the same for all updates of a parameter
    first_moment: bool = False  # keep one, where the rule leaves a choice


# numbers updated at a time on a CPU: float32 slices of 256 KiB stay in the cache of a core, and malloc keeps them at hand
SLICE = 2**16
GPU_SLICES = 16  # at a time on a GPU, which would be done with one before the next operation has reached it
# smallest root of a second moment, smallest size of a parameter; those of torch's Adafactor
FACTORED_EPS = (2.0**-23, 1e-3)


def numbers_at_a_time(device: torch.device) -> int:
    """SLICE on a CPU, GPU_SLICES times as many elsewhere."""
    return SLICE if device.type == "cpu" else GPU_SLICES * SLICE
