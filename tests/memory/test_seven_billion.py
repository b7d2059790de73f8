"""The recipe for 7B as it stands, in a real process: every weight updated, twice."""

from __future__ import annotations

import pytest


@pytest.mark.seven_billion
def test_two_updates():
    from memtrain.config import load_config
    from memtrain.memory.device import real_run_result, start_real_run
    from memtrain.memory.estimate import predict
    from memtrain.model.presets import model_config

    config = load_config(["llama_7b_8gb"])
    shape = model_config(config)
    assert shape.parameter_count > 6.7e9 and shape.vocab_size == 32000
    found = real_run_result(start_real_run(config), timeout_seconds=3600)
    predicted = predict(config, shape).peak_bytes
    print(f"process {found['process_bytes'] / 1e9:.3f} GB, tensors {found['tensor_bytes'] / 1e9:.3f} GB, predicted "
          f"{predicted / 1e9:.3f} GB")
    assert abs(found["tensor_bytes"] - predicted) < 0.01 * predicted
    assert found["process_bytes"] < 7.5e9, found


@pytest.mark.slow
def test_prediction():
    """The recipe's tensors are below what a process of 7.5 GB leaves beside Python and torch, and are played in seconds."""
    from memtrain.config import load_config
    from memtrain.memory.estimate import play
    from memtrain.model.presets import model_config

    config = load_config(["llama_7b_8gb"])
    peak = max(snapshot.peak_bytes for snapshot in play(config, model_config(config), whole=False).ledger.snapshots().values())
    assert 6.9e9 < peak < 7.05e9
