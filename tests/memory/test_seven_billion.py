"""The recipe for 7B as it stands, in a real process: every weight updated, twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

# beside the tensors: Python and torch
SIZES = [("7b", 1, 7.5e9), ("7b", 16, 9.0e9), ("8b", 1, 9.5e9)]


@pytest.mark.seven_billion
@pytest.mark.parametrize(("model", "rows", "bound"), SIZES)
def test_two_updates(model, rows, bound):
    from memtrain.config import load_config
    from memtrain.memory.device import process_bytes, real_run_result, smallest_run, start_real_run
    from memtrain.memory.estimate import predict
    from memtrain.model.presets import model_config

    config = replace(load_config(["llama_7b_8gb"]), model=model, global_batch_size=rows, vocab_size=None)
    shape = model_config(config)
    assert shape.parameter_count > 6.7e9
    found = real_run_result(start_real_run(config), timeout_seconds=7200)
    tensors = predict(config, shape).peak_bytes
    process = process_bytes(start_real_run(smallest_run(config)), tensors)
    print(f"{model}, {rows} x 256: process {found['process_bytes'] / 1e9:.3f} GB (predicted {process / 1e9:.3f}), tensors "
          f"{found['tensor_bytes'] / 1e9:.3f} GB (predicted {tensors / 1e9:.3f})")
    assert abs(found["tensor_bytes"] - tensors) < 0.01 * tensors
    assert abs(found["process_bytes"] - process) < 0.01 * process
    assert found["process_bytes"] < bound, found


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rows", "bound"), SIZES)
def test_prediction(model, rows, bound):
    """The recipe's tensors leave Python and torch 0.36 GB, and are played in seconds."""
    from memtrain.config import load_config
    from memtrain.memory.estimate import play
    from memtrain.model.presets import model_config

    config = replace(load_config(["llama_7b_8gb"]), model=model, global_batch_size=rows, vocab_size=None)
    shape = model_config(config)
    peak = max(snapshot.peak_bytes for snapshot in play(config, shape, whole=False).ledger.snapshots().values())
    assert shape.parameter_count < peak < bound - 0.36e9
