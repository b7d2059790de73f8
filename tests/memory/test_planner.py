"""Plans under budgets: what is promised holds, a larger budget is never slower, and the table is in order."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_runs import Steps, allocator_peaks, tiny_config

from memtrain.config import make_config

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"micro_batch_size": "auto", "global_batch_size": 2, "num_hidden_layers": 4, "vocab_size": 1024,
                           "hidden_size": 64, "intermediate_size": 172}


@pytest.fixture(scope="module")
def planner() -> Any:
    from jobs import reset_accelerate

    from memtrain.memory.planner import Planner, planned
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        reset_accelerate()
        config, shape = planned(tiny_config(**OPTIONS))
        return Planner(config, shape)


def test_twenty_budgets(planner, tmp_path):
    """Between the smallest possible and the plain recipe's peak: measured peaks stay under, more bytes are never slower."""
    smallest = min(row.peak_bytes for row in planner.rows)
    plain = next(row for row in planner.rows if not row.changes)
    draw = random.Random(0)
    budgets = sorted(draw.randint(smallest, plain.peak_bytes) for _ in range(20))
    plans = [planner.choose(budget) for budget in budgets]
    chosen = [plan.chosen for plan in plans]
    times = [row.relative_time for row in chosen]
    assert all(plan.fits for plan in plans) and times == sorted(times, reverse=True), times
    assert len({id(row) for row in chosen}) >= 5, "the budgets ask for different recipes"
    assert planner.choose(plain.peak_bytes).chosen is plain or planner.rows[0].seconds < plain.seconds
    measured: dict[int, int] = {}
    for budget, row in zip(budgets, chosen, strict=True):
        if id(row) not in measured and len(measured) < 4:
            measured[id(row)] = max(allocator_peaks(Steps(row.config, tmp_path / str(len(measured))).run).values())
        assert measured.get(id(row), row.peak_bytes) <= budget, (row.changes, measured, budget)
        assert row.config.global_batch_size == 2 and row.accuracy == 0


def test_three_layers_say_what_all_layers_say(planner):
    """The peaks of the table against whole plays."""
    draw = random.Random(1)
    for index in draw.sample(range(len(planner.rows)), 3):
        row, whole = planner.rows[index], planner.whole(index)
        assert abs(row.peak_bytes - whole.peak_bytes) <= 0.001 * whole.peak_bytes, (row.changes, whole.operation)


def test_nothing_fits(planner):
    plan = planner.choose(10**6)
    assert not plan.fits and not any(row.fits for row in plan.rows)
    assert plan.lacking_bytes == plan.prediction.peak_bytes - 10**6
    assert plan.prediction.peak_bytes <= 1.001 * min(row.peak_bytes for row in plan.rows)


def test_what_changes_the_result_comes_last():
    from memtrain.memory.planner import accuracy_changes, candidates, planned

    config, shape = planned(tiny_config(**OPTIONS, mixed_precision="bf16"))
    config = replace(config, micro_batch_size=4, global_batch_size=4)
    plain = list(candidates(config, shape, (), 1, "cpu"))
    assert {accuracy for _, accuracy in plain} == {0}
    assert {(c.optimizer, c.param_dtype, c.mixed_precision, c.optimizer_in_backward) for c, _ in plain} == {
        ("adamw", "float32", "bf16", False)}, "with clipping there is no update in the backward"
    assert (config, 0) in plain and {c.micro_batch_size for c, _ in plain} == {4, 2, 1}
    allowed = accuracy_changes(config, ["rounding", "optimizer"])
    assert [level for level, _ in allowed] == sorted(level for level, _ in allowed) and len(allowed) == 8
    assert all(c.mixed_precision == "no" for _, c in allowed if c.param_dtype == "bfloat16")
    unclipped = [c for c, _ in candidates(replace(config, max_grad_norm=None), shape, (), 1, "cpu")]
    assert {c.micro_batch_size for c in unclipped if c.optimizer_in_backward} == {4}


def test_a_recipe_of_the_plan_is_a_run():
    """The command and the YAML of a plan are read again as the same options."""
    import shlex

    import yaml

    from memtrain.config import load_config
    from memtrain.memory.report import command, yaml_text

    config = tiny_config(**OPTIONS, max_grad_norm="none", optimizer_in_backward="true", gradient_checkpointing="full",
                         checkpointed_layers=2, allow="rounding,optimizer", tie_word_embeddings="false")
    words = shlex.split(command(config))[3:]
    assert make_config(yaml.safe_load(yaml_text(config))) == config
    again = load_config(words)
    differing = {name for name in vars(config) if getattr(again, name) != getattr(config, name)}
    assert not differing - {"eval_every", "save_every", "learning_rate"}, differing


