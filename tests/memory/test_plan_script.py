"""plan_memory.py as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from jobs import run_main

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
    host = predicted["host"]
    assert host["disk_run"] == 3 * host["disk_checkpoint"] + predicted["parts"]["parameters"]
    assert host["disk_checkpoint"] > 3 * predicted["parts"]["parameters"] and host["ram_offload"] == host["ram_workers"] == 0
    assert "a checkpoint on disk" in done.stdout
    assert content["command"] in done.stdout and content["command"].startswith("accelerate launch scripts/pretrain.py")
    chosen = [row for row in content["plan"] if row["chosen"]]
    assert len(chosen) == 1 and chosen[0]["fits"] and chosen[0]["peak_bytes"] == predicted["peak_bytes"]
    ranks = [(row["changes_result"], row["relative_time"]) for row in content["plan"]]
    assert ranks == sorted(ranks)


def test_nothing_fits():
    outcome = run_main("plan_memory", [*SMALL, "--memory_budget", "100KB"])
    assert outcome.code == 2 and outcome.err.count("\n") == 1, outcome
    assert "lacks" in outcome.err and "100.000 KB" in outcome.err and "the smallest there is" in outcome.out, outcome


def test_without_a_budget(monkeypatch, tmp_path):
    """What is free on this device, and that is said; the picture is drawn."""
    monkeypatch.setattr("memtrain.memory.device.free_host_bytes", lambda: 50_000_000)
    drawn = ["--plot", tmp_path / "plan.png"] if find_spec("matplotlib") else []
    outcome = run_main("plan_memory", [*SMALL, *drawn, "--json", tmp_path / "plan.json"])
    assert outcome.code == 0 and "no --memory_budget: for the 50.000 MB that are free on this cpu now" in outcome.out, outcome
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["budget_bytes"] == 50_000_000 and {"predicted", "plan", "command"} <= content.keys()
    assert not drawn or (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_bad_options():
    for words, said in ((["--memory_budget", "12", "--allow", "rund"], "memory_budget=12: want a size"),
                        (["--memory_budget", "12", "--allow", "rund"], "allow=rund"), (["--plot"], "--plot: no value"),
                        (["--rows", "0"], "--rows 0: want a whole number"),
                        (["--maximize", "width"], "--maximize width: want one of")):
        done = plan(*words)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
