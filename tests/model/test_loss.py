"""The chunked loss head against F.cross_entropy in float64: values, gradients, dtypes and bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memtrain.model import loss as loss_module
from memtrain.model.loss import CHUNK_BYTES, CHUNK_TOKENS, IGNORE, automatic_chunk_tokens, linear_cross_entropy

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
T, D, V = 50, 16, 97


def example(dtype=torch.float32, t=T, d=D, v=V, ignored=0.2, seed=0):
    """(hidden, weight, targets): leaves that want gradients; a share of the targets is ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(t, d, generator=generator).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(v, d, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, v, (t,), generator=generator)
    targets[torch.rand(t, generator=generator) < ignored] = IGNORE
    return hidden, weight, targets


def reference(hidden, weight, targets, scale=1.0):
    """(loss, d hidden, d weight) in float64 of scale x the summed loss."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    loss = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORE, reduction="sum")
    (loss * scale).backward()
    return loss.detach(), hidden.grad, weight.grad


def assert_near(found, wanted, what, tolerance):
    error = ((found.double() - wanted).abs().max() / wanted.abs().max()).item()
    assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


def assert_equals_reference(hidden, weight, targets, loss, tolerance, scale=1.0):
    value, grad_hidden, grad_weight = reference(hidden, weight, targets, scale)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert_near(loss.detach(), value, "loss", min(tolerance, 1e-3))
    assert hidden.grad.dtype == hidden.dtype and weight.grad.dtype == weight.dtype
    assert_near(hidden.grad, grad_hidden, "gradient of hidden", tolerance)
    assert_near(weight.grad, grad_weight, "gradient of weight", tolerance)


@pytest.mark.parametrize("chunk", [1, 3, 7, T, T + 5, None])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_equals_float64(chunk, ignored):
    hidden, weight, targets = example(ignored=ignored)
    loss = linear_cross_entropy(hidden, weight, targets, chunk)
    loss.backward()
    assert_equals_reference(hidden, weight, targets, loss, 1e-5)


def test_ignored_tokens_have_exactly_no_gradient():
    hidden, weight, targets = example(ignored=0.4)
    linear_cross_entropy(hidden, weight, targets, 7).backward()
    assert not hidden.grad[targets == IGNORE].any()
    assert hidden.grad[targets != IGNORE].any(dim=1).all()


def test_everything_ignored():
    hidden, weight, targets = example(ignored=1.1)
    loss = linear_cross_entropy(hidden, weight, targets, 7)
    loss.backward()
    assert loss.item() == 0.0 and not hidden.grad.any() and not weight.grad.any()


def test_ignored_tokens_may_hold_anything():
    hidden, weight, targets = example(ignored=0.3)
    other_hidden, other_weight, _ = example(ignored=0.3)
    with torch.no_grad():
        other_hidden[targets == IGNORE] = 9.0
    loss = linear_cross_entropy(hidden, weight, targets, 7)
    other_loss = linear_cross_entropy(other_hidden, other_weight, targets, 7)
    (loss + other_loss).backward()
    assert torch.equal(loss, other_loss)
    assert torch.equal(hidden.grad, other_hidden.grad) and torch.equal(weight.grad, other_weight.grad)


def test_no_tokens_at_all():
    hidden, weight, targets = example(t=0)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.item() == 0.0 and hidden.grad.shape == (0, D) and not weight.grad.any()


def test_extreme_logits_stay_finite():
    hidden, weight, targets = example()
    hidden = (hidden.detach() * 1000).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets, 7)
    loss.backward()
    assert_equals_reference(hidden, weight, targets, loss, 1e-4)


@pytest.mark.parametrize("scale", [65536.0, 1 / 4096, -2.0])
def test_gradient_of_the_output_scales_all(scale):
    hidden, weight, targets = example()
    loss = linear_cross_entropy(hidden, weight, targets, 7)
    (loss * scale).backward()
    assert_equals_reference(hidden, weight, targets, loss, 1e-5, scale)


def test_second_backward_is_refused():
    hidden, weight, targets = example()
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already differentiated"):
        loss.backward()


# -- low precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [7, None])
def test_autocast(dtype, chunk):
    """float32 weights under autocast: float32 gradients, as near to float64 as those of the plain path."""
    hidden, weight, targets = example(ignored=0.3)
    with torch.autocast("cpu", dtype):
        loss = linear_cross_entropy(hidden, weight, targets, chunk)
    loss.backward()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
    assert_equals_reference(hidden, weight, targets, loss, tolerance)

    plain_hidden, plain_weight, _ = example(ignored=0.3)
    with torch.autocast("cpu", dtype):
        plain = F.cross_entropy(F.linear(plain_hidden, plain_weight).float(), targets, reduction="sum")
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    assert_near(hidden.grad, plain_hidden.grad, "gradient of hidden against the plain path", tolerance)
    assert_near(weight.grad, plain_weight.grad, "gradient of weight against the plain path", tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [7, None])
def test_low_precision_weights(dtype, chunk):
    hidden, weight, targets = example(dtype)
    loss = linear_cross_entropy(hidden, weight, targets, chunk)
    loss.backward()
    assert_equals_reference(hidden, weight, targets, loss, 2e-2 if dtype == torch.bfloat16 else 3e-3)


def test_small_probabilities_do_not_vanish_in_float16():
    """60,000 tokens of probability 5e-9 each, zero in float16, are together as large as what the target lacks to 1."""
    vocab, t = 60000, 64
    hidden = torch.full((t, D), 0.1, dtype=torch.float16)
    hidden[:, 0] = 19.0
    weight = torch.full((vocab, D), 0.5, dtype=torch.float16)
    weight[:, 0] = 0.0
    weight[3] = 0.0
    weight[3, 0] = 1.05
    targets = torch.full((t,), 3)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets)
    # as a scaler does: the mean over the tokens, times 65536
    scale = 65536 / t
    (loss * scale).backward()
    _, grad_hidden, grad_weight = reference(hidden, weight, targets, scale)
    assert_near(hidden.grad, grad_hidden, "gradient of hidden", 2e-2)
    assert hidden.grad is not None and weight.grad is not None
    assert_near(hidden.grad[:, 1], grad_hidden[:, 1], "gradient of hidden, the part of the other tokens", 2e-2)
    assert_near(weight.grad[4:], grad_weight[4:], "gradient of the other tokens' rows", 2e-2)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_frequent_token_does_not_overflow_float16(autocast):
    """A thousand times the same target and direction: the sum is 1000, far from float16's 65504."""
    hidden, weight, targets = example(torch.float32 if autocast else torch.float16, t=1000, ignored=0.0)
    with torch.no_grad():
        hidden.copy_(hidden.abs())
    targets.fill_(3)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss = linear_cross_entropy(hidden, weight, targets)
    (loss / 1000).backward()
    assert_equals_reference(hidden, weight, targets, loss, 3e-3, scale=1 / 1000)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_the_scale_is_not_rounded_to_float16(device):
    """1.3e-3 / 1024 has three bits in float16: rounded to them, the gradient would be some percent off."""
    hidden, weight, targets = (tensor.detach().to(device) for tensor in example(torch.float16))
    hidden.requires_grad_()
    (linear_cross_entropy(hidden, weight, targets) * 1.3e-3).backward()
    assert_near(hidden.grad, reference(hidden, weight, targets, 1.3e-3)[1], "gradient of hidden", 3e-3)


