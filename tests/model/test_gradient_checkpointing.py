"""Recomputing activations changes no bit of any gradient, and is really on where it was asked for."""

from __future__ import annotations

import copy

import pytest
import torch
from steps import batch, context, step

PRECISIONS = ["float32", "autocast", "bfloat16"]


def count_norms(model):
    """Calls of the first norm of every layer, kept up to date. The first: recomputing stops before the last ones."""
    calls = [0] * len(model.model.layers)

    def count(index):
        def hook(*_):
            calls[index] += 1
        return hook

    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_pre_hook(count(index))
    return calls


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("layers", ["all", 1])
def test_gradients_are_equal_bit_for_bit(make_model, precision, dropout, layers):
    """Case C1: the recomputed layer draws the same dropout."""
    plain = make_model(attention_dropout=dropout)
    if precision == "bfloat16":
        plain = plain.to(torch.bfloat16)
    recomputed = copy.deepcopy(plain)
    recomputed.set_gradient_checkpointing("full", layers)
    loss, wanted = step(plain, precision, True)
    other_loss, found = step(recomputed, precision, True)
    assert torch.equal(loss, other_loss)
    for name, grad in wanted.items():
        assert torch.equal(grad, found[name]), f"{name} differs with checkpointing"


@pytest.mark.parametrize("kwargs", [{"document_lengths": [30, 34, 64]},
                                    {"attention_mask": torch.arange(128).view(2, 64) > 20}], ids=["documents", "mask"])
def test_equal_with_documents_and_masks(make_model, kwargs):
    plain, recomputed = make_model(attention_dropout=0.1), make_model(attention_dropout=0.1)
    recomputed.set_gradient_checkpointing("full")
    wanted, found = step(plain, **kwargs)[1], step(recomputed, **kwargs)[1]
    assert all(torch.equal(grad, found[name]) for name, grad in wanted.items())


def test_dropout_is_really_on(make_model):
    """Else the equality above would prove nothing."""
    none, some = make_model(attention_dropout=0.0), make_model(attention_dropout=0.1)
    assert not torch.equal(step(none)[0], step(some)[0])
    assert torch.equal(step(none.eval())[0], step(some.eval())[0])


@pytest.mark.parametrize("layers", [0, 1, 2, 3, "all"])
def test_first_layers_run_twice_in_training_and_once_in_evaluation(make_model, layers):
    """Case C2."""
    model = make_model(num_hidden_layers=3)
    model.set_gradient_checkpointing("full", layers)
    calls, k = count_norms(model), 3 if layers == "all" else layers
    step(model)
    assert calls == [2] * k + [1] * (3 - k), "a training step"
    with torch.no_grad():
        model(*batch())
    assert calls == [3] * k + [2] * (3 - k), "training mode without gradients"
    step(model.eval())
    assert calls == [4] * k + [3] * (3 - k), "evaluation mode"


def test_off_means_off(make_model):
    model = make_model()
    model.set_gradient_checkpointing("full")
    model.set_gradient_checkpointing("none")
    calls = count_norms(model)
    step(model)
    assert calls == [1, 1]


@pytest.mark.parametrize("one_context", [True, False])
def test_after_a_forward_without_gradients(make_model, one_context):
    """Case C3: bfloat16 copies of the weights that autocast keeps from the evaluation must not serve the training."""
    model, fresh = make_model(), make_model()
    for either in (model, fresh):
        either.set_gradient_checkpointing("full")
    wanted = step(fresh, "autocast", True)[1]
    for _ in range(2):
        model.zero_grad()
        with context("autocast", True):
            with torch.no_grad():
                model(*batch())
            if one_context:
                loss = model(*batch())
        if not one_context:
            with context("autocast", True):
                loss = model(*batch())
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} got no gradient"
            assert torch.equal(parameter.grad, wanted[name]), name


@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize("tied", [True, False])
def test_frozen_embeddings(make_model, precision, tied):
    """Case C4: no input of the first layer wants a gradient; its parameters still get theirs."""
    trainable, frozen = (make_model(tie_word_embeddings=tied) for _ in range(2))
    frozen.set_gradient_checkpointing("full")
    frozen.model.embed_tokens.weight.requires_grad_(False)
    wanted, found = step(trainable, precision, True)[1], step(frozen, precision, True)[1]
    assert frozen.model.embed_tokens.weight.grad is None
    assert found.keys() == wanted.keys() - {"model.embed_tokens.weight"}
    for name, grad in found.items():
        assert grad is not None and grad.any(), f"{name} got no gradient"
        assert torch.equal(grad, wanted[name]), name


def test_it_saves_memory(make_model, peak_bytes):
    model = make_model(num_hidden_layers=8)
    step(model)  # so that gradients exist in both
    peaks = {}
    for kind in ("none", "full"):
        model.set_gradient_checkpointing(kind)

        def run():
            model(*batch(n=8)).backward()
        peaks[kind] = peak_bytes(run)
    assert peaks["full"] < 0.4 * peaks["none"], peaks
