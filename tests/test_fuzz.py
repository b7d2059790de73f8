"""Random options: whatever they are, a run ends with 0, 2 or 3, and what is refused is refused in plain lines."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import ROOT, Job, environment

from memtrain.command import BadInput
from memtrain.config import load_config
from memtrain.options import RunConfig
from memtrain.training.check import check_run

NUMBERS = ["0", "1", "2", "3", "8", "64", "0.5", "1e-3", "1e3", "-1", "1e400", "nan", "99999999999999999999", "0256"]
WORDS = ["none", "null", "auto", "all", "yes", "on", "no", "true", "false", "", " ", "a b", "x.txt", "é", "-", "12GB",
         "0.5 gib", "python-stdlib", "tiny", "train", "nosuch/model", "/dev/null", "runs", "../..", "[1, 2]", "{a: b}", "'",
         "\x00", "%s", "*", "~nobody-here/x", "x" * 300, "x" * 300 + ".json", "x" * 5000 + "*.txt", "/proc/1/fd"]


def values(name: str) -> st.SearchStrategy[str]:
    """Texts for an option: what it knows, what it does not, numbers, and any text at all."""
    option = next(f for f in fields(RunConfig) if f.name == name)
    known = [*option.metadata["choices"], *option.metadata["words"]]
    if option.default not in (None, MISSING):
        known.append(str(option.default))
    return st.one_of(*([st.sampled_from(known)] * 3 if known else []), st.sampled_from(NUMBERS), st.sampled_from(WORDS),
                     st.text(max_size=6))


OPTIONS = st.lists(st.sampled_from([f.name for f in fields(RunConfig)]), max_size=8, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: values(name) for name in names}))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("fuzz"), tmp_path_factory.mktemp("cache"))


def plain(message: str) -> None:
    lines = message.splitlines()
    assert lines and all(line.strip() for line in lines) and "Traceback" not in message, message


@given(options=OPTIONS, processes=st.sampled_from([1, 2, 3]), as_yaml=st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_options_are_checked_without_a_traceback(job, tmp_path_factory, options, processes, as_yaml):
    check(job, options, processes, as_yaml)


@pytest.mark.slow
@given(options=OPTIONS, processes=st.sampled_from([1, 2, 3]), as_yaml=st.booleans())
@settings(max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_options_are_checked_without_a_traceback(job, tmp_path_factory, options, processes, as_yaml):
    check(job, options, processes, as_yaml)


def check(job: Job, options: dict[str, str], processes: int, as_yaml: bool) -> None:
    base = job.arguments(job.folder / "run")
    if as_yaml:
        recipe = job.folder / "fuzz.yaml"
        recipe.write_text("\n".join(f"{name}: {value}" for name, value in options.items()), encoding="utf-8",
                          errors="surrogatepass")
        arguments = [str(recipe)]
    else:
        given = {f"--{name}": value for name, value in options.items()}
        arguments = [word for word in base if word.split("=")[0] not in given] + [f"{n}={v}" for n, v in given.items()]
    try:
        check_run(load_config(arguments), processes)
    except BadInput as error:
        plain(str(error))


# options of which nearly all go together, for runs that get far
GOOD: dict[str, list[Any]] = {
    "micro_batch_size": ["auto", 1, 2, 4, 8],
    "optimizer": ["adamw", "adamw_8bit", "adamw_4bit", "adamw_factored", "adafactor", "lion_8bit"],
    "lr_schedule": ["cosine", "linear", "constant", "wsd"], "param_dtype": ["float32", "bfloat16"],
    "mixed_precision": ["no", "bf16"], "gradient_checkpointing": ["none", "selective", "selective_deep", "full"],
    "checkpointed_layers": ["all", 1], "offload_activations": [True, False], "loss_chunk_tokens": ["auto", 16],
    "optimizer_in_backward": [True, False], "max_grad_norm": ["none", 1.0], "packing": ["packed", "padded"],
    "document_mask": [True, False], "save_every": [None, 1, 2], "save_async": [True, False], "keep_best": [True, False],
    "eval_every": [None, 1], "eval_fraction": [0, 0.1], "seq_len": [1, 8, 32], "attention_dropout": [0, 0.1],
    "tie_word_embeddings": [True, False], "warmup_steps": [None, 0, 1, 3], "num_key_value_heads": [1, 2, 4],
    "log_every": [1, 3], "epochs": [None, 1], "global_batch_size": [8, 5, 64],
}


@given(options=st.fixed_dictionaries({}, optional={name: st.sampled_from(choices) for name, choices in GOOD.items()}))
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_combinations_run_or_are_refused(job, tmp_path_factory, options):
    run(job, tmp_path_factory.mktemp("run"), options)


@pytest.mark.slow
@given(options=st.fixed_dictionaries({}, optional={name: st.sampled_from(choices) for name, choices in GOOD.items()}))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_combinations_run_or_are_refused(job, tmp_path_factory, options):
    run(job, tmp_path_factory.mktemp("run"), options)


def run(job: Job, folder: Path, options: dict[str, Any]) -> None:
    if options.get("epochs") is not None:
        options = {**options, "max_steps": "none", "global_batch_size": 64}
    outcome = job.run(folder / "run", **{"max_steps": 3, **options})
    assert outcome.code in (0, 2, 3), outcome
    if outcome.code:
        plain("\n".join(line for line in outcome.problems if "update" not in line) or outcome.err)
    else:
        assert (folder / "run" / "export" / "model.safetensors").exists()


@pytest.mark.parametrize("words", [
    ["--learning_rate", "1e-3", "--seq_len", "-5"], ["--", "x"], ["nosuch.yaml"], ["--dataset"], ["tiny", "--max_steps=\u00e9"],
])
def test_the_real_script(words):
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "pretrain.py"), *words], env=environment(), cwd=os.getcwd(),
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout, done
    plain(done.stderr)


def test_the_harness_would_see_a_traceback(job, monkeypatch):
    monkeypatch.setattr("memtrain.rules.RULES", [lambda config: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        check(job, {}, 1, as_yaml=False)
