"""Runs that are really killed, over and over. `python tests/kill_runs.py --kills 300` does any number."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from jobs import ROOT, environment


def kill_runs(*words: object) -> dict[str, int]:
    """The counts of the harness, which must have found no problem."""
    command = [sys.executable, str(ROOT / "tests" / "kill_runs.py"), *map(str, words)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_twenty_kills():
    counts = kill_runs("--kills", 20)
    assert counts["kills"] == 20 and counts["starts"] > 20 and counts["problems"] == 0
    assert counts["while_saving"] > 0, "some must hit a checkpoint while it is being written"


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    ["--save_async"], ["--signal", "TERM"], ["--signal", "INT"], ["--signal", "TERM", "--save_async"], ["--workers", 2],
    ["--damage"], ["--damage", "--file_limit", "--save_async"], ["--processes", 2], ["--processes", 2, "--save_async"],
    ["--processes", 2, "--signal", "TERM"], ["--processes", 2, "--damage"],
], ids=lambda words: " ".join(map(str, words)))
def test_many_kills(words):
    assert kill_runs("--kills", 30, "--seed", 1, *words)["problems"] == 0
