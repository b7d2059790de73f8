"""Real runs of tiny models, measured by the allocator's own events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import reset_accelerate
from real_runs import Steps, allocator_peaks

from memtrain.options import RunConfig


@pytest.fixture(autouse=True)
def own_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    reset_accelerate()
    yield
    reset_accelerate()


@pytest.fixture
def measured(tmp_path: Path) -> Callable[[RunConfig], dict[str, int]]:
    """measured(config) -> peak bytes of a real run's training, evaluation and save."""
    return lambda config: allocator_peaks(Steps(config, tmp_path).run)
