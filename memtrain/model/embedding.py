"""Embedding whose gradient need not exist whole: handed to an optimizer some rows of the vocabulary at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memtrain.model.int8 import initialise_, widened
from memtrain.model.layers import UpdateRows
from memtrain.model.loss import update_rows_at_a_time


class Embedding(nn.Embedding):
    """`nn.Embedding` of int64 ids.

    update_rows(first, grad_bD): where set, the weight [V, D] gets no gradient. The backward hands over that of b rows, from row
    `first` on, in the dtype of the weight, for all rows in turn. The same numbers as the whole gradient's.
    """

    update_rows: UpdateRows | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.update_rows is None or not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(ids)
        return _EmbeddingByRows.apply(ids, self.weight, None, None, self.update_rows)


class Int8Embedding(nn.Module):
    """As `Embedding`, with weight int8 [V, D] and weight_scale float32 [V], neither of which has a gradient. Rows come out in
    the default dtype of the time it was made; update_rows takes float32 gradients."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(vocab_size, dtype=torch.float32), requires_grad=False)
        self.dtype = torch.get_default_dtype()
        self.update_rows: UpdateRows | None = None

    def initialise(self, std: float) -> None:
        """N(0, std), rounded."""
        initialise_(self.weight, self.weight_scale, std)

    def forward(self, ids: Tensor) -> Tensor:
        if self.update_rows is None or not torch.is_grad_enabled():
            return _rows(ids, self.weight, self.weight_scale, self.dtype)
        anchor = torch.empty(0, dtype=self.dtype, requires_grad=True)  # without it, no gradient would come back this far
        return _EmbeddingByRows.apply(ids, self.weight, self.weight_scale, anchor, self.update_rows)


def _rows(ids: Tensor, weight_VD: Tensor, scale_V: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[*ids, D] in `dtype`; scale_V: of an int8 weight."""
    found = F.embedding(ids, weight_VD)
    if scale_V is None:
        return found
    return widened(found.flatten(0, -2), scale_V[ids.flatten()], dtype).view(found.shape)


class _EmbeddingByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VD: Tensor, scale_V: Tensor | None, anchor: Tensor | None,
                update_rows: UpdateRows) -> Tensor:
        ctx.save_for_backward(ids, weight_VD)
        ctx.update_rows, ctx.dtype = update_rows, weight_VD.dtype if anchor is None else torch.float32
        return _rows(ids, weight_VD, scale_V, weight_VD.dtype if anchor is None else anchor.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ids, weight_VD = ctx.saved_tensors
        grad = grad.to(ctx.dtype)  # bfloat16 sums of a frequent token would stand still
        rows = update_rows_at_a_time(weight_VD)
        for first in range(0, weight_VD.shape[0], rows):
            count = min(rows, weight_VD.shape[0] - first)
            index = ids - first
            # tokens of other blocks go to a row after the last, which the kernel leaves out
            index = index.where((index >= 0) & (index < count), count)
            ctx.update_rows(first, torch.ops.aten.embedding_dense_backward(grad, index, count + 1, count, False)[:count])
        return None, None, None, None, None
