"""Plans under budgets: what is promised holds, a larger budget is never slower, and the table is in order."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from real_runs import Steps, allocator_peaks, predict_with_process_peak, tiny_config

from memtrain.config import make_config

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
        if id(row) not in measured:
            measured[id(row)] = max(allocator_peaks(Steps(row.config, tmp_path / str(len(measured))).run).values())
        assert measured[id(row)] <= budget, (row.changes, measured[id(row)], budget)
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
def test_eight_billion():
    """Far more than this machine has, played without allocating it. How long it takes is no test's business."""
    from memtrain.memory.estimate import in_child
    from memtrain.memory.planner import plan, planned

    config, shape = planned(make_config({"model": "8b", "seq_len": 4096, "global_batch_size": 8, "max_steps": 10,
                                         "mixed_precision": "bf16"}))
    one, process_peak = in_child(predict_with_process_peak, replace(config, micro_batch_size=1, global_batch_size=1), shape)
    assert one.parts["parameters"] == 4 * shape.parameter_count > 30 * process_peak, process_peak
    found = in_child(plan, config, shape, 160 * 10**9)
    assert len(found.rows) >= 200 and found.fits, len(found.rows)


@pytest.mark.slow
def test_maximize_the_articles_shape():
    from memtrain.memory.maximize import maximize
    from memtrain.memory.planner import planned

    config, shape = planned(make_config({"model": "small", "seq_len": 512, "max_steps": 10}))
    found = {most.recipe: int(most.value or 0) for most in maximize("micro_batch_size", config, shape, 12 * 10**9)}
    # the article's loop held 8 rows in fp32 and 16 in bf16
    assert found["fp32"] > 8 and found["bf16"] > 16 and found["fp32 + full checkpointing"] > found["fp32"], found
