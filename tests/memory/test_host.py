"""Host memory around a device: what offloaded activations and loader workers take."""

from __future__ import annotations

import pytest
from real_runs import tiny_config

from memtrain.command import BadInput


@pytest.mark.parametrize(("kind", "layers"), [("full", 3), ("none", 4)])
def test_offloaded_bytes(kind, layers):
    """What all layers but the last two keep; with full checkpointing that is their input alone."""
    from memtrain.memory.host import offloaded_bytes
    from memtrain.model.presets import model_config

    config = tiny_config(num_hidden_layers=layers, gradient_checkpointing=kind, offload_activations="true")
    found = offloaded_bytes(config, model_config(config))
    inputs = 4 * 128 * 128 * 4  # rows, tokens, numbers, bytes each
    assert found == (layers - 2) * inputs if kind == "full" else found > 8 * (layers - 2) * inputs, found


def test_too_little_host_memory(monkeypatch):
    from memtrain.memory import host
    from memtrain.model.presets import model_config

    config = tiny_config(offload_activations="true", gradient_checkpointing="full")
    host.check_host_memory(config, model_config(config))  # on a CPU nothing moves
    monkeypatch.setattr(host, "device_type", lambda: "cuda")
    monkeypatch.setattr(host, "in_child", lambda function, *arguments: 10**9)
    monkeypatch.setattr(host, "free_host_bytes", lambda: 10**9 - 1)
    with pytest.raises(BadInput, match="1,000,000,000 bytes of host memory are wanted, and 999,999,999 are free; lower micro"):
        host.check_host_memory(config, model_config(config))


def test_needs_by_device():
    from memtrain.memory.estimate import predict
    from memtrain.memory.host import WORKER_BYTES, host_needs
    from memtrain.model.presets import model_config

    config = tiny_config(num_workers=3, keep_last=4, offload_activations="true", gradient_checkpointing="full")
    shape = model_config(config)
    found = predict(config, shape)
    on_cpu, on_gpu = (host_needs(found, config, shape, 1, device) for device in ("cpu", "cuda"))
    assert on_cpu["ram_workers"] == 3 * (WORKER_BYTES + 2 * 4 * 128 * 16) and on_cpu["ram_save"] == on_cpu["ram_offload"] == 0
    assert on_gpu["ram_save"] == on_gpu["disk_export"] == found.parts["parameters"]
    assert on_gpu["ram_offload"] == 4 * 128 * 128 * 4, "one layer's input: the last two stay"
    assert on_gpu["disk_run"] == 5 * on_gpu["disk_checkpoint"] + on_gpu["disk_export"]
