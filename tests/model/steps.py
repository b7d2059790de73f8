"""One forward and backward of the tiny model, from a fixed random state."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def batch(n: int = 2, s: int = 64, vocab: int = 97, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random ids [n, s], and the one after each."""
    input_ids = torch.randint(0, vocab, (n, s), generator=torch.Generator().manual_seed(seed))
    return input_ids, torch.cat((input_ids[:, 1:], input_ids.new_full((n, 1), -100)), dim=1)


def context(precision: str, cache: bool = False) -> Any:
    """autocast in bfloat16 for `autocast`; a run trains without its cache of cast weights."""
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache) if precision == "autocast" else nullcontext()


def step(model: Any, precision: str = "float32", cache: bool = False, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients by name)."""
    torch.manual_seed(1)
    model.zero_grad()
    with context(precision, cache):
        loss = model(*batch(), **inputs)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
