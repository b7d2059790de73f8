"""Loss head that never holds the logits: matrix product and cross-entropy, a chunk of tokens at a time.

Shapes in names: T tokens, c tokens of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
# float32 logits of one chunk. Larger chunks were not faster, smaller ones starve the matrix product.
CHUNK_BYTES = 32 * 2**20
SMALLEST_CHUNK_TOKENS = 64


def automatic_chunk_tokens(vocab_size: int) -> int:
    """Tokens whose float32 logits fill CHUNK_BYTES."""
    return max(SMALLEST_CHUNK_TOKENS, CHUNK_BYTES // (4 * vocab_size))


def linear_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor,
                         chunk_tokens: int | None = None) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[target]; targets of -100 count nothing.

    hidden_TD: float [T, D]; weight_VD: float [V, D]; targets_T: int64 [T]. Under autocast the products run in its
    dtype, as those of `F.linear` would; softmax and the sum are float32. chunk_tokens: None chooses.
    Returns a float32 scalar. Holds no more than chunk_tokens x V logits; in training the gradients are formed chunk by
    chunk in the forward (no product is computed twice), so the backward only scales them.
    """
    chunk = chunk_tokens or automatic_chunk_tokens(weight_VD.shape[0])
    device = hidden_TD.device.type
    if torch.is_autocast_enabled(device):
        # The cast of hidden is on the graph; that of the weight happens inside: its copy lives only for the forward.
        dtype = torch.get_autocast_dtype(device)
        hidden_TD = hidden_TD.to(dtype)
    with torch.autocast(device, enabled=False):
        # inside a Function gradients are always off, and its needs_input_grad ignores no_grad: ask here
        return _LinearCrossEntropy.apply(hidden_TD, weight_VD, targets_T, chunk, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, chunk: int,
                grad_enabled: bool) -> Tensor:
        need_hidden, need_weight = (grad_enabled and need for need in ctx.needs_input_grad[:2])
        cast_VD = weight_VD.to(hidden_TD.dtype)
        # softmax - onehot is at most 1 and mostly near 1 / V, where float16 has few bits left: lift it before the cast
        lift = 1024.0 if hidden_TD.dtype == torch.float16 else 1.0
        total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
        grad_hidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD) if need_weight else None
        for start in range(0, hidden_TD.shape[0], chunk):
            hidden_cD, targets_c = hidden_TD[start:start + chunk], targets_T[start:start + chunk]
            logits_cV = F.linear(hidden_cD, cast_VD).float()
            log_sum_c = logits_cV.logsumexp(dim=-1)
            real_c = targets_c != IGNORE
            index_c1 = targets_c.where(real_c, 0)[:, None]
            losses_c = log_sum_c - logits_cV.gather(1, index_c1)[:, 0]
            total += losses_c.where(real_c, 0.0).sum()
            if not (need_hidden or need_weight):
                continue
            grad_cV = logits_cV.sub_(log_sum_c[:, None]).exp_()
            grad_cV.scatter_add_(1, index_c1, grad_cV.new_full((), -1.0).expand_as(index_c1))
            grad_cV.mul_((real_c * lift)[:, None])
            grad_cV = grad_cV.to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                torch.mm(grad_cV, cast_VD, out=grad_hidden_TD[start:start + chunk])
            if grad_weight_VD is not None:
                if lift != 1.0:  # a sum over tokens, which the lift could push over float16's 65504: take it out before
                    hidden_cD = hidden_cD / lift
                if grad_weight_VD.dtype == grad_cV.dtype:
                    grad_weight_VD.addmm_(grad_cV.t(), hidden_cD)
                else:
                    grad_weight_VD += grad_cV.t() @ hidden_cD
        ctx.grads, ctx.lift = (grad_hidden_TD, grad_weight_VD), lift
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the loss was already differentiated; compute it again for a second backward")
        grads, ctx.grads = ctx.grads, None
        grad_hidden_TD, grad_weight_VD = grads
        # in place: the buffers are ours, and .grad takes them over without a copy
        if grad_hidden_TD is not None:
            _scale_in_place(grad_hidden_TD, grad_output / ctx.lift)
        if grad_weight_VD is not None:
            _scale_in_place(grad_weight_VD, grad_output)
        return grad_hidden_TD, grad_weight_VD, None, None, None


def _scale_in_place(grad: Tensor, scale: Tensor) -> None:
    """grad [rows, D] times a float32 scalar, rounded once: CUDA's mul_ would first round the scalar to grad's dtype."""
    if grad.dtype == scale.dtype:
        grad.mul_(scale)
        return
    for part in grad.split(max(1, CHUNK_BYTES // (4 * grad.shape[-1]))):
        part.copy_(part.float().mul_(scale))
