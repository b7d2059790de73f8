"""The recipe for 7B as it stands, in a real process: every weight updated, twice."""

from __future__ import annotations

import pytest

# (what goes over the recipe, vocabulary, bounds of the bytes of tensors, bound of those of the process)
SIZES = [([], 32000, (6.9e9, 7.05e9), 7.5e9), (["--global_batch_size", "16"], 32000, (8.5e9, 8.64e9), 9.0e9),
         (["--model", "8b", "--vocab_size", "128256"], 128256, (8.6e9, 8.8e9), 9.5e9)]


@pytest.mark.seven_billion
@pytest.mark.parametrize(("over", "vocab_size", "tensor_bounds", "bound"), SIZES)
def test_two_updates(over, vocab_size, tensor_bounds, bound):
    from memtrain.config import load_config
    from memtrain.memory.device import process_bytes, real_run_result, smallest_run, start_real_run
    from memtrain.memory.estimate import predict
    from memtrain.model.presets import model_config

    config = load_config(["llama_7b_8gb", *over])
    shape = model_config(config)
    assert shape.parameter_count > 6.7e9 and shape.vocab_size == vocab_size
    found = real_run_result(start_real_run(config), timeout_seconds=7200)
    tensors = predict(config, shape).peak_bytes
    process = process_bytes(start_real_run(smallest_run(config)), tensors)
    print(f"{config.model}, {config.global_batch_size} x 256: process {found['process_bytes'] / 1e9:.3f} GB (predicted "
          f"{process / 1e9:.3f}), tensors {found['tensor_bytes'] / 1e9:.3f} GB (predicted {tensors / 1e9:.3f})")
    assert abs(found["tensor_bytes"] - tensors) < 0.01 * tensors
    assert abs(found["process_bytes"] - process) < 0.01 * process
    assert found["process_bytes"] < bound, found


@pytest.mark.slow
@pytest.mark.parametrize(("over", "vocab_size", "tensor_bounds", "bound"), SIZES)
def test_prediction(over, vocab_size, tensor_bounds, bound):
    """The recipe's tensors leave Python and torch 0.36 GB, and are played in seconds."""
    from memtrain.config import load_config
    from memtrain.memory.estimate import play
    from memtrain.model.presets import model_config

    config = load_config(["llama_7b_8gb", *over])
    shape = model_config(config)
    peak = max(snapshot.peak_bytes for snapshot in play(config, shape, whole=False).ledger.snapshots().values())
    assert shape.vocab_size == vocab_size
    assert tensor_bounds[0] < peak < tensor_bounds[1] <= bound - 0.36e9
