"""Our Llama against transformers': logits, loss and every gradient; documents; cache; nothing of size S x S."""

from __future__ import annotations

import pytest
import torch

from memtrain.model.llama import KeyValueCache, causal_padding_mask

TOLERANCE = 1e-5
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # below the 64 positions used here, so that the scaling acts
GRID = {
    "grouped": {},
    "all_heads": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 16},
    "rope_base": {"rope_theta": 500000.0},
    "rope_linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope_llama3": {"rope_scaling": LLAMA3, "head_dim": 16},
    "rope_llama3_base": {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "head_dim": 16, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "eps": {"rms_norm_eps": 1e-3},
}
PADDED = 17  # positions of padding in a row of 64


def rows(seed=0, n=2, s=64, vocab=97):
    return torch.randint(0, vocab, (n, s), generator=torch.Generator().manual_seed(seed))


def next_tokens(labels):
    """targets [N, S] of labels [N, S]: the label one place on, nothing after the last."""
    return torch.cat((labels[:, 1:], labels.new_full((len(labels), 1), -100)), dim=1)


def assert_near(found, wanted, what, tolerance=TOLERANCE):
    error = ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()
    assert found.shape == wanted.shape and error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(ours, theirs, tolerance=TOLERANCE):
    found, wanted = gradients(ours), gradients(theirs)
    assert found.keys() == wanted.keys(), "the two models have other parameters"
    for name, grad in wanted.items():
        assert found[name] is not None, f"{name} got no gradient"
        assert_near(found[name], grad, name, tolerance)


def assert_twins_agree(ours, theirs, input_ids, labels, attention_mask=None, our_mask=None):
    """Logits of real tokens, mean loss and all gradients."""
    out = theirs(input_ids, attention_mask=attention_mask, labels=labels)
    real = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
    assert_near(ours(input_ids, attention_mask=our_mask)[real], out.logits[real], "logits")
    targets = next_tokens(labels)
    loss = ours(input_ids, targets, attention_mask=our_mask) / (targets != -100).sum()
    assert loss.dtype == torch.float32
    assert_near(loss, out.loss, "loss")
    loss.backward()
    out.loss.backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("changes", GRID.values(), ids=GRID.keys())
def test_equals_transformers(twins, changes):
    input_ids = rows()
    ours, theirs = twins(**changes)
    assert_twins_agree(ours, theirs, input_ids, input_ids)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_on_the_right_needs_no_mask(twins, attention):
    input_ids, mask = rows(), torch.ones(2, 64, dtype=torch.int64)
    mask[0, -PADDED:] = 0
    ours, theirs = twins(attention)
    assert_twins_agree(ours, theirs, input_ids, input_ids.where(mask.bool(), -100), mask, our_mask=None)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_on_the_left(twins, attention):
    input_ids, mask = rows(), torch.ones(2, 64, dtype=torch.int64)
    mask[0, :PADDED] = 0
    labels = input_ids.where(mask.bool(), -100)
    # the first real token is nobody's to predict: a pad would have to
    labels[0, PADDED] = -100
    ours, theirs = twins(attention)
    assert_twins_agree(ours, theirs, input_ids, labels, mask, our_mask=mask)


def test_what_stands_under_padding_does_not_matter(make_model):
    model, input_ids, mask = make_model(), rows(), torch.ones(2, 64, dtype=torch.int64)
    mask[0, :PADDED] = 0
    other = input_ids.clone()
    other[0, :PADDED] = 5
    real = mask.bool()
    assert torch.equal(model(input_ids, attention_mask=mask)[real], model(other, attention_mask=mask)[real])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_row_of_padding_alone(twins, attention):
    """Case A7: finite, and the other row as in transformers."""
    input_ids, mask = rows(), torch.ones(2, 64, dtype=torch.int64)
    mask[0] = 0
    labels = input_ids.where(mask.bool(), -100)
    ours, theirs = twins(attention)
    assert_twins_agree(ours, theirs, input_ids, labels, mask, our_mask=mask)


def test_nothing_but_padding(make_model):
    model, input_ids = make_model(), rows()
    loss = model(input_ids, torch.full_like(input_ids, -100), attention_mask=torch.zeros_like(input_ids))
    loss.backward()
    assert loss.item() == 0.0
    for name, grad in gradients(model).items():
        assert grad is not None and not grad.any(), f"{name}: want a gradient of zeros"


def test_causal_padding_mask_by_hand():
    mask = torch.tensor([[0, 1, 1, 0]])
    wanted = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]).bool()
    assert torch.equal(causal_padding_mask(mask, 4)[0, 0], wanted)
    assert torch.equal(causal_padding_mask(mask, 2)[0, 0], wanted[2:])


