"""Options: the same names and types in YAML and on the command line, and every problem reported, together and once."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
import yaml

from memtrain.command import BadInput
from memtrain.config import (
    RECIPES,
    changed_options,
    help_text,
    load_config,
    make_config,
    parse_value,
    read_recipe,
    save_config,
)
from memtrain.options import EVALUATION_OPTIONS, RunConfig

NAMES = [f.name for f in fields(RunConfig)]


def problems_of(*arguments):
    with pytest.raises(BadInput) as caught:
        load_config(arguments)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(("name", "text", "value"), [
    ("max_steps", "12", 12), ("max_steps", 12, 12), ("max_steps", 12.0, 12), ("max_steps", "none", None),
    ("micro_batch_size", "auto", "auto"), ("micro_batch_size", "4", 4), ("checkpointed_layers", "all", "all"),
    ("learning_rate", "1e-3", 1e-3), ("learning_rate", "2", 2.0), ("max_grad_norm", "none", None),
    ("compile", "TRUE", True), ("compile", False, False), ("tie_word_embeddings", "null", None),
    ("mixed_precision", False, "no"), ("mixed_precision", "bf16", "bf16"), ("gradient_checkpointing", "none", "none"),
    ("resume", "none", "none"), ("dataset", "a.txt", ["a.txt"]), ("dataset", ["a", "b"], ["a", "b"]),
    ("model", 7, "7"), ("adam_eps", "1e-8", 1e-8), ("seed", 2**32 - 1, 2**32 - 1),
])
def test_values(name, text, value):
    found = parse_value(name, text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(("name", "value"), [
    ("max_steps", "0"), ("max_steps", "1.5"), ("max_steps", "many"), ("max_steps", True), ("max_steps", [3]),
    ("learning_rate", "nan"), ("learning_rate", "inf"), ("learning_rate", "-1"), ("eval_fraction", "1"),
    ("attention_dropout", "1.0"), ("micro_batch_size", "Auto!"), ("micro_batch_size", "0"),
    ("micro_batch_size", "none"), ("compile", "yes please"), ("compile", "1"), ("packing", "pakced"), ("dataset", []),
    ("dataset", [1]), ("dataset", ""), ("seed", "-1"), ("seed", str(2**32)), ("optimizer", "sgd"), ("output_dir", ""),
    ("model", None), ("adam_beta2", "1"), ("seq_len", {"a": 1}), ("param_dtype", "no"),
])
def test_values_that_are_refused(name, value):
    with pytest.raises(BadInput) as caught:
        parse_value(name, value)
    message = str(caught.value)
    assert message.startswith(f"{name}=") and "want" in message and "\n" not in message


def test_the_nearest_word_is_offered():
    with pytest.raises(BadInput, match="did you mean packed"):
        parse_value("packing", "pakced")


def test_defaults_pass_their_own_checks():
    for name, value in asdict(RunConfig()).items():
        assert parse_value(name, value) == value, name


def test_command_line_wins_over_the_recipe(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("max_steps: 5\nlearning_rate: 1e-4\nmixed_precision: no\ndataset: a.txt\n")
    config = load_config([str(recipe), "--learning_rate", "0.5", "--dataset", "b.txt", "c.txt", "--compile"])
    assert (config.max_steps, config.learning_rate, config.dataset, config.compile, config.mixed_precision) == (
        5, 0.5, ["b.txt", "c.txt"], True, "no")


@pytest.mark.parametrize(("arguments", "steps", "epochs"), [
    ((), 400, None), (("--epochs", "2"), None, 2), (("--max_steps", "3"), 3, None), (("--epochs", "none"), 400, None),
])
def test_epochs_and_max_steps_replace_each_other(arguments, steps, epochs):
    config = load_config(arguments)
    assert (config.max_steps, config.epochs) == (steps, epochs)


def test_recipes_are_whole_runs():
    recipes = sorted(RECIPES.glob("*.yaml"))
    assert RECIPES / "tiny.yaml" in recipes
    for path in recipes:
        assert load_config([path.stem]) == load_config([str(path)])
        assert path.read_text().startswith("# accelerate launch"), f"{path}: the first line is its command"


@pytest.mark.parametrize(("arguments", "words"), [
    (["--learning_rat", "1"], ["--learning_rat", "did you mean --learning_rate"]),
    (["--zzzzzz", "1"], ["--zzzzzz", "--help"]),
    (["--max_steps"], ["--max_steps", "no value"]),
    (["--seed", "1", "--seed", "2"], ["--seed", "twice"]),
    (["--max_steps", "-4"], ["max_steps=-4", "integer >= 1"]),
    (["--max_steps", "4", "--epochs", "2"], ["both", "exactly one"]),
    (["--max_steps", "5", "--warmup_steps", "6"], ["warmup_steps=6", "max_steps=5", "lower"]),
    (["--packing", "padded", "--document_mask"], ["document_mask", "packing=padded"]),
    (["--param_dtype", "bfloat16", "--mixed_precision", "bf16"], ["param_dtype=bfloat16", "mixed_precision=bf16"]),
    (["--max_grad_norm", "0"], ["max_grad_norm=0", "none for no clipping"]),
    (["--learning_rate", "0"], ["learning_rate=0", "above 0"]),
    (["--streaming", "--epochs", "1", "--tokenizer", "gpt2"], ["epochs=1", "streaming=true", "max_steps"]),
    (["--streaming"], ["streaming=true", "tokenizer"]),
    (["nosuch.yaml"], ["nosuch.yaml", "no such file", "tiny"]),
    (["tiny", "more"], ["more", "at most one recipe"]),
])
def test_one_problem_is_one_line(arguments, words):
    problems = problems_of(*arguments)
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems


def test_all_problems_come_together(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("max_step: 5\nmax_steps: 7\nlr_schedule: cosinus\n")
    problems = problems_of(str(recipe), "--seq_len", "0", "--optimiser", "adamw", "--warmup_steps", "9")
    assert len(problems) == 5, problems
    for word in ("max_step:", "lr_schedule=cosinus", "seq_len=0", "--optimiser", "warmup_steps=9"):
        assert any(word in line for line in problems), (word, problems)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "", "max_steps: [1", "\x00"])
def test_recipes_that_are_none(tmp_path, text):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    problems = problems_of(str(recipe))
    assert len(problems) == 1 and str(recipe) in problems[0]


def test_recipe_that_is_not_utf8(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_bytes(b"model: \xff\xfe\n")
    assert "cannot be read" in problems_of(str(recipe))[0]
    assert "cannot be read" in problems_of(str(tmp_path))[0]


def test_the_resolved_config_is_the_same_run(tmp_path):
    config = load_config(["--learning_rate", "3e-7", "--dataset", "a.txt", "b.txt", "--mixed_precision", "no",
                          "--epochs", "2", "--max_grad_norm", "none", "--micro_batch_size", "4"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config([str(tmp_path / "config.yaml")]) == config
    assert changed_options(read_recipe(str(tmp_path / "config.yaml")), config) == []
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_changed_options_are_those_that_make_another_run():
    before = asdict(make_config({"max_steps": 5}))
    how = {"max_steps": 6, "micro_batch_size": 2, "num_workers": 1, "output_dir": "b", "save_every": 3, "keep_last": 5,
           "log_every": 2, "eval_every": 2, "learning_rate": 0.1,
           "gradient_checkpointing": "full", "compile": True, "cache_dir": "c"}
    assert changed_options(before, make_config(how)) == []
    what = {"seed": 1, "dataset": ["x"], "model": "small", "seq_len": 8, "weight_decay": 0.0,
            "global_batch_size": 4, "mixed_precision": "bf16", "packing": "padded", "eval_fraction": 0.5}
    assert set(changed_options(before, make_config({"max_steps": 5}, what))) == set(what)


def test_help_names_every_option_once_with_its_default():
    text = help_text("usage")
    for name in NAMES:
        lines = [line for line in text.splitlines() if line.startswith(f"  --{name} ")]
        assert len(lines) == 1 and "default" in lines[0], name


def test_evaluation_options_are_options():
    assert set(EVALUATION_OPTIONS) <= set(NAMES)


def test_yaml_and_command_line_agree_on_every_option():
    for name, value in asdict(RunConfig()).items():
        if value is None:
            continue
        from_yaml = parse_value(name, yaml.safe_load(yaml.safe_dump({name: value}))[name])
        text = value if isinstance(value, list) else str(value)
        assert from_yaml == parse_value(name, text) == value, name
