"""A line for every rule of the options: what is refused, with what words, and what is read as what."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from jobs import SHAPE, write_corpus

from memtrain.command import BadInput
from memtrain.config import load_config, read_recipe
from memtrain.options import RunConfig, parse_bytes
from memtrain.rules import RULES
from memtrain.training.check import check_run

REMEDIES = (";", "did you mean", "such as")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model, text, a folder of a run, and things that are none of these."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "model.json").write_text(json.dumps(SHAPE))
    write_corpus(folder / "corpus.jsonl")
    (folder / "empty").mkdir()
    (folder / "other").mkdir()
    (folder / "other" / "thesis.doc").write_text("x")
    (folder / "gpt").mkdir()
    (folder / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("")
    (folder / "run" / "config.yaml").write_text("seed: 3\noutput_dir: run\n")
    return folder


def problems(place: Path, yaml_text: str, processes: int = 1) -> list[str]:
    """Lines about a recipe, read and checked as pretrain.py does before it touches anything."""
    given = yaml_text.format(place=place)
    names = [line.split(":")[0].strip() for line in given.splitlines()]
    rest = {"model": place / "model.json", "dataset": place / "corpus.jsonl", "max_steps": 20, "global_batch_size": 8,
            "output_dir": place / "new"}
    text = given + "".join(f"\n{name}: {value}" for name, value in rest.items()
                           if name not in names and not (name == "max_steps" and "epochs" in names))
    recipe = place / "recipe.yaml"
    recipe.write_text(text)
    try:
        check_run(load_config([str(recipe)]), processes)
    except BadInput as error:
        return str(error).splitlines()
    return []


# ---- each option: its type and its range -----------------------------------------------------------------------------

ONE_OPTION = """
model: [a, b]                        | want text
hidden_size: wide                    | want an integer >= 1
hidden_size: 0                       | >= 1
intermediate_size: 1.5               | want an integer >= 1
intermediate_size: -64               | >= 1
num_hidden_layers: [2]               | want an integer >= 1
num_hidden_layers: 0                 | >= 1
num_attention_heads: many            | want an integer >= 1
num_attention_heads: 0               | >= 1
num_key_value_heads: {{}}            | want an integer >= 1
num_key_value_heads: 0               | >= 1
head_dim: a                          | want an integer >= 2
head_dim: 1                          | >= 2
rope_theta: hot                      | want a number >= 1
rope_theta: 0.5                      | >= 1
rope_theta: inf                      | want a number
tie_word_embeddings: maybe           | want true or false
tie_word_embeddings: 1               | want true or false
attention_dropout: none at all       | want a number >= 0 and < 1
attention_dropout: 1                 | < 1
attention_dropout: -0.1              | >= 0
dataset: []                          | one or more names
dataset: [[a]]                       | one or more names
dataset_config: [a]                  | want text
dataset_split: [a]                   | want text
text_column: {{a: b}}                | want text
text_column: ""                      | want text
streaming: 2                         | want true or false
encoding_errors: ignore              | want one of strict, replace
tokenizer: [a]                       | want text
vocab_size: 32k                      | want an integer >= 1
vocab_size: 0                        | >= 1
seq_len: long                        | want an integer >= 1
seq_len: 0                           | >= 1
seq_len: null                        | leave the option out
packing: pakced                      | did you mean packed
document_mask: 3                     | want true or false
eval_fraction: tenth                 | want a number >= 0 and < 1
eval_fraction: 1                     | < 1
eval_fraction: nan                   | want a number
num_workers: two                     | want an integer >= 0
num_workers: -1                      | >= 0
cache_dir: [a]                       | want text
global_batch_size: 8.5               | want an integer >= 1
global_batch_size: 0                 | >= 1
micro_batch_size: Auto               | or auto
micro_batch_size: 0                  | >= 1
max_steps: 1:30                      | want an integer >= 1
max_steps: 0                         | >= 1
epochs: all                          | want an integer >= 1
epochs: 0                            | >= 1
optimizer: adam                      | did you mean adamw
learning_rate: fast                  | want a number >= 0
learning_rate: -1e-3                 | >= 0
learning_rate: [1e-3]                | want a number
lr_schedule: cosinus                 | did you mean cosine
warmup_steps: 10%                    | want an integer >= 0
warmup_steps: -1                     | >= 0
decay_steps: some                    | want an integer >= 1
decay_steps: 0                       | >= 1
min_lr_ratio: a tenth                | want a number >= 0
min_lr_ratio: -0.1                   | >= 0
weight_decay: yes                    | want a number >= 0
weight_decay: -0.1                   | >= 0
adam_beta1: x                        | want a number >= 0 and < 1
adam_beta1: 1                        | < 1
adam_beta2: x                        | want a number >= 0 and < 1
adam_beta2: 1.0                      | < 1
adam_eps: tiny                       | want a number >= 0
adam_eps: -1e-8                      | >= 0
max_grad_norm: big                   | want a number >= 0
max_grad_norm: -1                    | >= 0
seed: lucky                          | want an integer >= 0
seed: -1                             | >= 0
seed: 4294967296                     | < 4
compile: please                      | want true or false
memory_budget: [12GB]                | want text
memory_budget: 12                    | with its unit
memory_budget: 12G                   | with its unit
memory_budget: 0GB                   | above 0
memory_budget: -3GB                  | with its unit
memory_budget: 12,5GB                | with its unit
enforce_budget: hard                 | want true or false
allow: everything                    | want any of rounding, optimizer
gradient_checkpointing: "yes"        | want one of none, selective
checkpointed_layers: most            | or all
checkpointed_layers: -1              | >= 0
recomputed_rows: some                | or all
recomputed_rows: 0                   | >= 1
head_in_blocks: 2                    | want true or false
offload_activations: disk            | want true or false
loss_chunk_tokens: few               | or auto
loss_chunk_tokens: 0                 | >= 1
optimizer_in_backward: 1.0           | want true or false
param_dtype: bf16                    | did you mean bfloat16
mixed_precision: fp32                | want one of no, bf16
output_dir: [a]                      | want text
output_dir: null                     | leave the option out
resume: [a]                          | want text
save_every: often                    | want an integer >= 1
save_every: 0                        | >= 1
save_async: later                    | want true or false
keep_last: all                       | want an integer >= 1
keep_last: 0                         | >= 1
keep_best: 3                         | want true or false
eval_every: 0                        | >= 1
eval_every: never                    | want an integer >= 1
log_every: 0                         | >= 1
log_every: 9223372036854775808       | want an integer
report_to: [a]                       | want text
""".strip().splitlines()


@pytest.mark.parametrize("line", ONE_OPTION)
def test_one_option(place, line):
    text, words = (part.strip() for part in line.split("|"))
    found = problems(place, text)
    assert len(found) == 1, found
    name = text.split(":")[0]
    assert found[0].startswith(f"{name}=") and words in found[0], found
    assert any(mark in found[0] for mark in REMEDIES), f"no remedy: {found}"


def test_every_option_has_a_line():
    assert {line.split(":")[0] for line in ONE_OPTION} == {f.name for f in fields(RunConfig)}


# ---- what does not go together ---------------------------------------------------------------------------------------

COMBINATIONS = """
epochs: 2, max_steps: 3                                      | both given, exactly one of them
max_steps: none                                              | neither given, exactly one of them
streaming: true, tokenizer: gpt2, epochs: 1                  | epochs=1, set max_steps
streaming: true                                              | without a tokenizer
warmup_steps: 21                                             | more than max_steps=20
decay_steps: 5                                               | lr_schedule=wsd
decay_steps: 15, lr_schedule: wsd, warmup_steps: 6           | decay_steps=15, warmup_steps=6
min_lr_ratio: 1.5                                            | between 0 and 1
learning_rate: 0                                             | above 0
max_grad_norm: 0                                             | none for no clipping
adam_eps: 0                                                  | 0 / 0
document_mask: true, packing: padded                         | packing=padded
cache_dir: {place}/new                                       | another cache_dir
memory_budget: 12 parsecs                                    | with its unit
enforce_budget: true                                         | set memory_budget
param_dtype: bfloat16, mixed_precision: bf16                 | autocast needs float32
optimizer_in_backward: true                                  | max_grad_norm=none
offload_activations: true, gradient_checkpointing: selective | full or none
recomputed_rows: 2                                           | gradient_checkpointing=full
head_in_blocks: true                                         | optimizer_in_backward=true
head_in_blocks: on, optimizer_in_backward: on, max_grad_norm: none, optimizer: adafactor, tie_word_embeddings: no | adamw_8bit
checkpointed_layers: 0, gradient_checkpointing: full         | gradient_checkpointing=none
param_dtype: int8, optimizer: adafactor, max_grad_norm: none | head_in_blocks=true, optimizer_in_backward=true
INT8, optimizer: adamw_8bit, tie_word_embeddings: false | optimizer=adamw_factored
INT8, optimizer: adafactor, tie_word_embeddings: false, gradient_checkpointing: selective | gradient_checkpointing=full
INT8, optimizer: adafactor, tie_word_embeddings: false, gradient_checkpointing: full, recomputed_rows: 1 | recomputed_rows=all
INT8, optimizer: adafactor, tie_word_embeddings: false, compile: true | compile=false
eval_every: 5, eval_fraction: 0                              | leave eval_every out
keep_best: true, eval_fraction: 0                            | keep_best=false
keep_best: true, save_every: 5                               | set eval_every
keep_best: true, save_every: 5, eval_every: 2                | multiple of 2
keep_best: true, eval_every: 2                               | set save_every
""".strip().splitlines()

AT_THE_START = """
micro_batch_size: 3                                          | does not divide
global_batch_size: 9 @ 2                                     | not a multiple of the 2 processes
micro_batch_size: 3 @ 2                                      | of 2 processes
optimizer_in_backward: true, max_grad_norm: none, micro_batch_size: 2 | micro_batch_size=8
optimizer_in_backward: true, max_grad_norm: none @ 2         | start one process
optimizer_in_backward: true, max_grad_norm: none, mixed_precision: fp16 | scaler looks at all gradients, a CPU would train
head_in_blocks: true, optimizer_in_backward: true, max_grad_norm: none | tie_word_embeddings=true
INT8, optimizer: adafactor, tie_word_embeddings: false @ 2 | start one process
INT8, optimizer: adafactor, tie_word_embeddings: false, micro_batch_size: 2 | micro_batch_size=8
INT8, optimizer: adafactor, tie_word_embeddings: true | tie_word_embeddings=true
mixed_precision: fp16                                        | a CPU would train in float32
mixed_precision: fp8                                         | compute capability
param_dtype: float16                                         | underflow
hidden_size: 33                                              | multiple of num_attention_heads
num_key_value_heads: 3                                       | multiple of num_key_value_heads=3
head_dim: 9                                                  | even number
checkpointed_layers: 3                                       | 2 layers
model: nosuch.json                                           | no such file
model: {place}/empty                                         | config.json
model: {place}/gpt                                           | gpt2
dataset: nosuch.txt                                          | no such file
dataset: "*.nosuch"                                          | no file matches
dataset: {place}/empty                                       | no data files
dataset: "a b"                                               | correct the path
dataset_split: test                                          | only hub data sets
dataset_config: en                                           | only hub data sets
output_dir: {place}/corpus.jsonl                             | is a file
output_dir: {place}/corpus.jsonl/run                         | is a file
output_dir: {place}/other                                    | no run
output_dir: {place}/run, seed: 4                             | seed=3, seed=4
report_to: nosuch                                            | want one of
report_to: swanlab                                           | not installed
""".strip().splitlines()


INT8 = "param_dtype: int8, max_grad_norm: none, optimizer_in_backward: true, head_in_blocks: true"


def as_yaml(text: str) -> str:
    return text.replace("INT8", INT8).replace(", ", "\n")


@pytest.mark.parametrize("line", COMBINATIONS)
def test_combinations(place, line):
    text, words = (part.strip() for part in line.split("|"))
    found = problems(place, as_yaml(text))
    assert len(found) == 1, found
    assert all(word in found[0] for word in words.split(", ")), found
    assert any(mark in found[0] for mark in REMEDIES), f"no remedy: {found}"


def test_every_rule_has_a_line(place):
    """Break a rule, and this names it."""
    hit = set()
    for line in COMBINATIONS:
        said = problems(place, as_yaml(line.split("|")[0].strip()))
        for number, rule in enumerate(RULES):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("memtrain.rules.RULES", [rule])
                if problems(place, as_yaml(line.split("|")[0].strip())) == said:
                    hit.add(number)
    assert hit == set(range(len(RULES))), sorted(set(range(len(RULES))) - hit)


@pytest.mark.parametrize("line", AT_THE_START)
def test_at_the_start(place, line, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    text, words = (part.strip() for part in line.split("|"))
    text, _, processes = text.partition(" @ ")
    found = problems(place, as_yaml(text), int(processes or 1))
    assert len(found) == len(words.split(", ")) if "fp16, " in words else found, found
    assert all(word in " ".join(found) for word in words.split(", ")), found
    for problem in found:
        assert any(mark in problem for mark in (*REMEDIES, "want")), f"no remedy: {found}"


def test_with_shards(place, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "save_async=false" in problems(place, "save_async: true")[0]
    text = "head_in_blocks: true\noptimizer_in_backward: true\nmax_grad_norm: none\ntie_word_embeddings: false"
    assert "each holds a part of the rows" in problems(place, text, processes=2)[0]


def test_there_are_many_rules():
    assert len(ONE_OPTION) + len(COMBINATIONS) + len(AT_THE_START) > 150


def test_good_options_have_no_problems(place):
    assert problems(place, "") == []
    assert problems(place, "epochs: 2\nkeep_best: true\nsave_every: 4\neval_every: 2") == []
    assert problems(place, "lr_schedule: wsd\nwarmup_steps: 5\ndecay_steps: 15") == []


# ---- how YAML and sizes are read -------------------------------------------------------------------------------------

@pytest.mark.parametrize(("text", "name", "value"), [
    ("learning_rate: 1e-4", "learning_rate", 1e-4), ("learning_rate: 1.e-4", "learning_rate", 1e-4),
    ("learning_rate: '1e-4'", "learning_rate", 1e-4), ("max_steps: 1e3", "max_steps", 1000),
    ("max_steps: 10.0", "max_steps", 10), ("max_steps: 0256", "max_steps", 256), ("max_steps: 1_000", "max_steps", 1000),
    ("compile: yes", "compile", True), ("compile: on", "compile", True), ("compile: Off", "compile", False),
    ("compile: 'no'", "compile", False), ("mixed_precision: no", "mixed_precision", "no"),
    ("mixed_precision: ~", "mixed_precision", None), ("eval_every:", "eval_every", None),
    ("max_grad_norm: null", "max_grad_norm", None), ("max_grad_norm: none", "max_grad_norm", None),
    ("tokenizer: 'null'", "tokenizer", None), ("text_column: on", "text_column", "on"),
    ("text_column: 2024-01-01", "text_column", "2024-01-01"), ("dataset_split: 007", "dataset_split", "007"),
    ("dataset: a.txt", "dataset", ["a.txt"]), ("dataset: [a.txt, 7]", "dataset", ["a.txt", "7"]),
    ("dataset:\n- a.txt\n- b.txt", "dataset", ["a.txt", "b.txt"]), ("allow: [rounding]", "allow", ["rounding"]),
    ("memory_budget: 12 GiB", "memory_budget", "12 GiB"), ("gradient_checkpointing: none", "gradient_checkpointing", "none"),
])
def test_yaml_is_read_as_the_text_that_stands_there(tmp_path, text, name, value):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text if name == "max_steps" else f"{text}\nmax_steps: 9\n")
    found = getattr(load_config([str(recipe)]), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(("text", "words"), [
    ("seed: 1\nmax_steps: 5\nseed: 2", ["seed stands in lines 1 and 3", "once"]),
    ("max_steps: 5\n\tseed: 1", ["line 2", "spaces instead of tabs"]),
    ("\tmax_steps: 5", ["line 1", "spaces instead of tabs"]),
    ("max_steps: [5", ["cannot be read", "line 1"]),
    ("max_steps = 5", ["want lines of `option: value`", "found str"]),
    ("- max_steps: 5", ["found list"]),
    ("max_steps: 5\n---\nseed: 1", ["cannot be read"]),
    ("a: &a [*a]\n" + "[" * 5000, ["cannot be read"]),
    ("max_steps: !!python/object/apply:os.getcwd []", ["max_steps=[]", "integer"]),
    ("1: 2", ["1: no such option"]),
    ("[a]: 2", ["[", ";"]),
    ("? {a: b}\n: 2", ["cannot be read"]),
])
def test_yaml_that_cannot_be_meant(tmp_path, text, words):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_config([str(recipe)])
    assert all(word in str(caught.value) for word in words), caught.value


def test_no_code_runs_from_yaml(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: !!python/object/apply:os.mkdir ['{tmp_path}/made']\nmax_steps: 1\n")
    assert read_recipe(str(recipe))["model"] == [f"{tmp_path}/made"]
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("text", "size"), [
    ("12GB", 12_000_000_000), ("12 GB", 12_000_000_000), ("12GiB", 12 * 2**30), ("12 GiB", 12 * 2**30), ("12gib", 12 * 2**30),
    ("0.5gb", 500_000_000), ("1.5 MiB", 1572864), ("800MB", 800_000_000), ("1TB", 10**12), ("64 kib", 65536), (" 7B ", 7),
])
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["12", "GB", "12G", "-1GB", "0GB", "0.1B", "nanGB", "1e3MB", "12,5GB", "12 G B", ""])
def test_sizes_that_are_none(text):
    with pytest.raises(BadInput, match=r"with its unit"):
        parse_bytes(text)
