"""Updates within the backward: the same weights bit for bit, no gradient that stays, and what it does not go with."""

from __future__ import annotations

import copy

import pytest
import torch

from memtrain.command import BadInput
from memtrain.config import make_config
from memtrain.optim.factory import OPTIMIZERS, make_optimizer, update_in_backward
from memtrain.options import RunConfig
from memtrain.rules import config_problems
from memtrain.training.check import check_run, in_backward_problems

KINDS = ["none", "selective", "selective_deep", "full"]


def batch(step, n=2, s=16):
    input_ids = torch.randint(0, 97, (n, s), generator=torch.Generator().manual_seed(step))
    return input_ids, input_ids.roll(-1, 1)


def train(model, in_backward, steps=4, autocast=False, **options):
    """Weights after some steps with a schedule; (model, optimizer)."""
    config = RunConfig(max_steps=steps, learning_rate=0.01, max_grad_norm=None, **options)
    optimizer = make_optimizer(model, config)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    if in_backward:
        update_in_backward(optimizer)
    for step in range(steps):
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(*batch(step)) / 32
        loss.backward()
        if in_backward:
            assert all(parameter.grad is None for parameter in model.parameters()), "a gradient stayed"
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, optimizer


def assert_same_training(model, steps=4, **options):
    start = copy.deepcopy(model)
    (plain, one), (other, two) = train(copy.deepcopy(model), False, steps, **options), train(model, True, steps, **options)
    for (name, weight), found, first in zip(plain.named_parameters(), other.parameters(), start.parameters(), strict=True):
        assert torch.equal(weight, found), f"{name} differs with the update in the backward"
        assert not torch.equal(weight, first), f"{name} did not move"
    for weight, found in zip(plain.parameters(), other.parameters(), strict=True):
        assert one.state[weight].keys() == two.state[found].keys()
        for name, value in one.state[weight].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(two.state[found][name])), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_equal_bit_for_bit(make_model, optimizer, dtype, tied):
    model = make_model(tie_word_embeddings=tied).to(getattr(torch, dtype))
    assert_same_training(model, optimizer=optimizer, param_dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_with_checkpointing(make_model, kind, autocast):
    """The layers are recomputed while weights are being updated: never with a weight that already moved."""
    model = make_model(num_hidden_layers=3, attention_dropout=0.1, tie_word_embeddings=True, attention_bias=True)
    model.set_gradient_checkpointing(kind, 2)
    # the gradient of a key's bias is 0 but for rounding: Adam would turn its sign into a whole step
    assert_same_training(model, optimizer="adamw", autocast=autocast)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_frozen_parameters(make_model, optimizer):
    model = make_model()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = model.model.embed_tokens.weight.clone()
    train(model, True, optimizer=optimizer)
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_each_parameter_is_updated_once_per_step(make_model):
    model, optimizer = train(make_model(tie_word_embeddings=True), True, 3, optimizer="adamw_8bit")
    assert {state["step"] for state in optimizer.state.values()} == {3}
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_gradients_are_freed_during_the_backward(make_model, optimizer, peak_bytes):
    """The peak of a step falls by nearly all gradients: the largest ones alive at a time stay."""
    shape = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "num_hidden_layers": 12}
    peaks = {}
    for in_backward in (False, True):
        model = make_model(**shape)
        optimizer_of = make_optimizer(model, RunConfig(max_steps=1, optimizer=optimizer, max_grad_norm=None))
        if in_backward:
            update_in_backward(optimizer_of)

        def step(model=model, optimizer=optimizer_of):
            model(*batch(0, n=1, s=2)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # state exists
        peaks[in_backward] = peak_bytes(step)
    gradients = sum(weight.nbytes for weight in model.parameters())
    assert peaks[False] > gradients
    assert peaks[True] < peaks[False] - 0.7 * gradients, (peaks, gradients)


# ---- refusals ----------------------------------------------------------------------------------------------------------

OPTIONS = {"max_steps": 1, "optimizer_in_backward": True, "max_grad_norm": None}


@pytest.mark.parametrize(("changes", "processes", "parts"), [
    ({"micro_batch_size": 2}, 1, ("one micro-batch per update, got 4", "set micro_batch_size=8")),
    ({"mixed_precision": "fp16"}, 1, ("mixed_precision=fp16", "set mixed_precision=bf16")),
    ({}, 2, ("on 2 processes", "start one process")),
])
def test_refusals(tmp_path, changes, processes, parts, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    config = RunConfig(**OPTIONS, output_dir=str(tmp_path / "run"), **changes)
    with pytest.raises(BadInput) as caught:
        check_run(config, processes)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("optimizer_in_backward")]
    assert len(lines) == 1
    for part in (*parts, "optimizer_in_backward=false"):
        assert part in lines[0]


def test_clipping_is_refused():
    problems = config_problems(RunConfig(max_steps=1, optimizer_in_backward=True, max_grad_norm=1.0))
    assert len(problems) == 1
    for part in ("optimizer_in_backward=true with max_grad_norm=1", "max_grad_norm=none", "optimizer_in_backward=false"):
        assert part in problems[0]
    with pytest.raises(BadInput, match="max_grad_norm"):  # the default clips
        make_config({"max_steps": 1, "optimizer_in_backward": True})


def test_fp16_of_the_launch_config_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert any("fp16" in line for line in in_backward_problems(RunConfig(**OPTIONS), 1))


@pytest.mark.parametrize("changes", [{}, {"micro_batch_size": 8}, {"mixed_precision": "bf16"}, {"param_dtype": "bfloat16"}])
def test_what_goes_together_is_not_refused(tmp_path, changes, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    check_run(make_config({**OPTIONS, "output_dir": str(tmp_path / "run"), **changes}), 1)


def test_the_remedies_work(tmp_path):
    """What the lines say to set, is accepted."""
    for changes in ({"micro_batch_size": 8}, {"micro_batch_size": 2, "optimizer_in_backward": False}):
        check_run(make_config({**OPTIONS, "output_dir": str(tmp_path / "run"), **changes}), 1)
