"""plan_memory.py as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--num_hidden_layers", "2", "--hidden_size", "64", "--vocab_size", "512", "--seq_len", "64",
         "--global_batch_size", "1", "--gradient_checkpointing", "full"]


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "plan_memory.py"), *words], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}, timeout=120)


def test_a_plan(tmp_path):
    done = plan(*SMALL, "--memory_budget", "12MB", "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0 and not done.stderr, done.stderr
    content = json.loads((tmp_path / "plan.json").read_text())
    predicted = content["predicted"]
    assert predicted["peak_bytes"] == sum(predicted["parts"].values()) == max(predicted["phases"].values()) <= 12e6
    assert predicted["apart"]["process"] > predicted["peak_bytes"] + 1e8
    assert content["command"] in done.stdout and content["command"].startswith("accelerate launch scripts/pretrain.py")
    chosen = [row for row in content["plan"] if row["chosen"]]
    assert len(chosen) == 1 and chosen[0]["fits"] and chosen[0]["peak_bytes"] == predicted["peak_bytes"]
    ranks = [(row["changes_result"], row["relative_time"]) for row in content["plan"]]
    assert ranks == sorted(ranks)


def test_nothing_fits():
    done = plan(*SMALL, "--memory_budget", "100KB")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "lacks" in done.stderr and "100.000 KB" in done.stderr, done.stderr
    assert "the smallest there is" in done.stdout


def test_bad_options():
    for words, said in ((["--memory_budget", "12", "--allow", "rund"], "memory_budget=12: want a size"),
                        (["--memory_budget", "12", "--allow", "rund"], "allow=rund"), (["--plot"], "--plot: no value"),
                        (["--maximize", "width"], "--maximize width: want one of")):
        done = plan(*words)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