# -- what is needed, and no more


@pytest.mark.parametrize("need_hidden, need_weight", [(True, False), (False, True)])
def test_one_side_only(need_hidden, need_weight):
    hidden, weight, targets = example()
    wanted = reference(hidden, weight, targets)
    hidden.requires_grad_(need_hidden)
    weight.requires_grad_(need_weight)
    linear_cross_entropy(hidden, weight, targets, 7).backward()
    for leaf, need, grad in ((hidden, need_hidden, wanted[1]), (weight, need_weight, wanted[2])):
        if need:
            assert_near(leaf.grad, grad, "gradient", 1e-5)
        else:
            assert leaf.grad is None


def test_nobody_needs_a_gradient():
    hidden, weight, targets = (tensor.detach() for tensor in example())
    assert not linear_cross_entropy(hidden, weight, targets).requires_grad


def test_a_weight_used_twice_gets_both_gradients():
    _, weight, targets = example(ignored=0.0)
    ids = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(3))
    linear_cross_entropy(F.embedding(ids, weight), weight, targets, 7).backward()
    twice = weight.detach().double().requires_grad_()
    F.cross_entropy(F.embedding(ids, twice) @ twice.T, targets, reduction="sum").backward()
    assert_near(weight.grad, twice.grad, "gradient of the tied weight", 1e-5)


def test_gradients_accumulate_over_micro_batches():
    hidden, weight, targets = example(ignored=0.0)
    for part in (slice(0, 20), slice(20, None)):
        linear_cross_entropy(hidden[part], weight, targets[part], 7).backward()
    _, grad_hidden, grad_weight = reference(hidden, weight, targets)
    assert_near(hidden.grad, grad_hidden, "gradient of hidden", 1e-5)
    assert_near(weight.grad, grad_weight, "gradient of weight", 1e-5)