def test_largest():
    from memtrain.memory.maximize import largest

    for slope, base, budget in ((7, 100, 1000), (1, 0, 12345), (1000, 5, 999), (3, 2, 2)):
        calls: list[int] = []

        def peak(count, slope=slope, base=base, calls=calls):
            calls.append(count)
            return base + slope * count + (slope if count > 40 else 0)

        most = max([0, *(count for count in range(1, 20000) if base + slope * count + (slope if count > 40 else 0) <= budget)])
        assert largest(peak, budget, 1 << 20) == most
        assert len(calls) < 25, calls
    assert largest(lambda count: 0, 10, 64) == 64


@pytest.mark.slow
def test_eight_billion(tmp_path):
    """Far more than this machine has, played without allocating it, by the command that also prints how long it takes."""
    from memtrain.model.presets import PRESETS

    # a command of its own: a child of pytest would import pytest
    subprocess.run([sys.executable, str(ROOT / "scripts" / "benchmark.py"), "plan", "--json", str(tmp_path / "plan.json")],
                   check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    one, many = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert one["peak_bytes"] > 16 * PRESETS["8b"].parameter_count > 200 * one["process_bytes"]
    assert one["process_bytes"] <= 500e6 and many["recipes"] >= 200, (one, many)


@pytest.mark.slow
def test_maximize_the_articles_shape():
    from memtrain.memory.maximize import maximize
    from memtrain.memory.planner import planned

    config, shape = planned(make_config({"model": "small", "seq_len": 512, "max_steps": 10}))
    found = {most.recipe: int(most.value or 0) for most in maximize("micro_batch_size", config, shape, 12 * 10**9,
                                                                    ["rounding", "optimizer"])}
    # the article's loop held 8 rows in fp32 and 16 in bf16
    assert found["fp32"] > 8 and found["bf16"] > 16 and found["fp32 + full checkpointing"] > found["fp32"], found
    assert found["the same, rows in groups, head in blocks"] >= 400, found


@pytest.mark.slow
@pytest.mark.parametrize("quantity", ["layers", "seq_len", "model"])
def test_maximize(quantity, monkeypatch):
    """What is found fits, and the next larger does not."""
    from memtrain.memory import maximize as module
    from memtrain.memory.estimate import predict
    from memtrain.memory.planner import planned
    from memtrain.model.presets import model_config

    monkeypatch.setattr(module, "recipes", lambda config, allow: [("as given", {})])
    config, shape = planned(make_config({"model": "tiny", "seq_len": 64, "global_batch_size": 1, "max_steps": 10})
                            if quantity == "model" else tiny_config(num_hidden_layers=2))
    budget = 2 * 10**9 if quantity == "model" else 60 * 10**6
    most, = module.maximize(quantity, config, shape, budget)
    assert 0.8 * budget < most.peak_bytes <= budget or quantity == "model"
    if quantity == "model":
        assert most.value == "tiny"
        return
    step = module.SEQ_LEN_MULTIPLE if quantity == "seq_len" else 1
    for value in (most.value, most.value + step):
        larger = replace(config, **{"seq_len": value} if quantity == "seq_len" else {"num_hidden_layers": value})
        assert (predict(larger, model_config(larger)).peak_bytes <= budget) == (value == most.value), (most.value, value)


def test_int8_is_planned_where_it_can_be():
    """Last of all, where both changes are allowed and nothing is clipped; three layers say what all say."""
    from memtrain.memory.estimate import predict
    from memtrain.memory.planner import Composer, candidates, planned

    free = {**OPTIONS, "tie_word_embeddings": "false", "max_grad_norm": "none"}
    config, shape = planned(tiny_config(**free))
    config = replace(config, micro_batch_size=2)
    found = list(candidates(config, shape, ("rounding", "optimizer"), 1, "cpu"))
    int8 = [(recipe, accuracy) for recipe, accuracy in found if recipe.param_dtype == "int8"]
    assert int8 and {accuracy for _, accuracy in int8} == {max(accuracy for _, accuracy in found)}
    assert all(recipe.optimizer_in_backward and recipe.head_in_blocks for recipe, _ in int8)
    assert {recipe.optimizer for recipe, _ in int8} == {"adamw_factored"}
    relative = candidates(replace(config, optimizer="adafactor"), shape, ("rounding", "optimizer"), 1, "cpu")
    assert {recipe.optimizer for recipe, _ in relative if recipe.param_dtype == "int8"} == {"adafactor"}, "whose rate it has"
    clipped = candidates(replace(config, max_grad_norm=1.0), shape, ("rounding", "optimizer"), 1, "cpu")
    assert not any(recipe.param_dtype == "int8" for recipe, _ in clipped)
    recipe = next(recipe for recipe, _ in int8 if recipe.gradient_checkpointing == "full")
    whole = predict(recipe, shape).peak_bytes
    assert abs(Composer(shape).compose(recipe).peak_bytes - whole) <= 0.001 * whole
