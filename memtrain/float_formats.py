"""Range and precision of the float formats of deep learning, derived from their bits, and what a device can multiply.

Every number comes out of `decode`; nothing is copied from a table. torch is imported only to try a device.
Sources: IEEE 754-2019, sec. 3.4; fp8: arXiv 2209.05433, table 1; fp6, fp4, e8m0: OCP Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

INF_AND_NAN = "inf, nan"  # the whole top exponent, as in IEEE 754
ONLY_NAN = "nan"          # only the code with every exponent and mantissa bit set
NO_SPECIAL = "none"       # every code is a number


@dataclass(frozen=True)
class FloatFormat:
    """Sign, exponent and mantissa bits, and which codes are not numbers. Values are exact Python floats."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    special_codes: str
    torch_dtype: str | None  # name within torch; None: torch has no such dtype
    sign_bits: int = 1
    storage_bits: int | None = None  # where a value takes more room than its bits

    @property
    def bits(self) -> int:
        return self.sign_bits + self.exponent_bits + self.mantissa_bits

    @property
    def bytes_per_value(self) -> float:
        return (self.storage_bits or self.bits) / 8

    @property
    def exponent_bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def has_zero_and_subnormals(self) -> bool:
        return self.sign_bits == 1  # e8m0, the one format without a sign, holds powers of two and nothing else

    @property
    def max(self) -> float:
        """The largest finite value."""
        top_code = 2 ** (self.exponent_bits + self.mantissa_bits) - 1
        unused = {INF_AND_NAN: 2**self.mantissa_bits, ONLY_NAN: 1, NO_SPECIAL: 0}[self.special_codes]
        return decode(self, top_code - unused)

    @property
    def min(self) -> float:
        """The lowest finite value: -max, or the smallest positive value where there is no sign."""
        return -self.max if self.sign_bits else decode(self, 0)

    @property
    def smallest_normal(self) -> float:
        return decode(self, 2**self.mantissa_bits if self.has_zero_and_subnormals else 0)

    @property
    def smallest_subnormal(self) -> float | None:
        return decode(self, 1) if self.has_zero_and_subnormals else None

    @property
    def smallest_step_at_one(self) -> float:
        """The distance from 1.0 to the next value above: the smallest change up that a weight of 1.0 can take."""
        return decode(self, self._code_of_one + 1) - 1.0

    eps = smallest_step_at_one

    @property
    def lost_increase_at_one(self) -> float | None:
        """An update of +this or less leaves a weight of 1.0 as it is (rounding to nearest, ties to an even mantissa).

        None without mantissa bits: such a format has no even mantissa to break the tie, and holds scales, not weights.
        """
        return self.smallest_step_at_one / 2 if self.mantissa_bits else None

    @property
    def lost_decrease_at_one(self) -> float | None:
        """An update of -this or less in size leaves a weight of 1.0 as it is. None as for `lost_increase_at_one`."""
        # values usually lie twice as close below 1.0 as above, but not where 1.0 is the smallest normal (fp4, fp6 e2m3)
        return (1.0 - decode(self, self._code_of_one - 1)) / 2 if self.mantissa_bits else None

    @property
    def _code_of_one(self) -> int:
        return self.exponent_bias * 2**self.mantissa_bits


FORMATS = (
    FloatFormat("fp64", 11, 52, INF_AND_NAN, "float64"),
    FloatFormat("fp32", 8, 23, INF_AND_NAN, "float32"),
    FloatFormat("tf32", 8, 10, INF_AND_NAN, None, storage_bits=32),  # kept as fp32, rounded inside the multiplication
    FloatFormat("fp16", 5, 10, INF_AND_NAN, "float16"),
    FloatFormat("bf16", 8, 7, INF_AND_NAN, "bfloat16"),
    FloatFormat("fp8_e4m3", 4, 3, ONLY_NAN, "float8_e4m3fn"),
    FloatFormat("fp8_e5m2", 5, 2, INF_AND_NAN, "float8_e5m2"),
    FloatFormat("fp8_e8m0", 8, 0, ONLY_NAN, "float8_e8m0fnu", sign_bits=0),
    FloatFormat("fp6_e3m2", 3, 2, NO_SPECIAL, None),
    FloatFormat("fp6_e2m3", 2, 3, NO_SPECIAL, None),
    FloatFormat("fp4_e2m1", 2, 1, NO_SPECIAL, "float4_e2m1fn_x2"),  # torch packs two values into a byte
)