def test_documents_do_not_see_each_other(make_model):
    """Packed rows give the logits, loss and gradients of the documents run one by one."""
    lengths = [10, 54, 1, 63]
    input_ids = rows()
    targets = next_tokens(input_ids)
    packed, alone = make_model(), make_model()
    logits = packed(input_ids, document_lengths=lengths).flatten(0, 1)
    loss = packed(input_ids, targets, document_lengths=lengths)
    pieces = list(zip(input_ids.flatten().split(lengths), targets.flatten().split(lengths), strict=True))
    assert_near(logits, torch.cat([alone(ids[None])[0] for ids, _ in pieces]), "logits")
    sum_alone = sum(alone(ids[None], wanted[None]) for ids, wanted in pieces)
    assert_near(loss, sum_alone, "loss")
    loss.backward()
    sum_alone.backward()
    assert_same_gradients(packed, alone)


def test_document_lengths_that_do_not_fill_the_rows_are_an_error(make_model):
    with pytest.raises(RuntimeError, match="split"):
        make_model()(rows(), document_lengths=[64, 63])


@pytest.mark.parametrize("steps", [[1] * 64, [40, *[1] * 24], [20, 20, 1, 23]], ids=["ones", "prompt", "pieces"])
def test_cache_equals_the_full_forward(make_model, steps):
    model, input_ids, cache = make_model(rope_scaling=LLAMA3).eval(), rows(), KeyValueCache()
    with torch.no_grad():
        parts = [model(piece, cache=cache) for piece in input_ids.split(steps, dim=1)]
        assert_near(torch.cat(parts, dim=1), model(input_ids), "logits")
    assert cache.length == 64


def test_cache_with_padding_on_the_left(make_model):
    model, input_ids, cache = make_model().eval(), rows(), KeyValueCache()
    mask = torch.ones(2, 64, dtype=torch.int64)
    mask[0, :PADDED] = 0
    with torch.no_grad():
        parts, seen = [], 0
        for piece in input_ids.split([40, *[1] * 24], dim=1):
            seen += piece.shape[1]
            parts.append(model(piece, attention_mask=mask[:, :seen], cache=cache))
        full = model(input_ids, attention_mask=mask)
    assert_near(torch.cat(parts, dim=1)[mask.bool()], full[mask.bool()], "logits")


@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("document_lengths", [None, [200, 312]], ids=["row", "documents"])
def test_nothing_as_large_as_rows_squared(make_model, largest_tensor, kind, document_lengths):
    """512 positions squared are 262,144 elements; the largest rightful tensor, 512 x 97 logits, has 49,664."""
    s = 512
    model, input_ids = make_model(max_position_embeddings=s), rows(n=1, s=s)
    model.set_gradient_checkpointing(kind)

    def step():
        model(input_ids, next_tokens(input_ids), document_lengths=document_lengths).backward()

    elements, operation = largest_tensor(step)
    assert 97 * s <= elements < s * s, f"{operation} holds {elements} elements; {s} x {s} is {s * s}"


def test_the_loss_never_holds_all_logits(make_model, largest_tensor):
    t, vocab = 1024, 1000
    model = make_model(vocab_size=vocab, max_position_embeddings=256)
    model.loss_chunk_tokens = 64
    input_ids = rows(n=4, s=256, vocab=vocab)
    elements, operation = largest_tensor(lambda: model(input_ids, next_tokens(input_ids)).backward())
    # 64 x 1000 logits, and t x 64 in the MLP
    assert elements < t * vocab / 8, f"{operation} holds {elements} elements; all logits would be {t * vocab}"


def test_initialisation(make_shape):
    from memtrain.model.llama import LlamaForCausalLM

    model = LlamaForCausalLM(make_shape(attention_bias=True, mlp_bias=True, initializer_range=0.05))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), f"{name} does not start at 0"
        elif "norm" in name:
            assert (parameter == 1).all(), f"{name} does not start at 1"
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.15), f"{name} has another spread"


def test_weights_in_bfloat16_give_bfloat16_logits_and_a_float32_loss(make_model):
    model, input_ids = make_model().to(torch.bfloat16), rows()
    assert model(input_ids).dtype == torch.bfloat16
    loss = model(input_ids, next_tokens(input_ids))
    assert loss.dtype == torch.float32
    loss.backward()
    assert {grad.dtype for grad in gradients(model).values()} == {torch.bfloat16}


def test_autocast_equals_transformers_within_bfloat16(twins):
    ours, theirs = twins()
    input_ids = rows()
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours(input_ids, next_tokens(input_ids)) / (2 * 63)
        logits, out = ours(input_ids), theirs(input_ids, labels=input_ids)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert_near(logits.float(), out.logits.float(), "logits", 4e-2)
    assert loss.item() == pytest.approx(out.loss.item(), rel=1e-2)
    loss.backward()
    assert {grad.dtype for grad in gradients(ours).values()} == {torch.float32}
    out.loss.backward()
    assert_same_gradients(ours, theirs, tolerance=0.15)
