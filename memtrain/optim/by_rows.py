"""Updates that take the rows of a matrix in one pass, a few at a time, and rows of int8 numbers with a scale each.

Every row is updated by its own gradient and statistics, so the result does not depend on how many rows come at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtrain.optim.low_bit import mix_seed, noise_halves, stochastic_round_
from memtrain.optim.rule import FACTORED_EPS, Step, numbers_at_a_time

INT8_LARGEST = 127
# A row's scale stays as it is, so that numbers with no update stay too, until its largest passes 127 or falls below a third.
# Then the largest becomes 100.
INT8_SMALLEST, INT8_RENEWED = 42.0, 100.0
TINY = torch.finfo(torch.float32).tiny
SHORTEST = 1e-18  # of a gradient: the squares of shorter ones are 0 in float32

Direction = Callable[[Tensor, slice, Callable[[], Tensor]], Tensor]


def stochastic_round_rows_(target: Tensor, scale: Tensor, values: Tensor, seed: int, start: int) -> None:
    """Write float32 values [b, C], in units of the rows' scales, into int8 target [b, C]: up or down with the odds that make
    the mean exact; whole numbers stay. Overwrites `values`; changes a scale [b] where its row leaves the range of int8.
    start: place of the first number in its parameter."""
    largest = values.abs().amax(dim=1)
    # also where it is infinite or undefined: no int8 can say so, the scale then does
    renew = ~((largest <= INT8_LARGEST) & ((largest >= INT8_SMALLEST) | (largest == 0)))
    factor = torch.where(renew, largest / INT8_RENEWED, 1.0)
    scale.mul_(factor)
    values.div_(factor[:, None])
    noise = noise_halves(start, start + values.numel(), seed, values.device).view(values.shape)
    # (k + 1/2) / 2^16 for k from 0: with numbers below 2^7 the sum is exact in float32's 24 bits
    values.add_(noise.float().mul_(2.0**-16).add_(0.5 + 2.0**-17)).floor_()
    target.copy_(values)


def update_rows(weight: Tensor, scale: Tensor | None, grad: Tensor, step: Step, seed: int, first: int, rate: float,
                direction: Direction) -> None:
    """weight [R, C] (int8 with scale [R], else float): the rows that start with number `first` -= rate * direction(gradient
    [b, C], these rows, their root mean square [b]). grad: [rows, C]."""
    columns = weight.shape[1]
    size = max(1, numbers_at_a_time(weight.device) // columns)
    for start in range(0, grad.shape[0], size):
        g = grad[start:start + size].float()
        place = first // columns + start
        part = slice(place, place + g.shape[0])
        stored = weight[part]
        w = stored if stored.dtype == torch.float32 else stored.float()
        unit = torch.ones_like(g[:, 0]) if scale is None else scale[part]

        def size_of_rows(w: Tensor = w, unit: Tensor = unit) -> Tensor:
            return w.square().mean(dim=1).sqrt_().mul_(unit)

        change = direction(g, part, size_of_rows).mul_((rate / unit)[:, None])
        w.mul_(1 - step.lr * step.weight_decay).sub_(change)
        del g, change
        if scale is not None:
            stochastic_round_rows_(stored, unit, w, mix_seed(seed, 0), place * columns)
        elif stored.dtype == torch.bfloat16:
            stochastic_round_(stored.view(-1), w.view(-1), mix_seed(seed, 0), place * columns)


def vector_adamw(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Step, seed: int) -> None:
    """AdamW of a one-dimensional parameter in float32."""
    mean = state.setdefault("exp_avg", torch.zeros_like(weight, dtype=torch.float32))
    square = state.setdefault("exp_avg_sq", torch.zeros_like(weight, dtype=torch.float32))
    g = grad.float()
    mean.lerp_(g, 1 - step.beta1)
    square.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
    w = weight if weight.dtype == torch.float32 else weight.float()
    w.mul_(1 - step.lr * step.weight_decay)
    root = (square / (1 - step.beta2**step.number)).sqrt_().add_(step.eps)
    w.addcdiv_(mean, root, value=-step.lr / (1 - step.beta1**step.number))
    if weight.dtype == torch.bfloat16:
        stochastic_round_(weight, w, mix_seed(seed, 0))


def _state(state: dict[str, Any], name: str, like: Tensor, *shape: int) -> Tensor:
    if name not in state:
        state[name] = torch.zeros(shape, dtype=torch.float32, device=like.device)
    return state[name]


def adafactor_rows(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Step, bits: int, seed: int, first: int,
                   scale: Tensor | None = None) -> None:
    """Adafactor without first moment (arXiv 1804.04235, alg. 4 and 5) in one pass: the second moment of a row holds this
    gradient, that of a column those before it; size and clipping (at a root mean square of 1) are a row's own."""
    if weight.dim() < 2:
        vector_adamw(weight, grad, state, step, seed)
        return
    rows, columns = weight.shape
    row = _state(state, "row_var", weight, rows)
    column = _state(state, "col_var", weight, columns)
    gathered = _state(state, "col_sum", weight, columns)
    if first == 0:
        column.lerp_(gathered.div_(rows), max(1, step.number - 1)**-0.8)
        gathered.zero_()
    flat_column = (column / column.mean().clamp_min(TINY)).clamp_min_(FACTORED_EPS[0]**2).rsqrt_() if step.number > 1 else None

    def direction(g: Tensor, part: slice, size: Callable[[], Tensor]) -> Tensor:
        square = g.square()
        gathered.add_(square.sum(dim=0))
        row[part].lerp_(square.mean(dim=1), step.number**-0.8)
        del square
        g.mul_(row[part].clamp_min(FACTORED_EPS[0]**2).rsqrt_()[:, None])
        if flat_column is not None:
            g.mul_(flat_column)
        length = g.square().mean(dim=1).sqrt_()
        return g.mul_((size().clamp_min_(FACTORED_EPS[1]) / length.clamp_min_(1.0))[:, None])

    update_rows(weight, scale, grad, step, seed, first, min(step.lr, step.number**-0.5), direction)


