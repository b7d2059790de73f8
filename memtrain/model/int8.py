"""Linear layers whose weight is int8 with a float32 scale per row, widened some rows at a time where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.model.layers import UpdateRows

LARGEST = 127
BLOCK_NUMBERS = 2**21  # of a weight, widened at a time: its gradient in bfloat16 then takes 4 MiB
CHUNK_NUMBERS = 2**21  # of an input's gradient, summed over blocks of rows in float32 at a time: 8 MiB
TINY = torch.finfo(torch.float32).tiny


def quantise_(weight: Tensor, scale: Tensor, values: Tensor) -> None:
    """Write float rows [R, C] as int8 and their float32 scales [R], to nearest; each row's largest magnitude becomes 127."""
    values = values.float()
    scale.copy_(values.abs().amax(dim=1).div_(LARGEST).clamp_min_(TINY))
    weight.copy_((values / scale[:, None]).round_())


def widened(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows of a weight in `dtype`; scale: of int8 rows, else None."""
    return weight.to(dtype) if scale is None else (weight.float() * scale[:, None]).to(dtype)


def row_blocks(weight: Tensor) -> Iterator[slice]:
    """Slices of rows that hold about BLOCK_NUMBERS."""
    rows = max(1, BLOCK_NUMBERS // weight.shape[1])
    for first in range(0, weight.shape[0], rows):
        yield slice(first, min(first + rows, weight.shape[0]))


@torch.no_grad()
def initialise_(weight: Tensor, scale: Tensor, std: float) -> None:
    """N(0, std), rounded; made by blocks, so that the weight exists in no other dtype."""
    for block in row_blocks(weight):
        values = torch.empty(weight[block].shape, dtype=torch.float32, device=weight.device).normal_(std=std)
        quantise_(weight[block], scale[block], values)


class Int8Linear(nn.Module):
    """As `nn.Linear`, with weight int8 [out, in] and weight_scale float32 [out], neither of which has a gradient.

    update_rows(first, grad_bD): where set, the backward hands over the gradient of the weight b rows at a time, in the dtype of
    the input, and these rows may then change: gradient, widened weight and update never exist for more than a block.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(out_features, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.update_rows: UpdateRows | None = None

    def initialise(self, std: float) -> None:
        """N(0, std), rounded."""
        initialise_(self.weight, self.weight_scale, std)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            kept = _Keep.apply(x)
            out = _Int8Product.apply(kept, kept.grad_fn, self)
        else:
            out = self.product(x)
        return out if self.bias is None else out + self.bias

    def product(self, x: Tensor) -> Tensor:
        """x @ weight.T. The scales come after the product: int8 numbers are exact in bfloat16, scaled ones would not be."""
        flat = x.flatten(0, -2)
        out = flat.new_empty(flat.shape[0], self.out_features)
        for block in row_blocks(self.weight):
            torch.mul(flat @ self.weight[block].to(x.dtype).t(), self.weight_scale[block], out=out[:, block])
        return out.view(*x.shape[:-1], self.out_features)


class _Keep(torch.autograd.Function):
    """Identity that keeps x for the product after it. The product itself would keep it when it is done: the recomputation of
    a layer, which ends when all that is kept is there, would run its last product for nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Any, linear: Int8Linear) -> Tensor:
        ctx.kept, ctx.linear = kept, linear
        return linear.product(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.kept.saved_tensors
        linear, x, shape = ctx.linear, x.flatten(0, -2), x.shape
        grad = grad.flatten(0, -2)
        grad_x = torch.empty_like(x)
        tokens = max(1, CHUNK_NUMBERS // x.shape[1])
        for first in range(0, x.shape[0], tokens):
            part = slice(first, first + tokens)
            total = torch.zeros(x[part].shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
            for block in row_blocks(linear.weight):
                total += (grad[part, block] * linear.weight_scale[block]).to(x.dtype) @ linear.weight[block].to(x.dtype)
            grad_x[part] = total
        if linear.update_rows is not None:  # all uses of these rows are over
            for block in row_blocks(linear.weight):
                linear.update_rows(block.start, grad[:, block].t() @ x)
        return grad_x.view(shape), None, None
