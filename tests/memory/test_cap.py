"""A budget as a hard limit, in real processes: what fits runs through, what is well above meets the allocator's refusal."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys

import pytest
from jobs import ROOT, Job, environment, run_main

MIB = 2**20
CHILD = """
import sys
import torch
from memtrain.config import make_config
from memtrain.memory.cap import enforced_budget
config = make_config({"max_steps": 1, "memory_budget": "200MiB", "enforce_budget": True})
with enforced_budget(config):
    held = [torch.ones(2**18) for _ in range(200)]  # all of the budget, MiB by MiB
    try:
        more = [torch.ones(2**18) for _ in range(100)]
        print("no limit")
    except RuntimeError as error:
        print(error)
more = [torch.ones(2**18) for _ in range(300)]
print("lifted")
"""


def test_the_budget_can_be_had_and_no_more():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "DefaultCPUAllocator: can't allocate memory" in done.stdout and done.stdout.endswith("lifted\n"), done.stdout


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    return Job(folder, folder / "cache")


def run_real(job, output, *words, **options):
    """pretrain.py of a model of some size, as a process."""
    arguments = job.arguments(output, model="tiny", max_steps=3, seq_len=128, save_every=2, **options)
    done = subprocess.run([sys.executable, *words, str(ROOT / "scripts" / "pretrain.py"), *arguments], capture_output=True,
                          text=True, env=environment(), timeout=280, cwd=ROOT)
    found = json.loads((output / "memory.json").read_text()) if done.returncode == 0 else {}
    return done, found


def test_without_a_budget_it_is_refused(job, tmp_path):
    outcome = run_main("pretrain", job.arguments(tmp_path / "run", enforce_budget=True))
    assert outcome.code == 2 and len(outcome.problems) == 1 and "set memory_budget" in outcome.err
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


WITHOUT_A_PLAN = """
import runpy, sys
from memtrain.memory import planner
planner.fit_run = lambda config, num_processes, say: config
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16", "gradient_checkpointing": "full"},
                                     {"param_dtype": "bfloat16", "optimizer": "adamw_8bit"}, {"num_workers": 2}], ids=str)
def test_a_run_that_just_fits_is_not_stopped(job, tmp_path, options):
    """The budget is what the prediction says, to the byte; a plan would choose the same."""
    from memtrain.config import load_config
    from memtrain.memory.child import answer, ask
    from memtrain.model.presets import model_config

    config = load_config(job.arguments(None, model="tiny", max_steps=3, seq_len=128, **options))
    predicted = answer(ask("predict", config, model_config(config), 1))["peak_bytes"]
    done, found = run_real(job, tmp_path / "run", "-c", WITHOUT_A_PLAN, memory_budget=f"{predicted}B", enforce_budget=True,
                           **options)
    assert done.returncode == 0 and "out of memory" not in done.stdout, (done.stdout, done.stderr[-2000:])
    assert found["budget_bytes"] == predicted and found["measured"]["peak_bytes"] <= 1.001 * predicted


@pytest.mark.slow
def test_a_run_well_above_its_budget_is_made_smaller(job, tmp_path):
    """Without the plan, which would have chosen a recipe that fits."""
    _, first = run_real(job, tmp_path / "whole")
    budget = first["measured"]["peak_bytes"] // 2
    done, found = run_real(job, tmp_path / "run", "-c", WITHOUT_A_PLAN, memory_budget=f"{budget}B", enforce_budget=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"the same 8 samples again with micro_batch_size=[24]", done.stdout), done.stdout
    assert found["measured"]["peak_bytes"] < first["measured"]["peak_bytes"] and found["recipe"]["micro_batch_size"] < 8
