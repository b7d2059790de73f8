"""Optimizers whose state takes one byte or half a byte for a number, and bfloat16 weights that learn.

Every update runs in float32 over slices of a parameter, so its scratch is a few slices and never a parameter's worth. All
random numbers are a hash of (seed, update, parameter, position): nothing to save, and a resumed run draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memtrain.command import BadInput

SLICE = 2**18  # numbers updated at a time: float32 slices of 1 MiB stay in the cache of a CPU core
NOISE_BITS = 24
ONE_BITS = 0x3F800000  # 1.0 as float32
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Code:
    """A number format for optimizer state: 4 or 8 bits, signed or not, times a float32 scale for each block.

    A magnitude x is stored as the float 1 + x with these exponent and mantissa bits: steps grow with x, and near zero they are
    even (as subnormals would be, without their cost). A block's largest magnitude gets the largest code. Blocks follow the
    memory order of a parameter. Unsigned codes hold what Adam divides by, so they are never 0 (arXiv 2309.01507, sec. 4.1)
    but in a block of zeros.
    """

    exponent_bits: int
    mantissa_bits: int
    signed: bool
    block: int

    @property
    def bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits + self.signed

    @property
    def largest_code(self) -> int:
        return 2 ** (self.exponent_bits + self.mantissa_bits) - 1

    @property
    def largest(self) -> float:
        """Magnitude of the largest code before scaling."""
        return 2.0 ** (2**self.exponent_bits - 1) * (2 - 2.0**-self.mantissa_bits) - 1

    @property
    def _shift(self) -> int:
        return 23 - self.mantissa_bits  # moves a code's mantissa to that of a float32

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """float32 [n] from uint8 codes ([n], or [n / 2] with two 4-bit codes each) and float32 scales [n / block]."""
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).view(-1)
        wide = codes.to(torch.int32)
        magnitude = ((wide & self.largest_code) << self._shift).add_(ONE_BITS).view(torch.float32).sub_(1.0)
        if self.signed:
            magnitude.view(torch.int32).bitwise_or_((wide >> (self.bits - 1)) << 31)
        _blocks(magnitude, self.block).mul_(scales[:, None])
        return magnitude

    def encode(self, values: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None = None) -> None:
        """Write float32 values [n] as codes and scales. noise: int32 [n] of NOISE_BITS random bits, which round up or down with
        the odds that make the mean right; None rounds to nearest."""
        blocks = _blocks(values, self.block)
        scales.copy_(blocks.abs().amax(dim=1)).div_(self.largest)
        shifted = (blocks / scales.clamp_min(TINY)[:, None]).view(-1)
        wide = shifted.abs().add_(1.0).view(torch.int32)
        wide += (1 << (self._shift - 1)) - ONE_BITS if noise is None else (noise >> (NOISE_BITS - self._shift)) - ONE_BITS
        wide = (wide >> self._shift).clamp_(0 if self.signed else 1, self.largest_code)
        if self.signed:
            wide |= (shifted < 0).to(torch.int32) << (self.bits - 1)
        narrow = wide.to(torch.uint8)
        codes.copy_(narrow[0::2] | (narrow[1::2] << 4) if self.bits == 4 else narrow)


def _blocks(values: Tensor, block: int) -> Tensor:
    return values.view(-1, block)


# First moments change by a tenth per update, so at 8 bits rounding to nearest follows them; at 4 bits it would not. The root of
# second moments changes by less than a code's step: it would stand still without noise. Its smallest code is not far below that
# of the first moment (0.02 and 0.05 of a block's largest at 4 bits): a first moment that noise lifts makes no long step.
STATE_CODES: dict[int, tuple[Code, Code] | tuple[None, None]] = {
    8: (Code(4, 3, True, 256), Code(4, 4, False, 256)),
    4: (Code(2, 1, True, 128), Code(2, 2, False, 128))}


def noise_bits(start: int, stop: int, seed: int, device: torch.device) -> Tensor:
    """int32 [stop - start] of NOISE_BITS uniform bits: a multiply-xorshift hash of position and seed (62 bits)."""
    bits = torch.arange(start, stop, dtype=torch.int32, device=device)
    # one key before and one within the hash: two seeds share no stretch of noise
    for multiplier, shift, key in ((0x7FEB352D, 15, seed >> 31), (-0x7B935975, 16, seed & 0x7FFFFFFF), (0x2C1B3C6D, 15, 0)):
        bits ^= key
        bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)  # a logical shift
        bits *= multiplier
    return (bits >> (32 - NOISE_BITS)).bitwise_and_((1 << NOISE_BITS) - 1)


def mix_seed(*parts: int) -> int:
    """A 62-bit seed that differs in every part (splitmix64's finaliser)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state & (2**62 - 1)


def stochastic_round_(target: Tensor, values: Tensor, seed: int, start: int = 0) -> None:
    """Write float32 values [n] into bfloat16 target [n], up or down with the odds that make the mean exact
    (arXiv 2010.06192, sec. 3): noise below the last kept bit, then cut. `start`: place of the first in its parameter."""
    noise = noise_bits(start, start + values.numel(), seed, values.device) >> (NOISE_BITS - 16)
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-65536).view(torch.float32)
    # noise could carry a NaN into infinity, or over its sign into 0
    target.copy_(torch.where(values.isnan(), values, rounded))


