"""What update rules share."""

from __future__ import annotations

from dataclasses import dataclass


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


# numbers updated at a time: float32 slices of 256 KiB stay in the cache of a core, and malloc keeps them at hand
SLICE = 2**16
# smallest root of a second moment, smallest size of a parameter; those of torch's Adafactor
FACTORED_EPS = (2.0**-23, 1e-3)
