"""A tiny training job; its tokenised corpus is cached for the session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs import THREADS, Job, reset_accelerate


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Job:
    return Job(tmp_path_factory.mktemp("job"), cache)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """No Accelerator of an earlier test decides over the next one's."""
    reset_accelerate()
    yield
    reset_accelerate()
