"""How far a run is."""

from dataclasses import dataclass


@dataclass
class Progress:
    """step: updates made. position: samples taken, over all processes (an update whose gradients overflowed takes samples and
    is not counted as made). tokens: targets trained on. seconds: time spent training."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    seconds: float = 0.0
