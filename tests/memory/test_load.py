"""A run that goes on: what loading takes, and that it does not set the peak (G4)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs import reset_accelerate
from real_runs import Steps, allocator_peaks, tiny_config

from memtrain.command import BadInput

IN_BACKWARD = {"optimizer_in_backward": "true", "max_grad_norm": "none", "gradient_checkpointing": "full", "seq_len": 8}
PURE = {"param_dtype": "bfloat16"}
RUNS = [{}, pytest.param({**PURE, "optimizer": "adamw"}, marks=pytest.mark.slow),
        pytest.param({**PURE, **IN_BACKWARD, "optimizer": "adamw_8bit"}, marks=pytest.mark.slow),
        {**PURE, **IN_BACKWARD, "optimizer": "adafactor"}]


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_a_run_that_goes_on_takes_no_more(options, tmp_path: Path):
    from memtrain.memory.estimate import predict
    from memtrain.model.presets import model_config

    config = tiny_config(vocab_size=16384, **options)
    predicted = predict(config, model_config(config))
    steps = Steps(config, tmp_path)
    fresh = allocator_peaks(steps.run)
    weights = {name: value.clone() for name, value in steps.state.model.state_dict().items()}
    del steps.state
    reset_accelerate()
    resumed = allocator_peaks(steps.resume)
    assert abs(predicted.phases["load"] - resumed["load"]) <= 0.001 * resumed["load"], (predicted.phases, resumed)
    assert max(resumed.values()) <= 1.05 * fresh["train"], (resumed, fresh)
    assert resumed["load"] < fresh["train"], "loading does not set the peak"
    assert any(not torch.equal(weights[name], value) for name, value in steps.state.model.state_dict().items())


def test_weights_are_read_as_safetensors_reads_them(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    from memtrain.training.load import read_weights

    draw = torch.Generator().manual_seed(0)
    wide = torch.nn.Linear(5, 3)
    mixed = torch.nn.Sequential(wide, torch.nn.Linear(3, 7, bias=False).to(torch.bfloat16), torch.nn.Embedding(4, 2).half())
    values = {name: torch.randn(value.shape, generator=draw).to(value.dtype) for name, value in mixed.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read_weights(mixed, tmp_path / "model.safetensors")
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(value, mixed.state_dict()[name]), name


def test_weights_of_another_model_are_refused(tmp_path: Path):
    from safetensors.torch import save_file

    from memtrain.training.load import read_weights

    path = tmp_path / "model.safetensors"
    model = torch.nn.Linear(5, 3)
    save_file({"weight": torch.zeros(3, 5)}, path)
    with pytest.raises(BadInput, match="are not those of the model"):
        read_weights(model, path)
    save_file(model.state_dict(), path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadInput, match="ends within"):
        read_weights(model, path)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert set(json.loads(path.read_bytes()[8:8 + header])) == {"weight", "bias"}