def decode(fmt: FloatFormat, code: int) -> float:
    """The value of a bit pattern, `0 <= code < 2**fmt.bits`; +-inf and nan for codes that are not numbers."""
    mantissa = code % 2**fmt.mantissa_bits
    exponent = code // 2**fmt.mantissa_bits % 2**fmt.exponent_bits
    sign = -1.0 if code >> (fmt.exponent_bits + fmt.mantissa_bits) else 1.0
    top_exponent = exponent == 2**fmt.exponent_bits - 1
    if fmt.special_codes == INF_AND_NAN and top_exponent:
        return math.nan if mantissa else sign * math.inf
    if fmt.special_codes == ONLY_NAN and top_exponent and mantissa == 2**fmt.mantissa_bits - 1:
        return math.nan
    if exponent == 0 and fmt.has_zero_and_subnormals:
        return sign * math.ldexp(mantissa, 1 - fmt.exponent_bias - fmt.mantissa_bits)
    return sign * math.ldexp(2**fmt.mantissa_bits + mantissa, exponent - fmt.exponent_bias - fmt.mantissa_bits)


def probe_devices() -> list[str]:
    """`cpu`, and `cuda` where torch finds one."""
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def probe_multiplication(device: str) -> dict[str, list[str]]:
    """Format name -> the ways in which two small matrices of it were multiplied rightly on `device` just now.

    The ways are `matmul`, `scaled_mm` (`torch._scaled_mm`), `scaled_mm x fp8_e4m3` (only with the other operand in
    fp8_e4m3) and `matmul of float32` (the tf32 mode); an empty list: none. A wrong product counts as none.
    It says nothing about speed.
    """
    return {fmt.name: _ways_to_multiply(fmt, device) for fmt in FORMATS}


