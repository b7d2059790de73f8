"""The prediction against the allocator's own events of real runs."""

from __future__ import annotations

import pytest
from memory_grid import GRID
from real_runs import tiny_config

TRAINING = ("init", "forward", "backward", "optimizer")

EVERY = [options if index % 4 == 0 else pytest.param(options, marks=pytest.mark.slow) for index, options in enumerate(GRID)]


@pytest.mark.parametrize("options", EVERY, ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()) or "plain")
def test_prediction_is_what_the_allocator_gives_out(options, measured):
    from memtrain.memory.estimate import predict
    from memtrain.model.presets import model_config

    config = tiny_config(**options)
    found = predict(config, model_config(config))
    real = measured(config)
    predicted = {"train": max(found.phases[name] for name in TRAINING),
                 "evaluate": found.phases["evaluate"], "save": found.phases["save"]}
    for name, peak in real.items():
        assert abs(predicted[name] - peak) <= 0.001 * peak, (name, predicted[name], peak, found.operation)
    assert found.peak_bytes == max(found.phases.values()) and sum(found.parts.values()) == found.peak_bytes


def test_evaluation_takes_the_same_for_any_number_of_rows(measured):
    """G3: 10 rows and 1000 rows with a vocabulary of 32000."""
    import torch

    from memtrain.memory.estimate import predict
    from memtrain.memory.tracker import Tracker
    from memtrain.model.presets import model_config
    from memtrain.training.step import build, evaluate, make_accelerator

    config = tiny_config(vocab_size=32000, seq_len=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         micro_batch_size=5, global_batch_size=5)
    state = build(config, model_config(config), make_accelerator(config), 10)
    batch = {name: torch.zeros(5, 16, dtype=torch.int64) for name in ("input_ids", "targets")}
    peaks = []
    for rows in (10, 1000):
        tracker = Tracker("cpu")
        for tensor in batch.values():
            tracker.ignore(tensor)
        with tracker:
            tracker.attach(state)
            with tracker.phase("evaluate"):
                evaluate(state.model, state.accelerator, (batch for _ in range(rows // 5)))
            tracker.detach()
        peaks.append(tracker.ledger.snapshots()["evaluate"].peak_bytes)
    predicted = predict(config, model_config(config))
    optimizer = predicted.phase_parts["evaluate"]["optimizer"]  # the evaluation above has none yet
    assert peaks[0] == peaks[1] == predicted.phases["evaluate"] - optimizer, (peaks, predicted.phases)


def test_the_first_optimizer_step_is_in_the_peak():
    """G2: what fits without optimizer state does not count as fitting."""
    from memtrain.memory.estimate import predict
    from memtrain.model.presets import model_config

    config = tiny_config(gradient_checkpointing="full", seq_len=8)
    shape = model_config(config)
    found = predict(config, shape)
    assert found.peak_bytes > 16 * shape.parameter_count and found.parts["optimizer"] > 8 * shape.parameter_count
    for phase in ("forward", "backward", "optimizer", "evaluate", "save"):
        assert found.phase_parts[phase]["optimizer"] > 8 * shape.parameter_count, phase


def test_a_prediction_leaves_no_trace():
    import random

    import torch
    from accelerate.state import AcceleratorState, PartialState

    from memtrain.memory.estimate import predict
    from memtrain.model.presets import model_config
    from memtrain.optim import low_memory
    from memtrain.training.step import make_accelerator

    make_accelerator(tiny_config(mixed_precision="bf16"))
    states = torch.get_rng_state(), random.getstate(), dict(AcceleratorState._shared_state), dict(PartialState._shared_state)
    rules, to = dict(low_memory.RULES), torch.nn.Module.to
    config = tiny_config(optimizer="adamw_8bit", mixed_precision="no")
    first, second = (predict(config, model_config(config)) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert dict(AcceleratorState._shared_state) == states[2] and dict(PartialState._shared_state) == states[3]
    assert rules == low_memory.RULES and torch.nn.Module.to is to and "range" not in vars(low_memory)


@pytest.mark.parametrize("options", [pytest.param({"optimizer": "adamw_4bit"}, marks=pytest.mark.slow),
                                     {"optimizer": "adafactor", "loss_chunk_tokens": 16}], ids=str)
def test_shortened_plays_have_the_bytes_and_work_of_long_ones(options, monkeypatch):
    """Loops over slices and chunks are played at their ends: against playing every turn."""
    from memtrain.memory import estimate
    from memtrain.model.presets import model_config
    from memtrain.optim import rule

    config = tiny_config(param_dtype="bfloat16", tie_word_embeddings="false", **options)
    monkeypatch.setattr(rule, "SLICE", 2**15)
    short = estimate.predict(config, model_config(config))
    monkeypatch.setattr(estimate, "_ends", range)
    monkeypatch.setattr(estimate, "_once_for_each_shape", lambda tracker, rule: rule)
    long = estimate.predict(config, model_config(config))
    assert short.phases == pytest.approx(long.phases, rel=1e-3) and short.peak_bytes == pytest.approx(long.peak_bytes, rel=1e-4)
    assert short.work.flops == pytest.approx(long.work.flops, rel=1e-6)
    assert short.work.moved_bytes == pytest.approx(long.work.moved_bytes, rel=0.05)
