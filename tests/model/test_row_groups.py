"""Layers that take a micro-batch by groups of rows: the same loss and gradients, recomputed a group at a time."""

from __future__ import annotations

import pytest
import torch

from memtrain.options import RunConfig
from memtrain.rules import config_problems

KINDS = ["selective", "selective_deep", "full"]
ROWS, LENGTH = 5, 12


def results(model, kind, rows, **inputs):
    """Loss and gradients of a step; `rows`: at a time."""
    model.set_gradient_checkpointing(kind)
    model.model.recomputed_rows = rows
    model.zero_grad()
    ids = torch.randint(0, 97, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    loss = model(ids, ids.roll(-1, 1), **inputs)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_near(found, wanted):
    """Sums over groups instead of all tokens: float32 rounding apart."""
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=0)
    for name, grad in wanted[1].items():
        assert (found[1][name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_gradients(make_model, kind, rows):
    model = make_model()
    assert_near(results(model, kind, rows), results(model, "none", None))


@pytest.mark.parametrize("rows", [1, 2])
def test_left_padding(make_model, rows):
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[1, :4] = mask[4, :9] = 0
    model = make_model()
    whole = results(model, "none", None, attention_mask=mask)
    assert_near(results(model, "full", rows, attention_mask=mask), whole)
    assert abs(whole[0] - results(model, "none", None)[0]) > 1e-3, "the mask acts"


@pytest.mark.parametrize("rows", [1, 2])
def test_documents(make_model, rows):
    lengths = [12, 5, 7, 1, 1, 10, 6, 6, 12]
    model = make_model()
    whole = results(model, "none", None, document_lengths=lengths)
    assert_near(results(model, "full", rows, document_lengths=lengths), whole)
    assert abs(whole[0] - results(model, "none", None)[0]) > 1e-3, "the documents are apart"


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_drawn_once(make_model, kind):
    """What is recomputed is what was computed, bit for bit (C1)."""
    model = make_model(attention_dropout=0.1)
    plain, again = results(model, "none", 2), results(model, kind, 2)
    assert torch.equal(plain[0], again[0])
    assert all(torch.equal(grad, again[1][name]) for name, grad in plain[1].items())


@pytest.mark.parametrize(("rows", "groups"), [(1, 5), (2, 3), (5, 1), (9, 1), (None, 1)])
def test_groups_are_computed_twice_in_training_and_once_in_evaluation(make_model, rows, groups):
    model = make_model()
    seen = []
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *_: seen.append(1))
    results(model, "full", rows)
    assert len(seen) == 2 * groups
    seen.clear()
    model.eval()
    with torch.no_grad():
        model(torch.zeros(ROWS, LENGTH, dtype=torch.int64))
    assert len(seen) == 1


def test_the_peak_falls(make_model, peak_bytes):
    """With full checkpointing one layer's activations are the peak; of a group, they are its share."""
    model = make_model(hidden_size=64, intermediate_size=512, head_dim=16, num_hidden_layers=3)
    model.set_gradient_checkpointing("full")
    ids = torch.zeros(8, 128, dtype=torch.int64)
    peaks = {}
    for rows in (None, 1):
        model.model.recomputed_rows = rows
        model(ids, ids).backward()  # gradients exist
        peaks[rows] = peak_bytes(lambda: model(ids, ids).backward())
    assert peaks[1] < 0.5 * peaks[None], peaks


def test_nothing_recomputed_is_refused():
    (problem,) = config_problems(RunConfig(max_steps=1, recomputed_rows=2))
    assert "recomputed_rows=2 with gradient_checkpointing=none" in problem
    assert not config_problems(RunConfig(max_steps=1, recomputed_rows=2, gradient_checkpointing="full"))