def _ways_to_multiply(fmt: FloatFormat, device: str) -> list[str]:
    import torch

    if fmt.name == "tf32":
        return ["matmul of float32"] if _multiplies_in_tf32(device) else []
    dtype = getattr(torch, fmt.torch_dtype or "", None)
    if dtype is None:
        return []
    # N = 128 rows and columns: fills one block of the scales of fp4. b = twice a shifted identity, so that the product
    # is exact and within range in every format
    size = 128
    index = torch.arange(size)
    values = torch.tensor([1.0, -2.0, 0.5, -1.0, 2.0] if fmt.sign_bits else [1.0, 2.0, 0.5, 4.0], dtype=torch.float64)
    a_NN = values[(3 * index[:, None] + 5 * index + index[:, None] * index // 7) % len(values)]
    b_NN = 2 * torch.eye(size, dtype=torch.float64).roll(1, 0)
    product_NN = a_NN @ b_NN

    def on_device(matrix_NN: Any, wanted: torch.dtype) -> Any:
        if wanted == getattr(torch, "float4_e2m1fn_x2", None):
            code_of = {decode(fmt, code): code for code in reversed(range(2**fmt.bits))}  # reversed: 0.0 is code 0
            codes = torch.tensor([[code_of[v] for v in row] for row in matrix_NN.tolist()], dtype=torch.uint8)
            return (codes[:, 0::2] + codes[:, 1::2] * 16).view(wanted).to(device)
        return matrix_NN.to(wanted).to(device)

    def product_is_right(multiply: Callable[[Any, Any], Any], b_dtype: torch.dtype) -> bool:
        try:
            # fp8 kernels want the columns of the second operand contiguous
            result = multiply(on_device(a_NN, dtype), on_device(b_NN.t().contiguous(), b_dtype).t())
            return bool((result.cpu().float() == product_NN.to(result.dtype).float()).all())
        except (RuntimeError, ValueError, TypeError, AttributeError):  # each is a way in which torch says "cannot"
            return False

    def scaled_mm(a: Any, b: Any) -> Any:
        if fmt.bits == 4:  # a scale for each 16 values
            scale = torch.ones(size * size // 16).to(torch.float8_e4m3fn).to(device)
        else:
            scale = torch.ones((), device=device)
        return torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    ways = ["matmul"] if product_is_right(torch.matmul, dtype) else []
    if fmt.bits <= 8:
        if product_is_right(scaled_mm, dtype):
            ways.append("scaled_mm")
        elif fmt.name == "fp8_e5m2" and product_is_right(scaled_mm, torch.float8_e4m3fn):
            ways.append("scaled_mm x fp8_e4m3")
    return ways


def _multiplies_in_tf32(device: str) -> bool:
    import torch

    # 1 + 2^-10 fits the 10 mantissa bits of tf32 (and not bf16), 1 + 2^-12 does not: kept and lost, or it is not tf32
    try:
        backend = getattr(torch.backends, "cuda" if device == "cuda" else "mkldnn").matmul
        before = backend.fp32_precision
    except (RuntimeError, AttributeError):
        return False
    try:
        backend.fp32_precision = "tf32"
        ones = torch.ones(128, 128, device=device)
        kept, lost = (float((torch.eye(128, device=device) * (1 + 2.0**-k) @ ones)[0, 0]) for k in (10, 12))
        return kept == 1 + 2.0**-10 and lost == 1.0
    except (RuntimeError, ValueError):
        return False
    finally:
        backend.fp32_precision = before


def describe(fmt: FloatFormat) -> dict[str, Any]:
    """Everything derived, by name, ready for strict JSON: None where a format has no such thing."""
    names = ("name", "torch_dtype", "bits", "sign_bits", "exponent_bits", "mantissa_bits", "special_codes",
             "bytes_per_value", "max", "min", "smallest_normal", "smallest_subnormal", "eps", "smallest_step_at_one",
             "lost_increase_at_one", "lost_decrease_at_one")
    return {name: getattr(fmt, name) for name in names}


def format_table(multiplies: dict[str, dict[str, list[str]]]) -> str:
    """The aligned table, a line a format; `multiplies[device]` as `probe_multiplication` returns it."""
    head = [["format", ""], ["size", "bits"], ["sign+exp", "+mantissa"], ["stored", "bytes"], ["special", "codes"],
            ["max", "value"], ["min", "value"], ["smallest", "normal"], ["smallest", "subnormal"],
            ["eps: smallest", "step at 1.0"], ["increase lost", "at 1.0, <="], ["decrease lost", "at 1.0, <="],
            *(["multiplies", f"on {device}"] for device in multiplies)]
    rows = [[fmt.name, str(fmt.bits), f"{fmt.sign_bits}+{fmt.exponent_bits}+{fmt.mantissa_bits}",
             f"{fmt.bytes_per_value:g}", fmt.special_codes,
             *("-" if value is None else f"{value:.7g}" for value in (
                 fmt.max, fmt.min, fmt.smallest_normal, fmt.smallest_subnormal, fmt.eps,
                 fmt.lost_increase_at_one, fmt.lost_decrease_at_one)),
             *(", ".join(ways[fmt.name]) or "no" for ways in multiplies.values())] for fmt in FORMATS]
    lines = [*map(list, zip(*head, strict=True)), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    words = {0, 4, *range(12, len(head))}  # columns of words start at the left, numbers end at the right
    return "\n".join("  ".join(cell.ljust(width) if i in words else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
                     for line in lines)


def report(devices: Sequence[str] | None = None) -> tuple[str, dict[str, Any]]:
    """(table, the same for JSON), with what each of `devices` multiplies; default: every device present."""
    import torch

    multiplies = {device: probe_multiplication(device) for device in (devices or probe_devices())}
    formats = [describe(fmt) | {"multiplies": {device: ways[fmt.name] for device, ways in multiplies.items()}}
               for fmt in FORMATS]
    names = {device: torch.cuda.get_device_name() if device == "cuda" else device for device in multiplies}
    return format_table(multiplies), {"torch": torch.__version__, "devices": names, "formats": formats}
