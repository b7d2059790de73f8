"""memory.json and memory.png of real runs: the prediction beside the measurement."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from jobs import ROOT, Job, environment, rows, stopped_after

from memtrain.memory import report
from memtrain.memory.ledger import PARTS

MIB = 2**20


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    return Job(folder, folder / "cache")


def memory(run):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((run / "memory.json").read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def watched(job, tmp_path_factory):
    run = tmp_path_factory.mktemp("watched") / "run"
    outcome = job.run(run, watched=True, max_steps=6, save_every=3, keep_last=9)
    assert outcome.code == 0, outcome
    return run, outcome


def test_prediction_and_measurement_agree(watched):
    run, outcome = watched
    found = memory(run)
    predicted, measured = found["predicted"], found["measured"]
    assert list(measured["phases"]) == ["init", "forward", "backward", "optimizer", "evaluate", "save"]
    for phase, nbytes in measured["phases"].items():
        assert abs(predicted["phases"][phase] - nbytes) <= max(0.001 * nbytes, 8192), (phase, predicted["phases"], nbytes)
    assert measured["peak_bytes"] == max(measured["phases"].values()) == sum(measured["parts"].values())
    assert set(measured["parts"]) == set(predicted["parts"]) == set(PARTS)
    assert found["budget_bytes"] is None and found["apart"]["process"] > 50 * MIB and not found["notes"]
    words = [report.size(part["peak_bytes"]) for part in (predicted, measured)]
    assert f"memory at the end: tensors at the peak predicted {words[0]}, measured {words[1]};" in outcome.out


def test_the_picture(watched):
    run, outcome = watched
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert not (run / "memory.png").exists() and "memory.png: not drawn, matplotlib is not installed" in outcome.out
    else:
        assert (run / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_line_says_so(job, tmp_path, monkeypatch):
    from memtrain.memory import watch

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(watch.MemoryWatch, "_predict", lambda self: None)
    outcome = job.run(tmp_path / "run", max_steps=2, watched=True)
    assert outcome.code == 0 and outcome.out.count("memory.png: not drawn, matplotlib is not installed") == 1, outcome.out
    found = memory(tmp_path / "run")
    assert not (tmp_path / "run" / "memory.png").exists() and found["predicted"] is None and found["measured"] is not None


def test_a_resumed_run_is_measured_too(watched, job, tmp_path):
    """Its second update, although its first already has optimizer state; and its load."""
    run = stopped_after(watched[0], tmp_path / "run", 3)
    job.trained(run, max_steps=6, save_every=3, keep_last=9)
    found, whole = memory(run)["measured"], memory(watched[0])["measured"]
    assert found["phases"].pop("load") > 0
    assert found["phases"] == whole["phases"] and found["parts"] == whole["parts"]


def test_what_cannot_be_measured_is_null(job, tmp_path):
    job.trained(tmp_path / "run", max_steps=1)
    found = memory(tmp_path / "run")
    assert found["measured"] is None and "fewer than two updates" in found["notes"]["measured"]


@pytest.mark.slow
def test_a_compiled_run_is_not_followed(job, tmp_path):
    job.trained(tmp_path / "run", max_steps=3, compile=True)
    found = memory(tmp_path / "run")
    assert found["measured"] is None and "compiled" in found["notes"]["measured"]


def test_a_child_that_fails_says_why(job):
    from memtrain.config import load_config
    from memtrain.memory.child import answer, ask
    from memtrain.model.presets import model_config

    config = load_config(job.arguments(None))
    with pytest.raises(RuntimeError, match="KeyError"):
        answer(ask("no question", config, model_config(config), 1))


# ---- G4 --------------------------------------------------------------------------------------------------------------

UNWATCHED = """
import sys
sys.path.insert(0, "tests")
import jobs
with jobs.unwatched():
    sys.exit(jobs.load_script("pretrain").main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_resumed_run_takes_no_more_than_a_fresh_one(job, tmp_path, precision):
    """G4: the process's own peak, with a malloc that gives back what is freed; 25 MB of weights and twice that of state."""
    options = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4,
               "num_key_value_heads": 4, "model": "tiny", "save_every": 2, "keep_last": 9, "mixed_precision": precision,
               "log_every": 1}

    def peak(steps):
        arguments = job.arguments(tmp_path / "run", max_steps=steps, lr_schedule="constant", warmup_steps=0, **options)
        done = subprocess.run([sys.executable, "-c", UNWATCHED, *arguments], capture_output=True, text=True, timeout=280,
                              env=environment(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536"), cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        return memory(tmp_path / "run")["apart"]["process"]

    fresh, resumed = peak(4), peak(8)
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row] == list(range(1, 9))
    assert resumed <= 1.05 * fresh, (resumed, fresh)
