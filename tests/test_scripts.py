"""Every command as a user types it: what it prints and writes, and what it says to input it cannot use."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from jobs import ROOT, SHAPE, THREADS, Job, checkpoint, environment, rows, run_main, write_corpus


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield Job(tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("cache"))
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(job, tmp_path_factory):
    return job.trained(tmp_path_factory.mktemp("trained") / "run", save_every=10)


@pytest.fixture
def run(trained, tmp_path):
    """A copy that may be spoilt."""
    return shutil.copytree(trained, tmp_path / "run")


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def assert_refused(outcome, *words, lines=1):
    """Exit code 2, so many lines, each with a remedy, no traceback, and all the words."""
    assert outcome.code == 2, outcome
    assert len(outcome.problems) == lines, outcome.err
    assert "Traceback" not in outcome.err
    for line in outcome.problems:
        assert any(mark in line for mark in (";", "did you mean", "such as")), f"no remedy: {line}"
    for word in words:
        assert str(word) in outcome.err, (word, outcome.err)


# ---- pretrain: what it refuses ---------------------------------------------------------------------------------------

def bad_tokenizer(folder, eos):
    from memtrain.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["some text, some more text, alpha beta gamma delta"] * 3, 300)
    tokenizer.eos_token = eos
    tokenizer.save_pretrained(str(folder))
    return folder


def big_tokenizer(folder):
    from memtrain.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["alpha beta gamma delta " + str(n) for n in range(3000)], 700)
    tokenizer.save_pretrained(str(folder))
    return folder


def text(folder, data, name="text.txt"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return folder / name


# name -> (options made in a folder, words of the message)
BAD = {
    "unknown option": (lambda f: {"learning_rat": 1}, ["--learning_rat", "did you mean --learning_rate?"]),
    "out of range": (lambda f: {"seq_len": 0}, ["seq_len=0", "integer >= 1"]),
    "not a number": (lambda f: {"learning_rate": "fast"}, ["learning_rate=fast", "a number"]),
    "not a number of updates": (lambda f: {"max_steps": "many"}, ["max_steps=many", "an integer"]),
    "a seed too large": (lambda f: {"seed": 2**32}, ["seed=4294967296"]),
    "heads do not divide": (lambda f: {"num_key_value_heads": 3},
                            ["num_attention_heads=4", "num_key_value_heads=3", "multiple"]),
    "odd head": (lambda f: {"head_dim": 5}, ["head_dim=5", "even"]),
    "micro-batch does not divide": (lambda f: {"micro_batch_size": 3}, ["micro_batch_size=3", "8 rows",
                                                                       "set micro_batch_size=2"]),
    "missing data": (lambda f: {"dataset": f / "none.txt"}, ["none.txt", "no such file"]),
    "no match": (lambda f: {"dataset": f / "*.parquet"}, ["*.parquet", "no file matches"]),
    "wrong suffix": (lambda f: {"dataset": text(f, b"x", "a.doc")}, [".doc", ".jsonl"]),
    "not UTF-8": (lambda f: {"dataset": text(f, b"good text\n" * 5 + b"\xff\xfe bad")}, ["text.txt", "byte 50", "UTF-8",
                                                                                        "encoding_errors=replace"]),
    "empty": (lambda f: {"dataset": text(f, b"")}, ["text.txt", "skipped"]),
    "blank": (lambda f: {"dataset": text(f, b" \n\n ")}, ["text.txt", "skipped"]),
    "not JSON": (lambda f: {"dataset": text(f, b'{"text": "a"}\n{"text": \n', "a.jsonl")}, ["a.jsonl", "line 2"]),
    "another column": (lambda f: {"dataset": text(f, b'{"body": "a"}\n', "a.jsonl")}, ["1 missing", "text_column"]),
    "shorter than a row": (lambda f: {"dataset": text(f, b"only a few words"), "seq_len": 1024, "eval_fraction": 0},
                           ["tokens", "1025", "seq_len=1024", "lower seq_len"]),
    "no tokenizer": (lambda f: {"tokenizer": f / "none"}, ["none", "no such folder"]),
    "no end token": (lambda f: {"tokenizer": bad_tokenizer(f / "tokenizer", None)}, ["no end token", "eos_token"]),
    "vocabulary too small": (lambda f: {"tokenizer": big_tokenizer(f / "tokenizer")},
                             ["vocab_size=512", "raise vocab_size"]),
    "vocabulary without the bytes": (lambda f: {"vocab_size": 100}, ["vocab_size", "259"]),
    "no model": (lambda f: {"model": f / "none.json"}, ["none.json", "no such file"]),
    "another architecture": (lambda f: {"model": text(f, b'{"model_type": "gpt2"}', "gpt2.json")},
                             ["gpt2", "want llama"]),
    "model of holes": (lambda f: {"model": text(f, b'{"hidden_size": 8}', "m.json")}, ["vocab_size", "missing"]),
    "model is no JSON": (lambda f: {"model": text(f, b"{", "m.json")}, ["m.json", "cannot be read"]),
    "fp16 on a CPU": (lambda f: {"mixed_precision": "fp16"},
                      ["mixed_precision=fp16", "without a gradient scaler", "bf16"]),
    "fp8 on a CPU": (lambda f: {"mixed_precision": "fp8"}, ["mixed_precision=fp8", "8.9"]),
    "half-precision weights": (lambda f: {"param_dtype": "float16"}, ["param_dtype=float16", "bfloat16"]),
    "no such checkpoint": (lambda f: {"resume": f / "step-00000003"}, ["step-00000003", "run_state.json", "complete"]),
    "unknown tracker": (lambda f: {"report_to": "tensorbord"}, ["report_to=tensorbord", "tensorboard"]),
    "too many checkpointed layers": (lambda f: {"checkpointed_layers": 3}, ["checkpointed_layers=3", "2 layers"]),
    "no permission for the cache": (lambda f: {"cache_dir": text(f, b"", "file") / "cache"}, ["cache_dir"]),
}


@pytest.mark.parametrize("name", BAD)
def test_pretrain_refuses(job, tmp_path, name):
    make, words = BAD[name]
    options = make(tmp_path / "inputs")
    before = contents(tmp_path)
    outcome = job.run(tmp_path / "run", **options)
    assert_refused(outcome, *words)
    assert contents(tmp_path) == before, "nothing is written"


def test_fp16_with_float16_weights_is_refused_before_data_is_read(job, tmp_path):
    """B2: the file would be an error of its own."""
    bad = text(tmp_path / "inputs", b"\xff" * 10)
    outcome = job.run(tmp_path / "run", dataset=bad, mixed_precision="fp16", param_dtype="float16")
    assert outcome.code == 2 and "UTF-8" not in outcome.err and "param_dtype=float16" in outcome.err


def test_precision_of_the_launch_config_is_checked_too(job, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert_refused(job.run(tmp_path / "run"), "mixed_precision=fp16")


def test_several_problems_are_reported_together(job, tmp_path):
    foreign = tmp_path / "run"
    text(foreign, b"mine", "thesis.txt")
    outcome = job.run(foreign, micro_batch_size=3, dataset=tmp_path / "none.txt", num_key_value_heads=3,
                      mixed_precision="fp16", checkpointed_layers=5)
    assert_refused(outcome, "micro_batch_size=3", "none.txt", "num_key_value_heads=3", "fp16", "checkpointed_layers=5",
                   "holds files but no run", lines=6)
    outcome = job.run(tmp_path / "run", sed=1, seq_len=0, packing="pakced", learning_rate=-1)
    assert_refused(outcome, "--sed", "seq_len=0", "did you mean packed", "learning_rate=-1", lines=4)


@pytest.mark.parametrize("name", ["thesis.txt", "config.yaml"])
def test_foreign_files_are_left_alone(job, tmp_path, name):
    text(tmp_path / "run", b"mine: 1\n", name)
    (tmp_path / "run" / "checkpoints").mkdir()
    before = contents(tmp_path)
    assert_refused(job.run(tmp_path / "run"), tmp_path / "run", "holds files but no run", "another folder")
    assert contents(tmp_path) == before


def test_output_is_a_file(job, tmp_path):
    text(tmp_path, b"mine", "run")
    assert_refused(job.run(tmp_path / "run"), "is a file")
    assert_refused(job.run(tmp_path / "run" / "below"), "is a file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(job, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert_refused(job.run(tmp_path / "closed" / "run"), "no permission")
    file = text(tmp_path, b"secret")
    file.chmod(0)
    assert_refused(job.run(tmp_path / "run", dataset=file), "no permission")


@pytest.mark.parametrize(("changes", "words"), [
    ({"seed": 1}, ["seed=1", "seed=0"]),  # D2
    ({"adam_beta1": 0.5, "weight_decay": 0.3}, ["adam_beta1=0.5", "adam_beta1=0.9", "weight_decay=0.3"]),
    ({"hidden_size": 64}, ["hidden_size=64"]),
    ({"global_batch_size": 4}, ["global_batch_size=4", "global_batch_size=8"]),
    ({"mixed_precision": "bf16"}, ["mixed_precision=bf16", "mixed_precision=no"]),
])
def test_another_run_in_the_same_folder_is_refused(job, run, tmp_path, changes, words):
    before = contents(tmp_path)
    assert_refused(job.run(run, **changes), *words, "another output_dir", lines=len(changes))
    assert_refused(job.run(run, **changes, resume="none"), *words, lines=len(changes))
    assert_refused(job.run(run, **changes, resume=checkpoint(run, 10)), *words, lines=len(changes))
    assert contents(tmp_path) == before, "nothing is written"
    outcome = job.run(tmp_path / "elsewhere", **changes, resume=checkpoint(run, 10))
    assert_refused(outcome, *words, lines=len(changes))
    assert contents(tmp_path) == before, "nothing is written"


def test_resume_none_does_not_write_over_a_run(job, run):
    before = contents(run)
    assert_refused(job.run(run, save_every=10, resume="none"), "resume=none", "step-00000020", "resume=auto")
    assert contents(run) == before


def test_a_changed_model_or_text_is_refused(tmp_path):
    """The names are the same, what stands behind them is not."""
    job = Job(tmp_path / "job", tmp_path / "cache")
    run = job.trained(tmp_path / "run", max_steps=4, save_every=2)
    shutil.rmtree(checkpoint(run, 4))
    before = contents(run)
    job.model.write_text(json.dumps({**SHAPE, "intermediate_size": 128}))
    assert_refused(job.run(run, max_steps=4), "shape of the model", "intermediate_size=128", "64", "another output_dir")
    job.model.write_text(json.dumps(SHAPE))
    write_corpus(job.corpus, seed=1)
    assert_refused(job.run(run, max_steps=4), "the text, tokenizer or rows", "restore them")
    assert contents(run) == before
    write_corpus(job.corpus)
    assert job.run(run, max_steps=4).code == 0


def test_a_recipe_with_an_unknown_key(job, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("max_steps: 2\nsequence_len: 8\n")
    outcome = run_main("pretrain", [recipe, *job.arguments(tmp_path / "run")[1:]])
    assert_refused(outcome, "sequence_len", "did you mean seq_len")
    assert_refused(run_main("pretrain", [tmp_path / "none.yaml"]), "none.yaml", "no such file", "tiny")


# ---- evaluate, generate, export_safetensors --------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["evaluate", "generate", "export_safetensors"])
def test_wrong_paths(trained, tmp_path, name):
    rest = [tmp_path / "out"] if name == "export_safetensors" else []
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = shutil.copytree(checkpoint(trained, 20), tmp_path / "step-00000020")
    os.truncate(broken / "model.safetensors", 100)
    before = contents(tmp_path)
    for path, words in ((tmp_path / "none", ["none", "no such folder"]), (empty, ["empty"]),
                        (ROOT / "ruff.toml", ["no such folder"]), (broken, ["model.safetensors has 100 bytes"]),
                        (tmp_path / "step-00000001", ["run_state.json"])):
        assert_refused(run_main(name, [path, *rest]), *words)
    assert_refused(run_main(name, []), *([] if name == "evaluate" else ["is missing"]))
    assert_refused(run_main(name, [trained, *rest, "more"]), *([] if name == "evaluate" else ["one word too many"]))
    assert contents(tmp_path) == before


def test_evaluate(job, trained, tmp_path):
    outcome = run_main("evaluate", [trained, "--json", tmp_path / "e.json", "--micro_batch_size", "2"])
    assert outcome.code == 0, outcome
    figures = json.loads((tmp_path / "e.json").read_text())
    last = next(row for row in reversed(rows(trained)) if "eval_loss" in row)
    assert figures == pytest.approx({name: last[name] for name in figures}, rel=1e-6)
    printed = dict(line.split() for line in outcome.out.splitlines())
    assert {name: float(value) for name, value in printed.items()} == pytest.approx(figures, rel=1e-5)
    assert run_main("evaluate", [trained, "--mixed_precision", "bf16"]).code == 0


def test_evaluate_other_text(job, trained, tmp_path):
    """The export knows no data when it stands alone: the dataset must be named; the figures are those of the run."""
    alone = shutil.copytree(trained / "export", tmp_path / "alone")
    assert_refused(run_main("evaluate", [alone]), "alone", "set --dataset")
    other = write_corpus(tmp_path / "other.jsonl", 10, seed=5)
    figures = []
    for source in (alone, trained, checkpoint(trained, 20)):
        outcome = run_main("evaluate", [source, "--dataset", other, "--seq_len", "32", "--cache_dir", job.cache,
                                        "--json", tmp_path / "e.json"])
        assert outcome.code == 0, outcome
        figures.append(json.loads((tmp_path / "e.json").read_text()))
    assert figures[0] == pytest.approx(figures[1], rel=1e-6) and figures[1] == figures[2]
    assert 0 < figures[0]["eval_loss"] < math.log(512)


@pytest.mark.parametrize(("arguments", "words"), [
    (["--dataset", "none.txt"], ["none.txt", "no such file"]),
    (["--seq_len", "0"], ["seq_len=0"]),
    (["--learning_rate", "1"], ["--learning_rate"]),
    (["--json", "no/such/folder/e.json"], ["no folder"]),
    (["--mixed_precision", "fp16"], ["mixed_precision=fp16"]),
    (["--micro_batch_size", "none"], ["micro_batch_size"]),
])
def test_evaluate_refuses(trained, arguments, words):
    before = contents(trained)
    assert_refused(run_main("evaluate", [trained, *arguments]), *words)
    assert contents(trained) == before


def test_evaluate_a_run_that_held_nothing_out(job, tmp_path):
    run = job.trained(tmp_path / "run", max_steps=2, eval_fraction=0)
    assert not any("eval_loss" in row for row in rows(run))
    assert_refused(run_main("evaluate", [run]), "eval_fraction=0", "set --dataset")


def test_generate(trained):
    def say(*options):
        outcome = run_main("generate", [trained, "--prompt", "alpha1 beta", "--max_new_tokens", "12", *options])
        assert outcome.code == 0 and outcome.out.startswith("alpha1 beta") and len(outcome.out) > 14, outcome
        return outcome.out

    assert say() == say() and say() != say("--seed", "1")
    likeliest = say("--temperature", "0")
    assert likeliest == say("--temperature", "0", "--seed", "3") == say("--top_k", "1", "--temperature", "1")
    assert run_main("generate", [trained / "export", "--temperature", "0", "--prompt", "alpha1 beta",
                                 "--max_new_tokens", "12"]).out == likeliest
    assert run_main("generate", [trained, "--max_new_tokens", "3"]).code == 0, "without a prompt"


def test_generate_agrees_with_transformers(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(trained / "export") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("alpha1 beta", return_tensors="pt").input_ids
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False)[0]
    outcome = run_main("generate", [trained, "--prompt", "alpha1 beta", "--max_new_tokens", "12", "--temperature", "0"])
    assert outcome.out == tokenizer.decode(wanted, skip_special_tokens=True) + "\n"


@pytest.mark.parametrize(("option", "value"), [
    ("max_new_tokens", "0"), ("max_new_tokens", "x"), ("temperature", "-1"), ("temperature", "nan"), ("top_k", "0"),
    ("seed", "-1"), ("seed", str(2**64)), ("prompts", "x"),
])
def test_generate_refuses(trained, option, value):
    assert_refused(run_main("generate", [trained, f"--{option}", value]), f"--{option}")


@pytest.mark.parametrize("source", ["run", "checkpoint", "export"])
def test_export(trained, tmp_path, source):
    from safetensors.torch import load_file

    path = {"run": trained, "checkpoint": checkpoint(trained, 20), "export": trained / "export"}[source]
    outcome = run_main("export_safetensors", [path, tmp_path / "out"])
    assert outcome.code == 0 and str(tmp_path / "out") in outcome.out
    assert (tmp_path / "out/model.safetensors").read_bytes() == (trained / "export/model.safetensors").read_bytes()
    names = [sorted(file.name for file in folder.iterdir()) for folder in (tmp_path / "out", trained / "export")]
    assert names[0] == names[1]
    assert run_main("export_safetensors", [path, tmp_path / "out", "--dtype", "bfloat16"]).code == 0
    assert {value.dtype for value in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(("arguments", "words"), [
    (["--dtype", "int8"], ["--dtype int8", "float32"]),
    (["--max_shard_size", "big"], ["max_shard_size=big", "5GB"]),
    (["--max_shard_size"], ["--max_shard_size", "no value"]),
])
def test_export_refuses_values(trained, tmp_path, arguments, words):
    assert_refused(run_main("export_safetensors", [trained, tmp_path / "out", *arguments]), *words)
    assert not (tmp_path / "out").exists()


def test_export_leaves_foreign_files_alone(trained, tmp_path):
    text(tmp_path / "out", b"mine", "thesis.txt")
    before = contents(tmp_path)
    assert_refused(run_main("export_safetensors", [trained, tmp_path / "out"]), "thesis.txt", "no part of an export")
    assert_refused(run_main("export_safetensors", [trained, tmp_path / "out" / "thesis.txt"]), "is a file")
    assert contents(tmp_path) == before


def test_training_goes_on_from_an_export(job, trained, tmp_path):
    """--model FOLDER: its weights, shape and tokenizer."""
    run = job.trained(tmp_path / "run", model=trained / "export", max_steps=2)
    first, last = rows(run)[0]["loss"], next(row["loss"] for row in reversed(rows(trained)) if "loss" in row)
    assert first == pytest.approx(last, abs=0.3) and first < 5
    outcome = job.run(tmp_path / "other", model=trained / "export", hidden_size=64)
    assert_refused(outcome, "hidden_size=64", "fix it at 32")


# ---- real processes --------------------------------------------------------------------------------------------------

def test_exit_code_of_a_process(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "pretrain.py"), "--dataset", "none.txt", "--output_dir",
               str(tmp_path / "run")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 1, done
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_default_job(tmp_path):
    """The first command of the README, in a folder of its own and with an empty cache."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "scripts/pretrain.py",
               "--output_dir", str(tmp_path / "run"), "--cache_dir", str(tmp_path / "cache")]
    without = environment()
    del without["OMP_NUM_THREADS"]

    def launch():
        done = subprocess.run(command, env=without, capture_output=True, text=True, timeout=1200, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    out = launch()
    assert "a sample:" in out and "exported to" in out
    run = tmp_path / "run"
    training = [row for row in rows(run) if "loss" in row]
    assert training[0]["loss"] == pytest.approx(math.log(4096), abs=0.2)
    assert len(training) == 400 and sum(row["loss"] for row in training[-10:]) / 10 < 5.0
    assert next(row for row in reversed(rows(run)) if "eval_loss" in row)["eval_loss"] < 5.0
    assert checkpoint(run, 400).exists() and (run / "export" / "model.safetensors").exists()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(run / "export") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("def main(", return_tensors="pt").input_ids
    assert len(model.generate(ids, max_new_tokens=5, do_sample=False)[0]) > len(ids[0])
    assert "nothing left to do" in launch()