BIG = {"t": 1024, "d": 32, "v": 4096}
LOGITS_BYTES = 4 * BIG["t"] * BIG["v"]
HIDDEN_BYTES, WEIGHT_BYTES = 4 * BIG["t"] * BIG["d"], 4 * BIG["v"] * BIG["d"]
CHUNK = 64


def test_peak_bytes_in_training(peak_bytes):
    """Some chunks of logits and the gradients themselves; the plain path holds all logits more than twice."""

    def chunked():
        hidden, weight, targets = example(**BIG)
        linear_cross_entropy(hidden, weight, targets, CHUNK).backward()
        return hidden, weight

    def plain():
        hidden, weight, targets = example(**BIG)
        F.cross_entropy(hidden @ weight.T, targets, reduction="sum").backward()
        return hidden, weight

    chunk_logits_bytes = 4 * CHUNK * BIG["v"]
    found, wanted = peak_bytes(chunked), 3 * (HIDDEN_BYTES + WEIGHT_BYTES) + 3 * chunk_logits_bytes
    assert found <= wanted, f"{found} bytes, want at most {wanted}"
    assert peak_bytes(plain) >= 2 * LOGITS_BYTES > 3 * found


# here the gradients, 512 KiB and 4 MiB, are much larger than a chunk of logits, 128 KiB
WIDE = {"t": 256, "d": 512, "v": 2048}
WIDE_CHUNK, WIDE_CHUNK_BYTES, WIDE_HIDDEN_BYTES = 16, 4 * 16 * 2048, 4 * 256 * 512


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_makes_no_gradient_buffers(peak_bytes, context):
    """Parameters want gradients in evaluation too: it is the mode that says that none will be asked for."""
    hidden, weight, targets = example(**WIDE)

    def evaluate():
        with context():
            return linear_cross_entropy(hidden, weight, targets, WIDE_CHUNK)

    found = peak_bytes(evaluate)
    assert WIDE_CHUNK_BYTES <= found <= 3 * WIDE_CHUNK_BYTES, f"{found} bytes; a chunk of logits has {WIDE_CHUNK_BYTES}"
    assert linear_cross_entropy(hidden, weight, targets, WIDE_CHUNK).requires_grad


def test_only_the_needed_side_is_allocated(peak_bytes):
    hidden, weight, targets = example(**WIDE)
    weight = weight.detach()
    found = peak_bytes(lambda: linear_cross_entropy(hidden, weight, targets, WIDE_CHUNK))
    assert WIDE_HIDDEN_BYTES <= found <= WIDE_HIDDEN_BYTES + 4 * WIDE_CHUNK_BYTES


def test_automatic_chunks():
    assert automatic_chunk_tokens(4096, "cpu") == CHUNK_BYTES // (4 * 4096) > CHUNK_TOKENS["cpu"]
    assert automatic_chunk_tokens(128256, "cpu") == CHUNK_TOKENS["cpu"]
    assert automatic_chunk_tokens(128256, "cuda") == automatic_chunk_tokens(128256, "xpu") == CHUNK_TOKENS["cuda"]


@pytest.mark.parametrize("block_rows", [7, 97, 4096])
def test_blocks_of_the_vocabulary_change_nothing_but_rounding(monkeypatch, block_rows):
    """Any size of block, also one that does not divide the vocabulary, against the whole in one block."""
    def gradients(rows):
        monkeypatch.setattr(loss_module, "BLOCK_BYTES", 4 * rows * 16)
        hidden, weight, targets = example(t=64, d=16, v=300)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets, 24)
        loss.backward()
        return loss.detach(), hidden.grad, weight.grad

    for found, wanted in zip(gradients(block_rows), gradients(300), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3 * wanted.abs().max().item())


def test_no_copy_of_the_weight_or_the_logits_under_autocast(peak_bytes, monkeypatch):
    """Beyond one chunk of float32 logits, both gradients and the inputs: less than a cast copy of either."""
    monkeypatch.setattr(loss_module, "BLOCK_BYTES", 2**16)

    def work():
        hidden, weight, targets = example(**BIG)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            linear_cross_entropy(hidden, weight, targets, CHUNK).backward()

    inputs_and_gradients = 2 * WEIGHT_BYTES + 3 * HIDDEN_BYTES
    chunk_logits_bytes = 4 * CHUNK * BIG["v"]
    assert peak_bytes(work) <= inputs_and_gradients + chunk_logits_bytes + min(WEIGHT_BYTES, chunk_logits_bytes) // 2
