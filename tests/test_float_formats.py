"""Float formats against torch.finfo, torch's casts, every code of the small formats, and the script runs it."""

import json
import math
import os
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain.command import BadInput, check_writable, write_json
from memtrain.float_formats import FORMATS, decode, describe, probe_multiplication

MKLDNN: Any = torch.backends.mkldnn  # Any: its sub-modules are not in torch's type hints
ROOT = Path(__file__).parent.parent
BY_NAME = {fmt.name: fmt for fmt in FORMATS}
IN_TORCH = [fmt for fmt in FORMATS if fmt.torch_dtype and hasattr(torch, fmt.torch_dtype)]
CASTABLE = [fmt for fmt in IN_TORCH if fmt.bits >= 8]
SMALL = [fmt for fmt in FORMATS if fmt.bits <= 8]


def named(formats):
    return pytest.mark.parametrize("fmt", formats, ids=lambda fmt: fmt.name)


def same(a, b):
    """Equal as values and in the sign of zero; nan equals nan."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def decode_slowly(name, code):
    """The value of a code of 8 bits or fewer, by hand from its bit string and the written rules of each format."""
    exponent_bits, bias = {"fp8_e4m3": (4, 7), "fp8_e5m2": (5, 15), "fp6_e3m2": (3, 3), "fp6_e2m3": (2, 1),
                           "fp4_e2m1": (2, 1), "fp8_e8m0": (8, 127)}[name]
    if name == "fp8_e8m0":
        return math.nan if code == 0xFF else float(Fraction(2) ** (code - 127))
    text = format(code, f"0{int(name[2])}b")
    sign, exponent, mantissa = text[0], text[1:1 + exponent_bits], text[1 + exponent_bits:]
    if name == "fp8_e4m3" and exponent + mantissa == "1111111":
        return math.nan
    if name == "fp8_e5m2" and exponent == "11111":
        return math.nan if "1" in mantissa else (-math.inf if sign == "1" else math.inf)
    lead, power = (0, 1) if int(exponent, 2) == 0 else (1, int(exponent, 2))
    value = (lead + sum(Fraction(int(bit), 2**k) for k, bit in enumerate(mantissa, 1))) * Fraction(2) ** (power - bias)
    return -float(value) if sign == "1" else float(value)


@named(IN_TORCH)
def test_equals_torch_finfo(fmt):
    dtype = getattr(torch, fmt.torch_dtype)
    try:
        info = torch.finfo(dtype)
        expected = (info.max, info.min, info.smallest_normal, info.eps)
    except NotImplementedError:
        pytest.skip(f"torch {torch.__version__} has no finfo of {dtype}")
    assert info.bits == fmt.bits, fmt.name
    assert (fmt.max, fmt.min, fmt.smallest_normal, fmt.eps) == expected, fmt.name
    assert fmt.bytes_per_value == torch.empty((), dtype=dtype).element_size(), fmt.name


def test_every_format_that_torch_describes_was_compared():
    described = {"fp64", "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp8_e8m0"}
    assert described <= {fmt.name for fmt in CASTABLE}, "a torch dtype is misnamed or missing"


@named(SMALL)
def test_every_code_of_8_bits_and_fewer(fmt):
    codes = range(2**fmt.bits)
    values = [decode_slowly(fmt.name, code) for code in codes]
    wrong = [code for code in codes if not same(decode(fmt, code), values[code])]
    assert not wrong, f"{fmt.name}: codes {wrong[:5]}"
    if fmt in CASTABLE:
        by_torch = torch.arange(256, dtype=torch.uint8).view(getattr(torch, fmt.torch_dtype)).float().tolist()
        wrong = [code for code in codes if not same(by_torch[code], values[code])]
        assert not wrong, f"{fmt.name} against torch: codes {wrong[:5]}"

    finite = sorted({v for v in values if math.isfinite(v)})
    positive = [v for v in finite if v > 0]
    assert (fmt.max, fmt.min) == (finite[-1], finite[0]), fmt.name
    assert fmt.eps == fmt.smallest_step_at_one == positive[positive.index(1.0) + 1] - 1.0, fmt.name
    if fmt.name == "fp8_e8m0":
        assert (fmt.smallest_normal, fmt.smallest_subnormal, 0.0 in finite) == (2.0**-127, None, False)
    else:
        assert fmt.smallest_subnormal == positive[0], fmt.name
        # subnormals are evenly spaced multiples of the smallest; the first normal has 2^mantissa_bits of them below it
        assert fmt.smallest_normal == positive[0] * 2**fmt.mantissa_bits and fmt.smallest_normal in positive, fmt.name


@named([BY_NAME["fp16"], BY_NAME["bf16"]])
def test_every_code_of_16_bits(fmt):
    by_torch = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(getattr(torch, fmt.torch_dtype)).tolist()
    wrong = [code for code in range(2**16) if not same(decode(fmt, code), by_torch[code])]
    assert not wrong, f"{fmt.name}: codes {wrong[:5]}"
    assert fmt.smallest_subnormal == by_torch[1], fmt.name


@pytest.mark.parametrize(("name", "bits", "pattern", "shift"),
                         [("fp64", 64, "<Qd", 0), ("fp32", 32, "<If", 0), ("tf32", 32, "<If", 13)])
def test_wide_formats_against_the_machine(name, bits, pattern, shift):
    # tf32 is fp32 without its 13 last mantissa bits
    fmt = BY_NAME[name]
    count = 2**fmt.bits
    codes = [0, 1, count // 2 - 1, count // 2, count - 1, *range(0, count, count // 4099)]
    for code in codes:
        packed = (code << shift).to_bytes(bits // 8, "little")
        assert same(decode(fmt, code), struct.unpack("<" + pattern[2], packed)[0]), f"{name}: code {code:#x}"
    unpacked = struct.unpack("<" + pattern[2], (1 << shift).to_bytes(bits // 8, "little"))[0]
    assert fmt.smallest_subnormal == unpacked, name


def test_sizes_and_the_values_that_tables_get_wrong():
    assert {fmt.name: fmt.bytes_per_value for fmt in FORMATS} == {
        "fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_e8m0": 1,
        "fp6_e3m2": 0.75, "fp6_e2m3": 0.75, "fp4_e2m1": 0.5}
    assert BY_NAME["tf32"].bits == 19
    e8m0, fp4 = BY_NAME["fp8_e8m0"], BY_NAME["fp4_e2m1"]
    assert (e8m0.sign_bits, e8m0.max, e8m0.min) == (0, 2.0**127, 2.0**-127)
    assert (fp4.eps, fp4.max, fp4.min) == (0.5, 6.0, -6.0)
    # OCP Microscaling Formats (MX) 1.0
    assert (BY_NAME["fp6_e3m2"].max, BY_NAME["fp6_e2m3"].max) == (28.0, 7.5)


@named(CASTABLE)
def test_lost_updates_are_those_that_a_cast_loses(fmt):
    def stored(value):
        return torch.tensor(value, dtype=torch.float64).to(getattr(torch, fmt.torch_dtype)).double().item()

    assert stored(1.0 + fmt.smallest_step_at_one) == 1.0 + fmt.smallest_step_at_one, fmt.name
    if fmt.name == "fp8_e8m0":
        assert fmt.lost_increase_at_one is None and fmt.lost_decrease_at_one is None, "no mantissa, no even mantissa"
        return
    up, down = fmt.lost_increase_at_one, fmt.lost_decrease_at_one
    if fmt.name == "fp64":  # the sum itself is rounded
        assert 1.0 + up == 1.0 < 1.0 + math.nextafter(up, 1)
        assert 1.0 - down == 1.0 > 1.0 - math.nextafter(down, 1)
        return
    assert stored(1.0 + up) == 1.0 == stored(1.0 - down), fmt.name
    # 2^-8 more, so that the sum is exact in float32 for the narrow formats and in float64 for float32
    assert stored(1.0 + up * (1 + 2.0**-8)) == 1.0 + fmt.smallest_step_at_one, fmt.name
    assert stored(1.0 - down * (1 + 2.0**-8)) == 1.0 - 2 * down, fmt.name


@named([fmt for fmt in SMALL if fmt.name in ("fp6_e3m2", "fp6_e2m3", "fp4_e2m1")])
def test_lost_updates_of_formats_without_a_cast(fmt):
    values = sorted({decode_slowly(fmt.name, code) for code in range(2**fmt.bits)})
    one = values.index(1.0)
    assert fmt.lost_increase_at_one == (values[one + 1] - 1.0) / 2, fmt.name
    assert fmt.lost_decrease_at_one == (1.0 - values[one - 1]) / 2, fmt.name


def test_probe_on_the_cpu():
    before = MKLDNN.matmul.fp32_precision
    ways = probe_multiplication("cpu")
    assert MKLDNN.matmul.fp32_precision == before, "the probe left its mark on the process"
    assert list(ways) == [fmt.name for fmt in FORMATS]
    for name in ("fp64", "fp32", "bf16"):
        assert ways[name] == ["matmul"], name
    assert ways["fp6_e3m2"] == ways["fp6_e2m3"] == [], "torch has no fp6"


def test_probe_believes_products_only(monkeypatch):
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **_: torch.zeros(len(a), b.shape[1], dtype=torch.bfloat16))
    assert not any("scaled_mm" in ways for ways in probe_multiplication("cpu").values()), "a wrong product was believed"

    def as_on_cuda(a, b, scale_a, scale_b, out_dtype):
        if (a.dtype, b.dtype) not in ((e4m3, e4m3), (e5m2, e4m3)) or b.stride(0) != 1:
            raise RuntimeError("Multiplication of two Float8_e5m2 matrices is not supported")
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", as_on_cuda)
    ways = probe_multiplication("cpu")
    assert "scaled_mm" in ways["fp8_e4m3"]
    assert "scaled_mm x fp8_e4m3" in ways["fp8_e5m2"] and "scaled_mm" not in ways["fp8_e5m2"]
    assert ways["fp8_e8m0"] == []

    def packed_fp4(a, b, scale_a, scale_b, out_dtype):
        if a.element_size() != 1 or "float4" not in str(a.dtype):
            raise RuntimeError("not float4")

        def unpacked(rows):  # (N, N/2) bytes, the low half first -> (N, N)
            codes = rows.view(torch.uint8).long()
            values = torch.tensor([decode_slowly("fp4_e2m1", code) for code in range(16)])
            return values[torch.stack([codes % 16, codes // 16], dim=-1).flatten(1)]

        assert scale_a.numel() == 128 * 128 // 16
        return (unpacked(a) @ unpacked(b.t()).t()).to(out_dtype)

    if hasattr(torch, "float4_e2m1fn_x2"):
        monkeypatch.setattr(torch, "_scaled_mm", packed_fp4)
        assert probe_multiplication("cpu")["fp4_e2m1"] == ["scaled_mm"], "the operands of fp4 are packed wrongly"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_probe_on_cuda():
    before = torch.backends.cuda.matmul.fp32_precision
    ways = probe_multiplication("cuda")
    assert torch.backends.cuda.matmul.fp32_precision == before
    capability = torch.cuda.get_device_capability()
    assert ways["fp32"] == ways["fp16"] == ["matmul"]
    assert ways["tf32"] == (["matmul of float32"] if capability >= (8, 0) else [])
    assert ("scaled_mm" in ways["fp8_e4m3"]) == (capability >= (8, 9))


def run_script(*arguments, cwd=None):
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "float_formats.py"), *arguments], text=True, cwd=cwd,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120, check=False)


def test_script_prints_the_table_and_writes_strict_json(tmp_path):
    (tmp_path / "formats.json").write_text("old")
    done = run_script("--json", "formats.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert os.listdir(tmp_path) == ["formats.json"], "a temporary file was left"

    def refuse(word):
        raise AssertionError(f"{word} is not strict JSON")

    content = json.loads((tmp_path / "formats.json").read_text(), parse_constant=refuse)
    for row, fmt in zip(content["formats"], FORMATS, strict=True):
        assert isinstance(row.pop("multiplies")["cpu"], list), fmt.name
        assert row == describe(fmt), fmt.name

    table = done.stdout.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table[2:]] == [fmt.name for fmt in FORMATS]
    assert "bits" in table[1] and "bytes" in table[1], "units belong in the header"
    ends = table[1].index("bytes") + len("bytes")
    for line, fmt in zip(table[2:], FORMATS, strict=True):
        assert line[:ends].endswith(f" {fmt.bytes_per_value:g}"), f"column not aligned: {line}"


@pytest.mark.parametrize("arguments", [["--jsn", "x"], ["--json"], ["--json="], ["extra"], ["--json", "missing/x.json"],
                                       ["--json", "."], ["--json", "/dev/full"], ["--json", "x" * 300],
                                       ["--json", "file/x.json"]], ids=lambda a: " ".join(a)[:24])
def test_script_refuses_in_one_line(arguments, tmp_path):
    (tmp_path / "file").write_text("")
    done = run_script(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and ";" in done.stderr, done.stderr
    assert done.stdout == "" and os.listdir(tmp_path) == ["file"]


def test_write_json_whole_or_not_at_all(tmp_path, monkeypatch):
    target, link = tmp_path / "kept.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_json(link, {"a": None})
    assert link.is_symlink() and json.loads(target.read_text()) == {"a": None}
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(target, {"a": math.nan})

    def disk_full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(BadInput, match="No space left"):
        write_json(target, {"b": 1})
    assert json.loads(target.read_text()) == {"a": None} and sorted(os.listdir(tmp_path)) == ["kept.json", "link.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="may not be written"):
        check_writable(tmp_path / "x.json")


def test_help_and_derivation_need_no_torch():
    done = run_script("--help")
    assert done.returncode == 0 and "--json FILE" in done.stdout
    code = ("import sys; sys.modules['torch'] = None; from memtrain.float_formats import *; from memtrain import "
            "float_formats as f; print([f.describe(x)['max'] for x in f.FORMATS][-1])")
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=False,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == "6.0", done.stderr
