"""pretrain.py from start to end: what it writes, and when it stops by itself."""

from __future__ import annotations

import itertools
import json
import math
import resource
import shutil
from pathlib import Path

import pytest
from jobs import checkpoint, differences, rows, run_main, stopped_after

from memtrain.training import step as steps

OPTIONS = {"max_steps": 20, "save_every": 5, "keep_last": 9, "eval_every": 10}


@pytest.fixture(scope="module")
def finished(job, tmp_path_factory):
    return job.trained(tmp_path_factory.mktemp("finished") / "run", **OPTIONS)


def test_what_a_run_leaves(job, finished):
    assert sorted(path.name for path in finished.iterdir()) == [
        "checkpoints", "config.yaml", "export", "memory.json", "metrics.jsonl"]
    saved = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert saved == [f"step-{n:08d}" for n in (5, 10, 15, 20)]
    training = [row for row in rows(finished) if "loss" in row]
    assert [row["step"] for row in training] == list(range(1, 21))
    assert training[0]["loss"] == pytest.approx(math.log(512), abs=0.1), "an untrained model knows nothing"
    assert training[-1]["loss"] < training[0]["loss"] - 0.5
    assert all(later["tokens"] > row["tokens"] for row, later in itertools.pairwise(training))
    assert all(0 < row["grad_norm"] < 100 and 0 < row["learning_rate"] <= 0.01 for row in training)
    evaluations = [row for row in rows(finished) if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [10, 20]
    assert all(row["eval_perplexity"] == pytest.approx(math.exp(row["eval_loss"])) for row in evaluations)


def test_rows_have_speed_and_memory(finished):
    for line in (finished / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "loss" in row:
            assert row["tokens_per_second"] > 0 and row["peak_bytes"] > 10e6


def test_the_resolved_config_is_the_same_run(finished, job, tmp_path):
    outcome = run_main("pretrain", [finished / "config.yaml", "--output_dir", tmp_path / "again"])
    assert outcome.code == 0, outcome
    assert rows(tmp_path / "again") == rows(finished)
    exports = [(folder / "export/model.safetensors").read_bytes() for folder in (tmp_path / "again", finished)]
    assert exports[0] == exports[1]


def test_the_export_is_the_last_checkpoint_and_evaluates_to_its_loss(job, finished, tmp_path):
    """Bits and loss by transformers' own model on the held-out text."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = finished / "export"
    pair = [load_file(folder / "model.safetensors") for folder in (export, checkpoint(finished, 20))]
    assert not differences(*pair)
    figures = []
    for source in (finished, checkpoint(finished, 20), export):
        assert run_main("evaluate", [source, "--json", tmp_path / "e.json"]).code == 0
        figures.append(json.loads((tmp_path / "e.json").read_text()))
    last = [row for row in rows(finished) if "eval_loss" in row][-1]
    for figure in figures:
        assert figure == pytest.approx({name: last[name] for name in figure}, rel=1e-6)

    from memtrain.data.token_store import held_out_share

    texts = [json.loads(line)["text"] for line in job.corpus.read_text().splitlines()]
    held_out = [text for text in texts if held_out_share(text) < 0.1]
    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    ids = [i for text in held_out for i in (*tokenizer(text).input_ids, tokenizer.eos_token_id)]
    total = 0.0
    for start in range(0, len(ids) - 1, 32):  # packed rows: 32 targets each
        row = torch.tensor([ids[start:start + 33]])
        with torch.no_grad():
            log_p = model(row[:, :-1]).logits.double().log_softmax(-1)
        total -= float(log_p.gather(2, row[:, 1:, None]).sum())
    assert last["eval_loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    text_bytes = sum(len(text.encode()) for text in held_out)
    assert last["eval_bits_per_byte"] == pytest.approx(total / math.log(2) / text_bytes, rel=1e-5)


def test_an_absurd_learning_rate_stops_the_run(job, tmp_path):
    run = tmp_path / "run"
    outcome = job.run(run, learning_rate=1e30, max_grad_norm="none", save_every=1)
    assert outcome.code == 3 and "Traceback" not in outcome.err
    last = outcome.problems[-1]
    assert "not finite" in last and "lower learning_rate" in last
    found = rows(run)  # strict JSON
    bad = found[-1]
    assert bad["loss"] is None or bad["grad_norm"] is None
    saved = sorted(int(path.name.split("-")[1]) for path in (run / "checkpoints").iterdir())
    assert saved and saved[-1] == bad["step"] - 1 and f"step-{saved[-1]:08d}" in last
    assert not (run / "export").exists()


def test_a_loss_that_is_not_finite_leaves_earlier_checkpoints(job, finished, tmp_path, monkeypatch):
    """The weights go bad at update 13 of a run that is gone on with."""
    run = stopped_after(finished, tmp_path / "run", 10)
    before = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    original, calls = steps.forward_loss, []

    def forward_loss(*arguments):
        calls.append(1)
        return original(*arguments) * (math.nan if len(calls) == 3 else 1.0)

    monkeypatch.setattr(steps, "forward_loss", forward_loss)
    outcome = job.run(run, **OPTIONS, log_every=10)
    assert outcome.code == 3 and "update 13: loss nan" in outcome.problems[-1]
    assert "step-00000010" in outcome.problems[-1] and "there is no" not in outcome.problems[-1]
    assert before == {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    assert [row["loss"] is None for row in rows(run) if "loss" in row][:13] == [False] * 12 + [True]
    monkeypatch.undo()
    assert job.run(run, **OPTIONS).code == 0
    assert rows(run) == rows(finished), "and it can be gone on with"


@pytest.mark.parametrize("limit_bytes", [4096, 160_000])
def test_disk_full_during_a_save(job, finished, tmp_path, limit_bytes):
    """D5: no room for the model, and none for the optimizer's state."""
    run = stopped_after(finished, tmp_path / "run", 10)
    size = {path.name: path.stat().st_size for path in checkpoint(run, 10).iterdir()}
    assert 4096 < size["model.safetensors"] < 160_000 < size["optimizer.bin"]
    before = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        outcome = job.run(run, max_steps=20, save_every=5, keep_last=9, log_every=10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome.code == 3 and "Traceback" not in outcome.err, outcome
    last = outcome.problems[-1]
    assert "step-00000015: could not be written" in last and "step-00000010;" in last and "free some space" in last
    assert before == {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    assert job.run(run, **OPTIONS).code == 0
    assert rows(run) == rows(finished)


def test_disk_full_during_metrics_and_export(job, finished, tmp_path):
    run = stopped_after(finished, tmp_path / "run", 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))  # more than config and metrics, less than weights
    try:
        export = job.run(run, **OPTIONS)
        other = run_main("export_safetensors", [run, tmp_path / "out"])
        shutil.rmtree(checkpoint(run, 20))
        start = (run / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (start - 300, hard))
        metrics = job.run(run, **{**OPTIONS, "save_every": 99, "eval_every": 99})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        config = job.run(run, **OPTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for outcome, code, name, good in ((export, 3, "export: ", "step-00000020"), (other, 2, "out: ", ""),
                                      (metrics, 3, "metrics.jsonl: ", "step-00000015"),
                                      (config, 3, "run: ", "step-00000015")):
        assert outcome.code == code and "Traceback" not in outcome.err, outcome
        assert f"{name}could not be written" in outcome.problems[-1] and good in outcome.problems[-1]
        assert "free some space" in outcome.problems[-1]
    assert not (run / "export").exists() and not list(run.glob(".export*")) and not list(tmp_path.glob("*out*"))


def overflow_at(monkeypatch, *numbers):
    """Those calls of `optimizer_step` find an overflow. Returns a list that grows with every call."""
    original, calls = steps.optimizer_step, []

    def optimizer_step(state):
        calls.append(1)
        if len(calls) in numbers:
            state.optimizer.zero_grad(set_to_none=True)
            return False
        return original(state)

    monkeypatch.setattr(steps, "optimizer_step", optimizer_step)
    return calls


def test_updates_that_overflow_are_taken_again_by_later_samples(job, tmp_path, monkeypatch):
    """Counted in updates, the run takes more samples; nothing is logged for an update that was not made."""
    overflow_at(monkeypatch, 1, 4)
    run = job.trained(tmp_path / "run", max_steps=6)
    assert [row["step"] for row in rows(run) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    state = json.loads((checkpoint(run, 6) / "run_state.json").read_text())
    assert state["progress"]["position"] == 8 * 8


def test_an_epoch_with_an_overflow_ends_saved_and_exported(job, tmp_path, monkeypatch):
    """The updates are one fewer than planned: everything is written all the same, and there is nothing left to do."""
    calls = overflow_at(monkeypatch, 2)
    run = job.trained(tmp_path / "run", epochs=1, log_every=100)
    made = [row["step"] for row in rows(run) if "loss" in row]
    assert made == list(range(1, len(calls))) and rows(run)[-1]["eval_loss"] > 0
    assert checkpoint(run, made[-1]).exists() and (run / "export" / "config.json").exists()
    outcome = job.run(run, epochs=1, log_every=100)
    assert outcome.code == 0 and "nothing left to do" in outcome.out


def test_more_epochs_go_on_where_fewer_ended(job, tmp_path):
    run = job.trained(tmp_path / "run", epochs=1, lr_schedule="constant", warmup_steps=0)
    first = len(rows(run))
    job.trained(run, epochs=2, lr_schedule="constant", warmup_steps=0)
    whole = job.trained(tmp_path / "whole", epochs=2, lr_schedule="constant", warmup_steps=0)
    # the last update of one epoch is short; in the longer run it reaches into the next epoch
    assert rows(run)[:first - 2] == rows(whole)[:first - 2] and len(rows(run)) > first


def test_keep_until_drops_what_will_be_computed_again(tmp_path, fresh_accelerate):
    from accelerate import Accelerator

    from memtrain.training.metrics import TrainLog

    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "eval_loss": 1}\n{"step": 3}\n{"step": 4, "lo')
    log = TrainLog(path, Accelerator(cpu=True))
    log.keep_until(2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2, "eval_loss": 1}\n'
    log.keep_until(0)
    assert path.read_text() == ""


@pytest.mark.parametrize(("value", "text"), [(math.nan, "null"), (-math.inf, "null"), (1.5, "1.5"), (3, "3")])
def test_strict_json(value, text):
    from memtrain.training.metrics import strict_json

    assert strict_json({"x": value}) == f'{{"x": {text}}}'


def test_trackers_get_what_metrics_get(job, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = job.trained(tmp_path / "run", max_steps=4, report_to="tensorboard")
    folder = next(path.parent for path in Path(run).rglob("events.out*") if "hparams" not in str(path))
    events = reader.EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_compiled_run_exports_plain_names(job, finished, tmp_path):
    """E3; and it learns the same."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    run = job.trained(tmp_path / "run", **OPTIONS, compile=True)
    one, other = (load_file(folder / "export" / "model.safetensors") for folder in (run, finished))
    assert one.keys() == other.keys()
    _, info = AutoModelForCausalLM.from_pretrained(run / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    losses = [[row["loss"] for row in rows(folder) if "loss" in row] for folder in (run, finished)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    shutil.rmtree(run / "export")
    uncompiled = job.run(run, max_steps=21, save_every=5, keep_last=9, eval_every=10)
    assert uncompiled.code == 0, "a compiled run's checkpoint goes on uncompiled"
