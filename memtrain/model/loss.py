"""Loss head that never holds the logits: matrix product and cross-entropy, a chunk of tokens at a time.

The gradient of its weight is as large as the weight. Where an optimizer can take it by rows, it never exists whole either.

Shapes in names: T tokens, c tokens of a chunk, D hidden, V vocabulary, b rows of a block of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from memtrain.model.int8 import widened
from memtrain.model.layers import UpdateRows

IGNORE = -100
# Each chunk reads and writes the whole gradient of the weight once: it needs enough tokens for the products to outweigh that.
CHUNK_TOKENS = {"cpu": 128, "cuda": 1024}
CHUNK_BYTES = 16 * 2**20  # a chunk of fewer float32 logits than this saves nothing worth having
BLOCK_BYTES = 8 * 2**20  # float32 rows of the weight that are cast, or whose gradient is formed, at a time
UPDATE_BYTES = 4 * 2**20  # float32 rows of the weight's gradient, and logits of them, where rows are updated in the backward
UPDATE_ROWS_MULTIPLE = 256  # whole blocks of an optimizer's low-bit state, whatever the width


def automatic_chunk_tokens(vocab_size: int, device_type: str) -> int:
    """Tokens of a chunk: the more of CHUNK_TOKENS of the device, and as many as fill CHUNK_BYTES with float32 logits."""
    return max(CHUNK_TOKENS.get(device_type, CHUNK_TOKENS["cuda"]), CHUNK_BYTES // (4 * vocab_size))


def linear_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor,
                         chunk_tokens: int | None = None, update_rows: UpdateRows | None = None,
                         scale_V: Tensor | None = None) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[target]; targets of -100 count nothing.

    hidden_TD: float [T, D]; weight_VD: float [V, D]; targets_T: int64 [T]. Under autocast the products run in its
    dtype, as those of `F.linear` would; softmax and the sum are float32. chunk_tokens: None chooses.
    Returns a float32 scalar. Holds no more than chunk_tokens x V logits; in training the gradients are formed chunk by
    chunk in the forward (no product is computed twice), so the backward only scales them.

    update_rows(first, grad_bD): where given, the weight gets no gradient. The backward computes the logits of a block of the
    vocabulary once more, and hands over the gradient of those b rows (float32, from row `first` on), which may then change.
    scale_V: of the rows of an int8 weight, which has no gradient but by update_rows.
    """
    chunk = chunk_tokens or automatic_chunk_tokens(weight_VD.shape[0], hidden_TD.device.type)
    device = hidden_TD.device.type
    if torch.is_autocast_enabled(device):
        # The cast of hidden is on the graph; that of the weight happens inside: its copy lives only for the forward.
        dtype = torch.get_autocast_dtype(device)
        hidden_TD = hidden_TD.to(dtype)
    with torch.autocast(device, enabled=False):
        # inside a Function gradients are always off, and its needs_input_grad ignores no_grad: ask here
        update_rows = update_rows if torch.is_grad_enabled() and (weight_VD.requires_grad or scale_V is not None) else None
        return _LinearCrossEntropy.apply(hidden_TD, weight_VD, targets_T, chunk, torch.is_grad_enabled(), update_rows, scale_V)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, chunk: int,
                grad_enabled: bool, update_rows: UpdateRows | None, scale_V: Tensor | None) -> Tensor:
        need_hidden, need_weight = (grad_enabled and need for need in ctx.needs_input_grad[:2])
        need_weight = need_weight and update_rows is None
        dtype, tokens = hidden_TD.dtype, hidden_TD.shape[0]
        # softmax - onehot is at most 1 and mostly near 1 / V, where float16 has few bits left: lift it before the cast
        lift = 1024.0 if dtype == torch.float16 else 1.0
        total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
        grad_hidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD) if need_weight else None
        log_sum_T = torch.empty(tokens if update_rows is not None else 0, dtype=torch.float32, device=hidden_TD.device)
        buffer_cV = torch.empty(min(chunk, tokens), weight_VD.shape[0], dtype=torch.float32, device=hidden_TD.device)
        for start in range(0, tokens, chunk):
            hidden_cD, targets_c = hidden_TD[start:start + chunk], targets_T[start:start + chunk]
            logits_cV = buffer_cV[:hidden_cD.shape[0]]
            for block, weight_bD in _blocks(weight_VD, scale_V, dtype):
                _product(hidden_cD, weight_bD.t(), out=logits_cV[:, block])
            real_c = targets_c != IGNORE
            index_c1 = targets_c.where(real_c, 0)[:, None]
            target_c, largest_c = logits_cV.gather(1, index_c1)[:, 0], logits_cV.amax(dim=1)
            exp_cV = logits_cV.sub_(largest_c[:, None]).exp_()  # in place: there is one buffer of c x V and no other
            sum_c = exp_cV.sum(dim=1)
            log_sum_c = sum_c.log() + largest_c
            total += (log_sum_c - target_c).where(real_c, 0.0).sum()
            if update_rows is not None:
                log_sum_T[start:start + chunk] = log_sum_c
            if not (need_hidden or need_weight):
                continue
            weight_c = (lift * real_c).float()
            grad_cV = exp_cV.mul_((weight_c / sum_c)[:, None]).scatter_add_(1, index_c1, -weight_c[:, None])
            # under the lift, a sum over tokens could pass float16's 65504: take it out before
            divided_cD = hidden_cD if lift == 1.0 else hidden_cD / lift
            grad_hidden_cD = hidden_cD.new_zeros(hidden_cD.shape, dtype=torch.float32)
            for block, weight_bD in _blocks(weight_VD, scale_V, dtype):
                grad_cb = grad_cV[:, block].to(dtype)
                if need_hidden:
                    grad_hidden_cD += grad_cb @ weight_bD
                if grad_weight_VD is not None:
                    _add_product(grad_weight_VD[block], grad_cb.t(), divided_cD)
            if grad_hidden_TD is not None:
                grad_hidden_TD[start:start + chunk] = grad_hidden_cD
        ctx.grads, ctx.lift, ctx.update_rows, ctx.scale_V = (grad_hidden_TD, grad_weight_VD), lift, update_rows, scale_V
        if update_rows is not None:
            ctx.save_for_backward(hidden_TD, weight_VD, targets_T, log_sum_T)
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
        if ctx.update_rows is not None:
            hidden_TD, weight_VD, targets_T, log_sum_T = ctx.saved_tensors
            scale_T = grad_output * (targets_T != IGNORE)
            for first, grad_bD in _weight_gradient_blocks(hidden_TD, weight_VD, ctx.scale_V, targets_T, log_sum_T, scale_T):
                ctx.update_rows(first, grad_bD)
        return grad_hidden_TD, grad_weight_VD, None, None, None, None, None


