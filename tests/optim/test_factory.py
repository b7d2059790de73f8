"""Parameter groups, and AdamW against its published steps in float64."""

from __future__ import annotations

import copy

import pytest
import torch

from memtrain.model.llama import LlamaForCausalLM
from memtrain.model.presets import LlamaConfig
from memtrain.optim.factory import OPTIMIZERS, make_optimizer, parameter_groups
from memtrain.options import RunConfig

SHAPE = LlamaConfig(97, 32, 64, 2, 4, 2, 8, attention_bias=True)


def groups_by_name(model, weight_decay=0.1):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["weight_decay"]: {names[id(parameter)] for parameter in group["params"]}
            for group in parameter_groups(model, weight_decay)}


def test_norms_and_biases_do_not_decay():
    model = LlamaForCausalLM(SHAPE)
    groups = groups_by_name(model)
    plain = {name for name, _ in model.named_parameters() if "norm" in name or name.endswith("bias")}
    assert len(plain) == 5 + 8
    assert groups[0.0] == plain
    assert groups[0.1] == {name for name, _ in model.named_parameters()} - plain


def test_frozen_parameters_are_left_out_and_tied_ones_come_once():
    tied = LlamaForCausalLM(LlamaConfig(97, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True))
    listed = [parameter for group in parameter_groups(tied, 0.1) for parameter in group["params"]]
    assert len(listed) == len({id(parameter) for parameter in listed}) == len(list(tied.parameters()))
    tied.model.embed_tokens.weight.requires_grad_(False)
    assert not any(parameter is tied.model.embed_tokens.weight for group in parameter_groups(tied, 0.1)
                   for parameter in group["params"])
    assert [group["weight_decay"] for group in parameter_groups(torch.nn.Linear(3, 3, bias=False), 0.1)] == [0.1]


def test_options_reach_the_optimizer():
    config = RunConfig(max_steps=1, learning_rate=3e-4, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6, weight_decay=0.2)
    optimizer = make_optimizer(LlamaForCausalLM(SHAPE), config)
    assert isinstance(optimizer, torch.optim.AdamW)
    for group, decay in zip(optimizer.param_groups, (0.2, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-4, (0.8, 0.9), 1e-6, decay)


@pytest.mark.parametrize("tied", [False, True])
def test_factored_adamw_sets_the_head_apart(tied):
    model = LlamaForCausalLM(LlamaConfig(97, 32, 64, 2, 4, 2, 8, tie_word_embeddings=tied))
    optimizer = make_optimizer(model, RunConfig(max_steps=1, optimizer="adamw_factored", learning_rate=1e-3))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len({id(parameter) for parameter in held}) == len(list(model.parameters()))
    (head,) = [group for group in optimizer.param_groups if group.get("first_moment")]
    assert head["params"] == [model.head_weight] and head["lr"] == 4e-3 and head["weight_decay"] == 0.1
    assert {group["lr"] for group in optimizer.param_groups if group is not head} == {1e-3}
    (loss := model(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.int64))).backward()
    optimizer.step()
    assert loss.isfinite() and [p for p in held if "exp_avg_scale" in optimizer.state[p]] == [model.head_weight]
    plain = make_optimizer(model, RunConfig(max_steps=1, optimizer="adamw_factored", adam_beta1=0.0))
    assert not any(group["first_moment"] for group in plain.param_groups if "first_moment" in group)


def test_every_name_of_the_options_is_built():
    from dataclasses import fields

    choices = next(f.metadata["choices"] for f in fields(RunConfig) if f.name == "optimizer")
    assert set(choices) == set(OPTIMIZERS)


def test_adamw_against_float64():
    """arXiv 1711.05101, algorithm 2, with the decay scaled by the learning rate."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7))
    config = RunConfig(max_steps=1, learning_rate=0.01, weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3)
    optimizer = make_optimizer(model, config)
    reference = copy.deepcopy(model).double()
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in reference.parameters()]
    for step in range(1, 11):
        for p, q, (first, second) in zip(model.parameters(), reference.parameters(), moments, strict=True):
            gradient = torch.randn_like(p)
            p.grad = gradient
            g = gradient.double()
            with torch.no_grad():
                first.mul_(0.8).add_(0.2 * g)
                second.mul_(0.9).add_(0.1 * g * g)
                q.mul_(1 - 0.01 * (0.3 if q.dim() > 1 else 0.0))
                q.sub_(0.01 * (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-3))
        optimizer.step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.tolist() == pytest.approx(q.float().tolist(), rel=1e-5, abs=1e-6) if p.dim() == 1 else torch.allclose(
            p.double(), q, rtol=1e-5, atol=1e-6), name