RANK = 4
RENEWED_EVERY = 200


def apollo(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Step, bits: int, seed: int, first: int,
           scale: Tensor | None = None) -> None:
    """APOLLO with a factor for each row (arXiv 2412.05270, alg. 1): Adam runs on RANK random projections of a row's gradient,
    and the row's update is its gradient made as much longer or shorter as Adam made these."""
    if weight.dim() < 2:
        vector_adamw(weight, grad, state, step, seed)
        return
    rows, columns = weight.shape
    mean, square = _state(state, "exp_avg", weight, rows, RANK), _state(state, "exp_avg_sq", weight, rows, RANK)
    projection = projections(columns, mix_seed(step.parameter_seed, (step.number - 1) // RENEWED_EVERY), weight.device)
    correction1, correction2 = 1 - step.beta1**step.number, 1 - step.beta2**step.number

    def direction(g: Tensor, part: slice, size: Callable[[], Tensor]) -> Tensor:
        projected = g @ projection
        mean[part].lerp_(projected, 1 - step.beta1)
        square[part].mul_(step.beta2).addcmul_(projected, projected, value=1 - step.beta2)
        adam = (mean[part] / correction1).div_((square[part] / correction2).sqrt_().add_(step.eps))
        # of root mean square 1 where Adam's numbers would be 1
        length = g.norm(dim=1).clamp_min_(SHORTEST)
        return g.div_(length[:, None]).mul_(adam.norm(dim=1).mul_((columns / RANK)**0.5)[:, None])

    update_rows(weight, scale, grad, step, seed, first, step.lr, direction)


def projections(columns: int, seed: int, device: torch.device) -> Tensor:
    """float32 [columns, RANK] of random signs over sqrt(RANK)."""
    bits = noise_halves(0, columns * RANK, seed, device)
    return (1.0 - 2.0 * (bits & 1).float()).div_(RANK**0.5).view(columns, RANK)


BY_ROWS = {"adafactor_rows": adafactor_rows, "apollo": apollo}