def update_rows_at_a_time(weight_VD: Tensor) -> int:
    """Rows whose gradient is formed and handed to an optimizer at a time."""
    return max(1, UPDATE_BYTES // (4 * weight_VD.shape[1] * UPDATE_ROWS_MULTIPLE)) * UPDATE_ROWS_MULTIPLE


def _weight_gradient_blocks(hidden_TD: Tensor, weight_VD: Tensor, scale_V: Tensor | None, targets_T: Tensor,
                            log_sum_T: Tensor, scale_T: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, float32 gradient of the rows of a block). A block's rows may change once its gradient is out."""
    rows = update_rows_at_a_time(weight_VD)
    tokens = max(1, UPDATE_BYTES // (4 * rows))
    for first in range(0, weight_VD.shape[0], rows):
        block = slice(first, first + rows)
        weight_bD = widened(weight_VD[block], None if scale_V is None else scale_V[block], hidden_TD.dtype)
        grad_bD = torch.zeros(weight_bD.shape, dtype=torch.float32, device=weight_VD.device)
        for start in range(0, hidden_TD.shape[0], tokens):
            chunk = slice(start, start + tokens)
            hidden_cD, scale_c = hidden_TD[chunk], scale_T[chunk]
            odds_cb = (hidden_cD @ weight_bD.t()).float().sub_(log_sum_T[chunk, None]).exp_().mul_(scale_c[:, None])
            index_c = targets_T[chunk] - first
            inside_c = (index_c >= 0) & (index_c < weight_bD.shape[0])
            odds_cb.scatter_add_(1, index_c.where(inside_c, 0)[:, None], -(scale_c * inside_c)[:, None])
            _add_product(grad_bD, odds_cb.to(hidden_TD.dtype).t(), hidden_cD)
        yield first, grad_bD


def _blocks(weight_VD: Tensor, scale_V: Tensor | None, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the weight in `dtype`, a block at a time, so that no cast copy of the whole exists. In float32 there is
    nothing to cast and no narrower result to widen: one block."""
    rows = weight_VD.shape[0] if weight_VD.dtype == dtype == torch.float32 else max(1, BLOCK_BYTES // (4 * weight_VD.shape[1]))
    for start in range(0, weight_VD.shape[0], rows):
        block = slice(start, start + rows)
        yield block, widened(weight_VD[block], None if scale_V is None else scale_V[block], dtype)


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right, widened to float32 after the product where that is narrower."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _scale_in_place(grad: Tensor, scale: Tensor) -> None:
    """grad [rows, D] times a float32 scalar, rounded once: CUDA's mul_ would first round the scalar to grad's dtype."""
    if grad.dtype == scale.dtype:
        grad.mul_(scale)
        return
    for part in grad.split(max(1, BLOCK_BYTES // (4 * grad.shape[-1]))):
        part.copy_(part.float().mul_(scale))
