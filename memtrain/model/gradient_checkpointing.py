"""Which activations a decoder layer keeps for the backward, and which it computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# The matrix products of a decoder layer, in the order in which it runs them.
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_aten = torch.ops.aten
_PRODUCT_OPS = {_aten.mm.default, _aten.addmm.default}
_ATTENTION_OPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_attention_math.default,
    _aten._scaled_dot_product_attention_math_for_mps.default,
}


def run_plain(layer: Callable[..., Tensor], hidden_NSD: Tensor, *rest: object, keep_rng: bool) -> Tensor:
    """Keep whatever autograd saves."""
    return layer(hidden_NSD, *rest)


def run_full(layer: Callable[..., Tensor], hidden_NSD: Tensor, *rest: object, keep_rng: bool) -> Tensor:
    """Keep the layer's input alone; run the layer again in the backward (arXiv 1604.06174)."""
    return checkpoint(layer, hidden_NSD, *rest, use_reentrant=False, preserve_rng_state=keep_rng)


def run_selective(layer: Callable[..., Tensor], hidden_NSD: Tensor, *rest: object, keep_rng: bool,
                  kept: tuple[str, ...]) -> Tensor:
    """Keep the layer's input, attention, and the products named in `kept`; compute the rest again (arXiv 2205.05198, sec. 5).

    A product's output of width w costs w numbers and its recomputation 2 w times its input's width: for equal widths all are
    worth the same. Attention costs as little to keep and grows with the sequence to recompute, so it is always kept.
    """
    return checkpoint(layer, hidden_NSD, *rest, use_reentrant=False, preserve_rng_state=keep_rng,
                      context_fn=partial(_selective_contexts, kept))


def _selective_contexts(kept: tuple[str, ...]) -> Any:
    seen = {False: 0, True: 0}  # products so far, in the forward and in the recomputation

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in _PRODUCT_OPS:
            name = PRODUCTS[seen[context.is_recompute]]
            seen[context.is_recompute] += 1
            keep = name in kept
        else:
            keep = operator in _ATTENTION_OPS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


POLICIES: dict[str, Callable[..., Tensor]] = {
    "none": run_plain,
    # nothing but norms, rotary embedding, SiLU, sums and casts is computed again: no product is
    "selective": partial(run_selective, kept=PRODUCTS[:-1]),
    # the wide products of the MLP and the output projection are computed again
    "selective_deep": partial(run_selective, kept=("q_proj", "k_proj", "v_proj")),
    "full": run_full,
}