@dataclass
class Step:
    """What one update of one parameter needs to know."""

    number: int  # updates of this parameter, this one included
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class LowMemoryOptimizer(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) or Lion (arXiv 2302.06675) with float32, 8-bit or 4-bit state, or Adafactor (arXiv 1804.04235).

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
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is not None:
                    self._update(parameter, group, index)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        step = Step(state["step"], float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
        assert parameter.grad is not None
        stored, grad = local_tensor(parameter), local_tensor(parameter.grad)
        weight = stored.contiguous()  # nearly always itself
        bits = self.state_bits if weight.dim() >= 2 else 32
        RULES[self.rule](weight, grad.contiguous(), state, step, bits, mix_seed(self.seed, index, step.number))
        if weight.data_ptr() != stored.data_ptr():
            stored.copy_(weight)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `Optimizer.load_state_dict`, which would cast codes and float32 state to the dtype of the parameter.
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
                    name: value.to(local_tensor(parameter).device, copy=True) if isinstance(value, Tensor) else value
                    for name, value in state_dict["state"][number].items()}


def local_tensor(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that FSDP2 shards, else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Moment:
    """A running mean of a parameter, read and written by slices; float32, or coded with a scale for each block."""

    def __init__(self, state: dict[str, Any], name: str, like: Tensor, code: Code | None) -> None:
        self.code = code
        if name not in state:
            count = like.numel()
            if code is None:
                state[name] = torch.zeros(count, dtype=torch.float32, device=like.device)
            else:
                blocks = -(-count // code.block)
                state[name] = torch.zeros(blocks * code.block * code.bits // 8, dtype=torch.uint8, device=like.device)
                state[name + "_scale"] = torch.zeros(blocks, dtype=torch.float32, device=like.device)
        self.values: Tensor = state[name]
        self.scales: Tensor = state[name if code is None else name + "_scale"]

    def read(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start]; without a code, the state itself and not a copy."""
        if self.code is None:
            return self.values[start:stop]
        codes, scales = self._coded(self.code, start, stop)
        return self.code.decode(codes, scales)[:stop - start]

    def write(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        if self.code is None:
            return  # `values` are the state
        codes, scales = self._coded(self.code, start, stop)
        if missing := len(scales) * self.code.block - (stop - start):
            values = torch.nn.functional.pad(values, (0, missing))
            noise = None if noise is None else torch.nn.functional.pad(noise, (0, missing))
        self.code.encode(values, codes, scales, noise)

    def _coded(self, code: Code, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of the blocks that hold the numbers from start (the first of its block) to stop."""
        first, last = start // code.block, -(-stop // code.block)
        width = code.block * code.bits // 8
        return self.values[first * width:last * width], self.scales[first:last]


def slices(weight: Tensor) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of the flattened parameter that hold at most SLICE numbers."""
    for start in range(0, weight.numel(), SLICE):
        yield start, min(start + SLICE, weight.numel())


def _read(weight: Tensor) -> Tensor:
    """float32: the weight itself where it is, else a copy."""
    return weight if weight.dtype == torch.float32 else weight.float()


def _write(weight: Tensor, values: Tensor, seed: int, start: int) -> None:
    """Numbers from `start` of a parameter: where `values` are not the weight itself, round them into it."""
    if weight.dtype == torch.bfloat16:
        stochastic_round_(weight, values, seed, start)
    elif weight.data_ptr() != values.data_ptr():
        weight.copy_(values)


def adamw(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Step, bits: int, seed: int) -> None:
    """AdamW, arXiv 1711.05101, alg. 2. Coded state holds the root of the second moment, which halves its range."""
    signed, unsigned = STATE_CODES.get(bits, (None, None))
    mean, square = Moment(state, "exp_avg", weight, signed), Moment(state, "exp_avg_sq", weight, unsigned)
    noise_seed, weight_seed = mix_seed(seed, 1), mix_seed(seed, 0)
    flat, flat_grad = weight.view(-1), grad.view(-1)
    correction1, correction2 = 1 - step.beta1**step.number, 1 - step.beta2**step.number
    for start, stop in slices(weight):
        g = flat_grad[start:stop].float()
        noise = None
        m = mean.read(start, stop).lerp_(g, 1 - step.beta1)
        v = square.read(start, stop)
        if square.code is not None:
            v.square_()
        v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        root = v.sqrt()
        if square.code is not None:
            noise = noise_bits(start, stop, noise_seed, weight.device)
            square.write(start, stop, root, noise)
        w = _read(flat[start:stop])
        w.mul_(1 - step.lr * step.weight_decay)
        w.addcdiv_(m, root.div_(correction2**0.5).add_(step.eps), value=-step.lr / correction1)
        # the same noise as the root's: both go up or both down, and their quotient errs less
        mean.write(start, stop, m, noise if bits == 4 else None)
        _write(flat[start:stop], w, weight_seed, start)


def lion(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Step, bits: int, seed: int) -> None:
    """Lion, arXiv 2302.06675, alg. 2."""
    mean = Moment(state, "exp_avg", weight, STATE_CODES[bits][0] if bits in STATE_CODES else None)
    flat, flat_grad = weight.view(-1), grad.view(-1)
    for start, stop in slices(weight):
        g = flat_grad[start:stop].float()
        m = mean.read(start, stop)
        w = _read(flat[start:stop])
        w.mul_(1 - step.lr * step.weight_decay)
        w.add_(torch.lerp(m, g, 1 - step.beta1).sign_(), alpha=-step.lr)
        mean.write(start, stop, m.lerp_(g, 1 - step.beta2))
        _write(flat[start:stop], w, mix_seed(seed, 0), start)


# smallest root of a second moment, smallest size of a parameter; those of torch's Adafactor
FACTORED_EPS = (2.0**-23, 1e-3)


def adafactor(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Step, bits: int, seed: int) -> None:
    """Adafactor without first moment, arXiv 1804.04235, alg. 4 and 5, as `torch.optim.Adafactor` has it: the step is
    min(lr, 1/sqrt(updates)) times the size of the parameter, and updates longer than 1 (root mean square) are shortened.

    Three passes by rows (their means; the length of the update; the update) instead of float32 copies of a matrix.
    """
    matrix = weight.dim() >= 2
    w_RC, g_RC = (weight.flatten(0, -2), grad.flatten(0, -2)) if matrix else (weight[None], grad[None])
    rows, columns = w_RC.shape
    keep = step.number**-0.8
    parts = [slice(start, min(start + max(1, SLICE // columns), rows))
             for start in range(0, rows, max(1, SLICE // columns))]
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


RULES = {"adamw": adamw, "lion": lion, "adafactor": adafactor}
