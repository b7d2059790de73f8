"""Runs with int8 weights through the scripts: trained, resumed, exported, evaluated, generated from; and what is refused."""

from __future__ import annotations

import signal

import pytest
from jobs import (
    assert_same_run,
    checkpoint,
    end_all,
    rows,
    run_main,
    start_all,
    stopped_after,
    wait_for,
)

INT8 = {"param_dtype": "int8", "optimizer_in_backward": "true", "head_in_blocks": "true", "max_grad_norm": "none",
        "gradient_checkpointing": "full", "tie_word_embeddings": "false"}
RATES = {"adafactor": 0.02, "adamw_factored": 2e-3}


def options(optimizer, **changes):
    return {**INT8, "optimizer": optimizer, "learning_rate": RATES[optimizer], "save_every": 1, "keep_last": 99, **changes}


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """optimizer -> a run that nothing stopped."""
    made = {}

    def make(optimizer):
        if optimizer not in made:
            made[optimizer] = job.trained(tmp_path_factory.mktemp("int8") / "run", **options(optimizer))
        return made[optimizer]

    return make


@pytest.mark.parametrize("optimizer", RATES)
def test_going_on_equals_the_unbroken_run(job, whole, tmp_path, optimizer):
    run = stopped_after(whole(optimizer), tmp_path / "run", 7)
    outcome = job.run(run, **options(optimizer))
    assert outcome.code == 0 and "update 7 of 20" in outcome.out, outcome
    assert_same_run(whole(optimizer), run, 20)
    losses = [row["loss"] for row in rows(run) if "loss" in row]
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.1, losses


@pytest.mark.slow
def test_killed_and_going_on(job, whole, tmp_path):
    """A real SIGKILL in the middle of it."""
    run = tmp_path / "run"
    for updates in (4, 11):
        processes = start_all("pretrain", job.arguments(run, **options("adafactor")), tmp_path / "log", 1)
        wait_for(lambda updates=updates: checkpoint(run, updates).exists(), processes)
        processes[0].send_signal(signal.SIGKILL)
        end_all(processes)
    assert job.run(run, **options("adafactor")).code == 0
    assert_same_run(whole("adafactor"), run, 20)


def test_the_checkpoint_and_its_export_are_one_model(whole, tmp_path):
    """Evaluated from int8, and from the bfloat16 export; text is written from both."""
    import json

    run = whole("adafactor")
    losses = []
    for path in (run, run / "export"):
        done = run_main("evaluate", [path, "--json", tmp_path / "metrics.json"])
        assert done.code == 0, done
        losses.append(json.loads((tmp_path / "metrics.json").read_text())["eval_loss"])
        assert run_main("generate", [path, "--prompt", "alpha", "--max_new_tokens", 5]).code == 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] == pytest.approx(next(row["eval_loss"] for row in rows(run) if "eval_loss" in row), rel=1e-3)
    assert run_main("export_safetensors", [run, tmp_path / "out", "--dtype", "bfloat16"]).code == 0
    from safetensors.torch import load_file

    one, other = (load_file(folder / "model.safetensors") for folder in (run / "export", tmp_path / "out"))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def test_an_export_is_gone_on_from(job, whole, tmp_path):
    """A folder of transformers as first weights: quantised, and no worse by much."""
    run = job.trained(tmp_path / "run", **options("adafactor", model=whole("adafactor") / "export", max_steps=2))
    first = next(row["loss"] for row in rows(run) if "loss" in row)
    assert first < max(row["loss"] for row in rows(whole("adafactor")) if "loss" in row) - 0.1

