"""The float formats: size, range, precision, what this machine multiplies, and which updates a weight can take.

usage: python scripts/float_formats.py [--json FILE]

  --json FILE   write the same as strict JSON (null where a format has no such value)
  --help        this text
"""

from __future__ import annotations

from pathlib import Path

from memtrain.command import check_writable, run_script, script_arguments, write_json
from memtrain.float_formats import report

NOTES = """
eps is the smallest step: from 1.0 to the next value above. With rounding to nearest, an update of at most the size in
a "lost" column leaves a weight of 1.0 as it is. The step up from a weight of 2^k is 2^k times as large (normal values).
min is the lowest finite value (-max); fp8_e8m0 has no sign, zero or subnormals: it holds scales, not weights.
multiplies: tried just now, product checked; it says nothing about speed. tf32 is a way to multiply float32 tensors."""


def main(arguments: list[str]) -> int:
    _, options = script_arguments(arguments, __doc__ or "", [], json=Path)
    if "json" in options:
        check_writable(options["json"])  # before the work, not after it
    table, content = report()
    print(table + "\n" + NOTES)
    if "json" in options:
        write_json(options["json"], content)
    return 0


if __name__ == "__main__":
    run_script(main)
