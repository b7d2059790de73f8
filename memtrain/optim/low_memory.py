"""Optimizers whose state takes one byte or half a byte for a number, and bfloat16 weights that learn.

Every update runs in float32 over slices of a parameter, so its scratch is a few slices and never a parameter's worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memtrain.command import BadInput
from memtrain.optim.by_rows import BY_ROWS
from memtrain.optim.low_bit import STATE_CODES, Moment, mix_seed, noise_bits, stochastic_round_
from memtrain.optim.rule import FACTORED_EPS, Step, numbers_at_a_time


@dataclass
class Rows:
    """Some rows of a matrix, from `first` on, and their gradient [rows, columns]. An update hands over all rows in order."""

    parameter: Tensor
    first: int
    grad: Tensor
    scale: Tensor | None = None  # float32 [rows of the parameter] of an int8 matrix


def no_rows(parameter: Tensor) -> Rows:
    """An update of none of its rows, which makes the state of a matrix."""
    return Rows(parameter, 0, parameter.new_empty(0, *parameter.shape[1:]))


class LowMemoryOptimizer(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) or Lion (arXiv 2302.06675) with float32, 8-bit or 4-bit state, or Adafactor (arXiv 1804.04235),
    or an update by rows (`by_rows`), which overwrites a float32 gradient.

    bfloat16 parameters are rounded stochastically, so that updates far below their precision arrive on average; float32
    parameters are updated as they are. One-dimensional parameters keep float32 state: they are few, and each of them acts on
    a whole channel. Blocks of 8-bit and 4-bit state follow the rows of a matrix, so the rare rows of an embedding do not
    share a scale with frequent ones (the reason why arXiv 2110.02861, sec. 2.3, keeps embeddings in 32 bits) where the width
    is a multiple of the block.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, rule: str, state_bits: int, lr: float,
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0, seed: int = 0) -> None:
        if state_bits not in (32, *STATE_CODES):
            raise ValueError(f"state_bits={state_bits}: want 32, 8 or 4")
        self.rule, self.state_bits, self.seed = rule, state_bits, seed
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                  "rule": rule, "state_bits": state_bits})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, rows: Rows | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; with `rows`, only those."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if rows is not None:
                    if parameter is rows.parameter:
                        self._update(parameter, rows.grad, group, index, rows.first, rows.scale)
                elif parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, index)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], index: int, first_row: int = 0,
                scale: Tensor | None = None) -> None:
        state = self.state[parameter]
        if first_row == 0:
            state["step"] = state.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        step = Step(state["step"], float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"],
                    mix_seed(self.seed, index), group.get("first_moment", False))
        stored = local_tensor(parameter)
        weight = stored.contiguous()  # nearly always itself
        bits = self.state_bits if weight.dim() >= 2 else 32
        with one_thread(weight.device):
            RULES[self.rule](weight, local_tensor(grad).contiguous(), state, step, bits,
                             mix_seed(self.seed, index, step.number), first_row * weight.shape[-1],
                             **({} if scale is None else {"scale": scale}))
        if weight.data_ptr() != stored.data_ptr():
            stored.copy_(weight)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `Optimizer.load_state_dict`, which takes tensors over too, but would cast codes to the dtype of the parameter.
        Raises BadInput for the state of another optimizer."""
        for group in state_dict["param_groups"]:
            if (group.get("rule"), group.get("state_bits")) != (self.rule, self.state_bits):
                found = f"{group['rule']} with {group['state_bits']} bits" if "rule" in group else "another optimizer"
                raise BadInput(f"optimizer state of {found}: want {self.rule} with {self.state_bits} bits; set the optimizer "
                               "that the state was saved with")
        super().load_state_dict({**state_dict, "state": {}})
        ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(ids, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = {
                    name: value.to(local_tensor(parameter).device) if isinstance(value, Tensor) else value
                    for name, value in state_dict["state"][number].items()}


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, operations within this context run on one thread: those on a slice are over before a second one has begun."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def local_tensor(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that FSDP2 shards, else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def slices(grad: Tensor, first: int) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, float32 gradient) of pieces of the flattened parameter, of which `grad` is the gradient from number
    `first` on."""
    flat = grad.view(-1)
    size = numbers_at_a_time(grad.device)
    for start in range(0, flat.numel(), size):
        piece = flat[start:start + size]
        yield first + start, first + start + piece.numel(), piece.float()


def _read(weight: Tensor) -> Tensor:
    """float32: the weight itself where it is, else a copy."""
    return weight if weight.dtype == torch.float32 else weight.float()


def _write(weight: Tensor, values: Tensor, seed: int, start: int) -> None:
    """Numbers from `start` of a parameter: where `values` are not the weight itself, round them into it."""
    if weight.dtype == torch.bfloat16:
        stochastic_round_(weight, values, seed, start)
    elif weight.data_ptr() != values.data_ptr():
        weight.copy_(values)


def adamw(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Step, bits: int, seed: int, first: int) -> None:
    """AdamW, arXiv 1711.05101, alg. 2. Coded state holds the root of the second moment, which halves its range."""
    signed, unsigned = STATE_CODES.get(bits, (None, None))
    mean, square = Moment(state, "exp_avg", weight, signed), Moment(state, "exp_avg_sq", weight, unsigned)
    noise_seed, weight_seed = mix_seed(seed, 1), mix_seed(seed, 0)
    flat = weight.view(-1)
    correction1, correction2 = 1 - step.beta1**step.number, 1 - step.beta2**step.number
    for start, stop, g in slices(grad, first):
        v = square.read(start, stop)
        if square.code is not None:
            v.square_()
        v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        noise = None
        if square.code is None:
            root = v.sqrt()
        else:
            root = v.sqrt_()
            noise = noise_bits(start, stop, noise_seed, weight.device)
            square.write(start, stop, root, noise)
        m = mean.read(start, stop).lerp_(g, 1 - step.beta1)
        w = _read(flat[start:stop])
        w.mul_(1 - step.lr * step.weight_decay)
        w.addcdiv_(m, root.div_(correction2**0.5).add_(step.eps), value=-step.lr / correction1)
        del g, v, root  # before the writes take scratch
        # the same noise as the root's: both go up or both down, and their quotient errs less
        mean.write(start, stop, m, noise if bits == 4 else None)
        _write(flat[start:stop], w, weight_seed, start)


def lion(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Step, bits: int, seed: int, first: int) -> None:
    """Lion, arXiv 2302.06675, alg. 2."""
    mean = Moment(state, "exp_avg", weight, STATE_CODES[bits][0] if bits in STATE_CODES else None)
    flat = weight.view(-1)
    for start, stop, g in slices(grad, first):
        m = mean.read(start, stop)
        w = _read(flat[start:stop])
        w.mul_(1 - step.lr * step.weight_decay)
        w.add_(torch.lerp(m, g, 1 - step.beta1).sign_(), alpha=-step.lr)
        mean.write(start, stop, m.lerp_(g, 1 - step.beta2))
        _write(flat[start:stop], w, mix_seed(seed, 0), start)


def adafactor(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Step, bits: int, seed: int, first: int) -> None:
    """Adafactor without first moment, arXiv 1804.04235, alg. 4 and 5, as `torch.optim.Adafactor` has it: the step is
    min(lr, 1/sqrt(updates)) times the size of the parameter, and updates longer than 1 (root mean square) are shortened.

    Three passes by rows (their means; the length of the update; the update) instead of float32 copies of a matrix.
    """
    matrix = weight.dim() >= 2
    w_RC, g_RC = (weight.flatten(0, -2), grad.flatten(0, -2)) if matrix else (weight[None], grad[None])
    rows, columns = w_RC.shape
    keep = step.number**-0.8
    at_once = max(1, numbers_at_a_time(weight.device) // columns)
    parts = [slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]
    if not matrix:
        square = state.setdefault("exp_avg_sq", torch.zeros(columns, dtype=torch.float32, device=weight.device))
        square.lerp_(g_RC[0].float().square(), keep)

        def direction(part: slice) -> Tensor:
            return square.clamp(min=FACTORED_EPS[0]**2).rsqrt_()[None] * g_RC[part].float()
    else:
        row = state.setdefault("row_var", torch.zeros(rows, dtype=torch.float32, device=weight.device))
        column = state.setdefault("col_var", torch.zeros(columns, dtype=torch.float32, device=weight.device))
        column_sum = torch.zeros_like(column)
        for part in parts:
            g_square = g_RC[part].float().square()
            row[part].lerp_(g_square.mean(dim=1), keep)
            column_sum += g_square.sum(dim=0)
        column.lerp_(column_sum.div_(rows), keep)
        mean = row.mean().clamp_(min=FACTORED_EPS[0])

        def direction(part: slice) -> Tensor:
            square = torch.outer(row[part], column).div_(mean)
            return square.clamp_(min=FACTORED_EPS[0]**2).rsqrt_().mul_(g_RC[part].float())

    count = weight.numel()
    size = torch.stack([w_RC[part].float().square().sum() for part in parts]).sum().div(count).sqrt()
    length = torch.stack([direction(part).square_().sum() for part in parts]).sum().div(count).sqrt()
    rate = size.clamp(min=FACTORED_EPS[1]) * min(step.lr, step.number**-0.5) / length.clamp(min=1.0)
    for part in parts:
        w = _read(w_RC[part])
        w.mul_(1 - step.lr * step.weight_decay).sub_(direction(part).mul_(rate))
        _write(w_RC[part].view(-1), w.view(-1), mix_seed(seed, 0), part.start * columns)


RULES: dict[str, Callable[..., None]] = {"adamw": adamw, "lion": lion, "adafactor": adafactor, **BY_ROWS}
