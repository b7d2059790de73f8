"""Embedding whose gradient need not exist whole: handed to an optimizer some rows of the vocabulary at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        return _EmbeddingByRows.apply(ids, self.weight, self.update_rows)


class _EmbeddingByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VD: Tensor, update_rows: UpdateRows) -> Tensor:
        ctx.save_for_backward(ids, weight_VD)
        ctx.update_rows = update_rows
        return F.embedding(ids, weight_VD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ids, weight_VD = ctx.saved_tensors
        rows = update_rows_at_a_time(weight_VD)
        for first in range(0, weight_VD.shape[0], rows):
            count = min(rows, weight_VD.shape[0] - first)
            index = ids - first
            # tokens of other blocks go to a row after the last, which the kernel leaves out
            index = index.where((index >= 0) & (index < count), count)
            ctx.update_rows(first, torch.ops.aten.embedding_dense_backward(grad, index, count + 1, count, False)[:count])
        return None, None, None
