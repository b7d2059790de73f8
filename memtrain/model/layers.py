"""Linear, SwiGLU and RMSNorm that keep for the backward only what cannot be had again for next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK_NUMBERS = 2**21  # of an elementwise backward, worked on at a time
UpdateRows = Callable[[int, Tensor], None]  # (first row, gradient of the rows from there on)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype in which a matrix product of `tensor` runs: autocast's where it is on, else the tensor's own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


class Linear(nn.Linear):
    """`nn.Linear` that under autocast keeps its weight for the backward, and not the weight's cast copy.

    The copy (2 bytes a parameter, alive from forward to backward) is made a second time in the backward; the results are the
    same bits. `recomputed` says that a checkpointed layer makes the copy again anyway: there the plain product is right, and
    lets the recomputation of a layer end before its last product.
    """

    recomputed = False

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        cast = torch.is_autocast_enabled(x.device.type) and self.weight.dtype != dtype
        if not cast or self.recomputed or not torch.is_grad_enabled():
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return _CastLinear.apply(x.to(dtype), self.weight, self.bias)


class _CastLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (flat @ weight.to(x.dtype)).view_as(x)
        if ctx.needs_input_grad[1]:
            grad_weight = (flat.t() @ x.flatten(0, -2)).to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both of one shape and dtype. Keeps the two alone, and in the backward writes their gradients over them:
    of a layer's activations they are the widest. A second backward raises RuntimeError."""
    if torch.compiler.is_compiling():  # which fuses the two operations, and itself chooses what to keep
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.spent = False
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError("the inputs of swiglu now hold their gradients; run the forward again for a second backward")
        ctx.spent = True
        gate, up = (saved.flatten() for saved in ctx.saved_tensors)
        flat = grad.flatten()
        for start in range(0, gate.numel(), BLOCK_NUMBERS):
            block = slice(start, start + BLOCK_NUMBERS)
            grad_up = F.silu(gate[block]).mul_(flat[block])
            grad_silu = flat[block] * up[block]
            torch.ops.aten.silu_backward.grad_input(grad_silu, gate[block], grad_input=gate[block])
            up[block] = grad_up
        return gate.view_as(grad), up.view_as(grad)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (arXiv 1910.07467), in float32 (or wider) inside.

    Keeps its input, which the residual stream keeps anyway, and a number per token. Under autocast the result is given in
    autocast's dtype once, instead of being cast by each matrix product after it.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps, compute_dtype(x))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = _wide(x) * scale, _wide(grad)
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_normed = grad * weight
        # d/dx of x * scale(x): the part of the gradient along the normed row drops out
        along = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = grad_normed.sub_(normed.mul_(along)).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None, None
