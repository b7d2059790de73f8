"""Which activations a decoder layer keeps for the backward, and which it computes again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def run_full(layer: Callable[..., Tensor], hidden_NSD: Tensor, *rest: object, keep_rng: bool) -> Tensor:
    """Keep the layer's input alone; run the layer again in the backward (arXiv 1604.06174)."""
    return checkpoint(layer, hidden_NSD, *rest, use_reentrant=False, preserve_rng_state=keep_rng)


def run_plain(layer: Callable[..., Tensor], hidden_NSD: Tensor, *rest: object, keep_rng: bool) -> Tensor:
    """Keep whatever autograd saves."""
    return layer(hidden_NSD, *rest)


POLICIES = {"none": run_plain, "full": run_full}
