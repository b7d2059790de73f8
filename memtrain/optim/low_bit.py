"""Numbers of few bits: codes for optimizer state, and rounding by chance that leaves the mean as it is.

All random numbers are a hash of (seed, update, parameter, position): nothing to save, and a resumed run draws the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


def _hash(start: int, stop: int, seed: int, device: torch.device) -> Tensor:
    """int32 [stop - start]: a multiply-xorshift hash of position and seed (62 bits), whose high bits are the best."""
    bits = torch.arange(start, stop, dtype=torch.int32, device=device)
    # one key before and one within the hash: two seeds share no stretch of noise
    for multiplier, shift, key in ((0x7FEB352D, 15, seed >> 31), (-0x7B935975, 16, seed & 0x7FFFFFFF), (0x2C1B3C6D, 15, 0)):
        bits ^= key
        bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)  # a logical shift
        bits *= multiplier
    return bits


def noise_bits(start: int, stop: int, seed: int, device: torch.device) -> Tensor:
    """int32 [stop - start] of NOISE_BITS uniform bits."""
    bits = _hash(start, stop, seed, device)
    return (bits >> (32 - NOISE_BITS)).bitwise_and_((1 << NOISE_BITS) - 1)


def noise_halves(start: int, stop: int, seed: int, device: torch.device) -> Tensor:
    """int16 [stop - start] of 16 uniform bits, two from each hash."""
    bits = _hash(start // 2, (stop + 1) // 2, seed, device)
    bits ^= (bits >> 16) & 0xFFFF
    return bits.view(torch.int16)[start % 2:start % 2 + stop - start]


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
