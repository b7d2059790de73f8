"""Going on with other options, from a named checkpoint, after a signal; and what is not trusted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from jobs import checkpoint, differences, rows, run_main, stopped_after
from test_checkpoint_files import edit

from memtrain.training import signals
from memtrain.training import step as steps
from memtrain.training.agreement import Agreement

OPTIONS = {"max_steps": 12, "save_every": 1, "keep_last": 99, "attention_dropout": 0.1}


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    return job.trained(tmp_path_factory.mktemp("whole") / "run", **OPTIONS)


def rates(run):
    return [row["learning_rate"] for row in rows(run) if "loss" in row]


@pytest.mark.parametrize(("changes", "said"), [
    ({"learning_rate": 0.002}, "learning_rate was 0.01 and is now 0.002"),
    ({"max_steps": 18}, "max_steps was 12 and is now 18"),
])
def test_a_changed_rate_or_length_is_said_and_holds_from_the_next_update_on(job, whole, tmp_path, monkeypatch, changes, said):
    used, original = [], steps.optimizer_step

    def optimizer_step(state):
        used.append({group["lr"] for group in state.optimizer.param_groups} == {state.learning_rate})
        return original(state)

    monkeypatch.setattr(steps, "optimizer_step", optimizer_step)
    run = stopped_after(whole, tmp_path / "run", 6)
    outcome = job.run(run, **{**OPTIONS, **changes})
    assert outcome.code == 0 and outcome.out.count(said) == 1, outcome
    assert len(used) >= 6 and all(used), "what is said in metrics is what the optimizer takes"
    other = job.trained(tmp_path / "other", **{**OPTIONS, **changes})
    assert rates(run) == rates(whole)[:6] + rates(other)[6:], "exactly those of a run that had them from the start"
    assert rates(other)[6:12] != rates(whole)[6:]


def test_nothing_is_said_where_nothing_changed(job, whole, tmp_path):
    outcome = job.run(stopped_after(whole, tmp_path / "run", 6), **OPTIONS)
    assert outcome.code == 0 and " was " not in outcome.out and "going on with" not in outcome.out


def test_another_micro_batch_takes_the_same_samples(job, whole, tmp_path, monkeypatch):
    from memtrain.data import order

    seen, original = [], order.row_index
    monkeypatch.setattr(order, "row_index", lambda *a: seen.append((a[0], original(*a))) or original(*a))
    first = None
    for size in (8, 2, 1):
        seen.clear()
        job.trained(stopped_after(whole, tmp_path / str(size), 6), **OPTIONS, micro_batch_size=size, num_workers=0)
        assert [position for position, _ in seen] == list(range(48, 96))
        first = first or seen[:]
        assert seen == first


def test_other_versions_and_processes_are_said(whole, job, tmp_path):
    run = stopped_after(whole, tmp_path / "run", 6)

    def change(state):
        state["versions"]["torch"] = "2.0.0"
        state["world_size"] = 3

    edit(checkpoint(run, 6), change)
    outcome = job.run(run, **OPTIONS)
    assert "torch was 2.0.0 and is now" in outcome.out
    assert "saved by 3 process(es), going on with 1: updates keep their samples; the random numbers" in outcome.out


def test_a_checkpoint_of_another_run_is_passed_over_and_left_alone(job, whole, tmp_path):
    run = stopped_after(whole, tmp_path / "run", 6)
    foreign = job.trained(tmp_path / "foreign", **OPTIONS, seed=5)
    shutil.copytree(checkpoint(foreign, 12), checkpoint(run, 12))
    before = (checkpoint(foreign, 12) / "model.safetensors").read_bytes()
    outcome = job.run(run, **OPTIONS)
    assert outcome.code == 0 and "ignored, written by another run (seed=0" in outcome.out and "seed=5" in outcome.out
    assert "update 6 of 12" in outcome.out and rows(run) == rows(whole)
    assert (run / "checkpoints" / "aside-step-00000012" / "model.safetensors").read_bytes() == before


# ---- --resume PATH ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("damage", "words"), [
    (lambda path: (path / "optimizer.bin").write_bytes(b""), "optimizer.bin has 0 bytes"),
    (lambda path: (path / "random_states_0.pkl").unlink(), "random_states_0.pkl is missing"),
    (lambda path: (path / "scheduler.bin").write_bytes(bytes((path / "scheduler.bin").stat().st_size)), "scheduler.bin is not"),
    (lambda path: shutil.rmtree(path), "no readable run_state.json"),
])
def test_resume_of_a_bad_one_is_refused(job, whole, tmp_path, damage, words):
    path = shutil.copytree(checkpoint(whole, 6), tmp_path / "step-00000006")
    damage(path)
    outcome = job.run(tmp_path / "run", **OPTIONS, resume=path)
    assert outcome.code == 2 and len(outcome.problems) == 1 and words in outcome.err, outcome
    assert "resume=auto" in outcome.err and not (tmp_path / "run").exists()


def test_back_to_an_older_one_of_its_own(job, whole, tmp_path):
    run = stopped_after(whole, tmp_path / "run", 9)
    outcome = job.run(run, **{**OPTIONS, "max_steps": 8}, resume=checkpoint(run, 6))
    assert outcome.code == 0 and "update 6 of 8" in outcome.out
    aside = sorted(path.name for path in (run / "checkpoints").glob("aside-*"))
    assert aside == [f"aside-step-0000000{n}" for n in (7, 8, 9)] and outcome.out.count("set aside") == 3
    assert [row["step"] for row in rows(run) if "loss" in row] == list(range(1, 9))


def test_a_run_that_started_from_anothers_goes_on_from_its_own(job, whole, tmp_path):
    run, start = tmp_path / "run", checkpoint(whole, 3)
    assert job.run(run, **{**OPTIONS, "max_steps": 5}, resume=start).code == 0
    shutil.rmtree(run / "export")
    outcome = job.run(run, **OPTIONS, resume=start)
    assert outcome.code == 0 and f"going on from {checkpoint(run, 5)}: update 5 of 12" in outcome.out


# ---- signals ---------------------------------------------------------------------------------------------------------

def test_a_second_interrupt_leaves_at_once(monkeypatch):
    left = []
    monkeypatch.setattr(signals.os, "_exit", left.append)
    with signals.StopSignal(Agreement(SimpleNamespace(num_processes=1))) as stop:
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # torchrun hands on what the terminal sent as well
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested() and stop.exit_code == 130 and not left
        time.sleep(signals.SECOND_INTERRUPT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not left, "a batch system may say it often"
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [130]


@pytest.mark.parametrize(("parent", "start"), [
    (["/v/bin/python", "/v/bin/accelerate", "launch", "--config_file", "x y.yaml"],
     "accelerate launch --config_file 'x y.yaml' "),
    (["/v/bin/python3.11", "/v/bin/torchrun", "--nproc_per_node", "2"],
     "ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 "),
    (["/v/bin/python", "-m", "torch.distributed.run"], "ACCELERATE_USE_CPU=true python -m torch.distributed.run "),
    (["bash"], f"ACCELERATE_USE_CPU=true {os.path.basename(sys.executable)} "),
])
def test_the_command_to_go_on_is_the_one_that_started(monkeypatch, parent, start):
    words = ["tiny", "--dataset", "a b.txt"]
    script = "scripts/pretrain.py"
    own = [*parent, script, *words] if parent != ["bash"] else parent
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(parents=lambda: [SimpleNamespace(cmdline=lambda: list(own))]))
    assert signals.command_to_go_on(words, "auto") == f"{start}{script} tiny --dataset 'a b.txt'"


@pytest.mark.parametrize("words", [["--resume", "x", "--seed", "1"], ["--resume=x", "--seed", "1"], ["--seed", "1"]])
def test_the_command_to_go_on_goes_on(words):
    """`--resume PATH`, or a path in the recipe, would start there again."""
    assert signals.command_to_go_on(words, "x").endswith(" --seed 1 --resume auto")


# ---- trust -----------------------------------------------------------------------------------------------------------

class Harmful:
    """What runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "random_states_0.pkl"])
