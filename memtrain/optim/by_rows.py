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
# A row's scale stays as it is, so that numbers with no update stay too, until its largest passes 127 or falls below 90.
# Then the largest becomes 120: steps are as fine as the row allows.
INT8_SMALLEST, INT8_RENEWED = 90.0, 120.0
# Near 2^16 / 1.618..., odd (2^16 updates see every phase once), and as a fraction of 2^16 far from any simpler one: its
# continued fraction holds no number above 3, where that of the nearest odd number, 40503, holds an 18.
GOLDEN = 40521
LONGEST = 8.0  # root mean square of a row's direction, usually about 1: a row that is rarely needed takes a long step then
SMALLEST_SCALE = 1e-30  # what a row that is long without gradient fades to: numbers over a scale of 0 are undefined
LEAST_COLUMN = 1e-4  # of a column's second moment / their mean: one that was never needed takes no wild step when it is
TINY = torch.finfo(torch.float32).tiny

Direction = Callable[[Tensor, slice, Callable[[], Tensor]], Tensor]


def stochastic_round_rows_(target: Tensor, scale: Tensor, values: Tensor, seed: int, number: int, start: int) -> None:
    """Write float32 values [b, C], in units of the rows' scales, into int8 target [b, C]: up or down with the odds that make
    the mean exact; whole numbers stay. Overwrites `values`; changes a scale [b] where its row leaves the range of int8.

    number: of the update; start: place of the first number in its parameter. A place has random phases (of the seed) which
    turn by the golden ratio from update to update: each is uniform, and all together are evenly spread, so that a steady small
    change arrives to within a few steps, where independent draws would leave it to a random walk.
    """
    largest = values.abs().amax(dim=1)
    # also where it is infinite or undefined: no int8 can say so, the scale then does
    renew = ~((largest <= INT8_LARGEST) & ((largest >= INT8_SMALLEST) | (largest == 0)))
    factor = torch.where(renew, largest / INT8_RENEWED, 1.0)
    scale.mul_(factor)
    values.div_(factor[:, None])
    noise = noise_halves(start, start + values.numel(), seed, values.device).view(values.shape)
    noise.add_((number * GOLDEN + 2**15) % 2**16 - 2**15)  # int16 goes round
    # (k + 1/2) / 2^16 for k from 0: with numbers below 2^7 the sum is exact in float32's 24 bits
    values.add_(noise.float().mul_(2.0**-16).add_(0.5 + 2.0**-17)).floor_()
    target.copy_(values)


def update_rows(weight: Tensor, scale: Tensor | None, grad: Tensor, step: Step, seed: int, first: int, rate: float,
                direction: Direction) -> None:
    """weight [R, C] (int8 with scale [R], else float): the rows that start with number `first` -= rate * direction(gradient
    [b, C], these rows, their root mean square [b]). grad: [rows, C]; a float32 one is overwritten."""
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

        change = direction(g, part, size_of_rows)
        if scale is None:
            w.mul_(1 - step.lr * step.weight_decay)
        else:  # nothing to round
            unit.mul_(1 - step.lr * step.weight_decay).clamp_min_(SMALLEST_SCALE)
        w.sub_(change.mul_((rate / unit)[:, None]))
        del g, change
        if scale is not None:
            stochastic_round_rows_(stored, unit, w, step.parameter_seed, step.number, place * columns)
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


def _factored(weight: Tensor, state: dict[str, Any], step: Step, first: int, eps: float) -> Callable[[Tensor, slice], Tensor]:
    """(float32 gradient [b, C] of rows, these rows) -> the gradient, in place, over the root of its factored second moment
    (arXiv 1804.04235, alg. 4), in one pass over a matrix: the second moment of a row holds this gradient, that of a column
    those before it; eps: the smallest root. Rows longer than LONGEST are shortened to it."""
    rows, columns = weight.shape
    row = _state(state, "row_var", weight, rows)
    column = _state(state, "col_var", weight, columns)
    gathered = _state(state, "col_sum", weight, columns)
    if first == 0:
        column.lerp_(gathered.div_(rows), max(1, step.number - 1)**-0.8)
        gathered.zero_()
    mean = column.mean()  # 0 before the second update, and as long as there was no gradient
    flat_column = torch.where(mean > 0, column / mean.clamp_min(TINY), 1.0).clamp_min_(LEAST_COLUMN).rsqrt_()

    def direction(g: Tensor, part: slice) -> Tensor:
        square = g.square()
        gathered.add_(square.sum(dim=0))
        row[part].lerp_(square.mean(dim=1), step.number**-0.8)
        del square
        g.mul_(row[part].clamp_min(eps**2).rsqrt_()[:, None])
        g.mul_(flat_column)
        length = g.square().mean(dim=1).sqrt_()
        return g.div_(length.div_(LONGEST).clamp_min_(1.0)[:, None])

    return direction


def adafactor_rows(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Step, bits: int, seed: int, first: int,
                   scale: Tensor | None = None) -> None:
    """Adafactor without first moment (arXiv 1804.04235, alg. 5), but a row's update is relative to the row's own size, and
    shortened by its own length."""
    if weight.dim() < 2:
        vector_adamw(weight, grad, state, step, seed)
        return
    factored = _factored(weight, state, step, first, FACTORED_EPS[0])

    def direction(g: Tensor, part: slice, size: Callable[[], Tensor]) -> Tensor:
        return factored(g, part).mul_(size().clamp_min_(FACTORED_EPS[1])[:, None])

    update_rows(weight, scale, grad, step, seed, first, min(step.lr, step.number**-0.5), direction)


def adamw_factored(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Step, bits: int, seed: int, first: int,
                   scale: Tensor | None = None) -> None:
    """AdamW whose second moment is factored (and fades as Adafactor's does, not by beta2), and whose first moment is kept where
    `step.first_moment` says so: in int8 with a scale per row, of the gradient already divided."""
    if weight.dim() < 2:
        vector_adamw(weight, grad, state, step, seed)
        return
    factored = _factored(weight, state, step, first, step.eps)
    if step.first_moment and "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(weight, dtype=torch.int8)
        state["exp_avg_scale"] = torch.ones(weight.shape[0], dtype=torch.float32, device=weight.device)
    noise_seed = mix_seed(step.parameter_seed, 1)

    def direction(g: Tensor, part: slice, size: Callable[[], Tensor]) -> Tensor:
        u = factored(g, part)
        if not step.first_moment:
            return u
        codes, unit = state["exp_avg"][part], state["exp_avg_scale"][part]
        unit.mul_(step.beta1).clamp_min_(SMALLEST_SCALE)
        mean = u.mul_((1 - step.beta1) / unit[:, None]).add_(codes)
        # rounded, they come back as they will be read
        stochastic_round_rows_(codes, unit, mean, noise_seed, step.number, part.start * weight.shape[1])
        return mean.mul_((unit / (1 - step.beta1**step.number))[:, None])

    update_rows(weight, scale, grad, step, seed, first, step.lr, direction)


BY_ROWS = {"adafactor_rows": adafactor_rows, "adamw_factored": adamw_factored}
