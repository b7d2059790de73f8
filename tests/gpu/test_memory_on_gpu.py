"""Predictions against a real GPU's allocator. Skipped without one: nothing in here has been run on a GPU yet."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RUNS = [{}, {"mixed_precision": "bf16", "gradient_checkpointing": "full", "micro_batch_size": 2},
        {"param_dtype": "bfloat16", "optimizer": "adamw_8bit", "optimizer_in_backward": "true", "max_grad_norm": "none"},
        {"mixed_precision": "bf16", "offload_activations": "true"}]


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_prediction_against_the_cuda_allocator(options):
    from memtrain.config import make_config
    from memtrain.data.order import Update
    from memtrain.memory.estimate import in_child, predict
    from memtrain.model.presets import model_config
    from memtrain.training.step import build, make_accelerator, micro_batch_size, train_step

    config = make_config({"model": "160m", "seq_len": 512, "global_batch_size": 4, "max_steps": 10}, options)
    shape = model_config(config)
    predicted = in_child(predict, config, shape)
    rows = micro_batch_size(config, 1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    state = build(config, shape, make_accelerator(config), 10)
    ids = torch.randint(0, shape.vocab_size, (rows, config.seq_len))
    batches = [{"input_ids": ids, "targets": ids.clone()} for _ in range(config.global_batch_size // rows)]
    for _ in range(2):
        train_step(state, Update(batches, 4 * config.seq_len, 4, 4))
    measured = torch.cuda.max_memory_allocated() - before
    peak = max(predicted.phases[phase] for phase in ("init", "forward", "backward", "optimizer"))
    assert abs(peak - measured) <= 0.01 * measured, (peak, measured, predicted.operation)
    reserved = torch.cuda.max_memory_reserved()
    assert abs(peak + predicted.apart["allocator"] - reserved) <= 0.1 * reserved, (predicted.apart, reserved)