def test_no_part_of_a_checkpoint_runs_code(job, whole, tmp_path, name):
    run = stopped_after(whole, tmp_path / "run", 6)
    path = checkpoint(run, 6)
    torch.save({"state": Harmful(tmp_path / "made")}, path / name)

    def vouch(state):
        state["files"][name] = (path / name).stat().st_size
        del state["checksums"][name]

    edit(path, vouch)
    outcome = job.run(run, **OPTIONS)
    assert not (tmp_path / "made").exists()
    assert outcome.code == 2 and len(outcome.problems) == 1 and "remove it if you did not save it" in outcome.err, outcome


def test_exports_hold_no_pickle(whole, tmp_path):
    assert run_main("export_safetensors", [whole, tmp_path / "out"]).code == 0
    for folder in (whole / "export", tmp_path / "out"):
        for path in folder.iterdir():
            start = path.read_bytes()[:4]
            assert path.suffix in (".safetensors", ".json", ".jinja"), path
            assert start[:2] != b"PK" and start[:1] != b"\x80", f"{path} looks like a pickle"
            if path.suffix == ".json":
                json.loads(path.read_text())


def test_best_by_evaluation_is_kept(job, tmp_path):
    run = job.trained(tmp_path / "run", max_steps=12, save_every=2, eval_every=2, keep_last=1, keep_best=True,
                      learning_rate=1, lr_schedule="constant")
    losses = {row["step"]: row["eval_loss"] for row in rows(run) if "eval_loss" in row}
    best = min(losses, key=losses.get)
    assert best != 12, "else there is nothing to see"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step-{best:08d}", "step-00000012"]
    state = json.loads((checkpoint(run, best) / "run_state.json").read_text())
    assert not differences(state["evaluated"], [best, losses[best]])
