"""Linear and RMSNorm against torch's and transformers', value, gradients, and bytes kept for the backward."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memtrain.model import layers
from memtrain.model.layers import Linear, RMSNorm, swiglu

SHAPES = [(6, 24), (2, 5, 24)]


def autocast(on=True):
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if on else nullcontext()


def pair(bias):
    torch.manual_seed(0)
    ours = Linear(24, 40, bias=bias)
    theirs = nn.Linear(24, 40, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def run(module, x, cast=True, seed=1):
    """(output, gradient of x, gradients of the parameters) for a random gradient of the output."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    with autocast(cast):
        out = module(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype))
    return out.detach(), x.grad, [parameter.grad for parameter in module.parameters()]


def assert_same(one, other, what=""):
    assert (one is None) == (other is None), f"{what}: a gradient on one side only"
    if one is not None:
        assert one.dtype == other.dtype, what
        assert torch.equal(one, other), what


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the storages that autograd keeps, each once, without those of `known` tensors."""

    def __init__(self, *known):
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.sizes, self.kept = {}, []
        super().__init__(self.keep, lambda tensor: tensor)

    def __enter__(self):
        super().__enter__()
        return self

    def keep(self, tensor):
        storage = tensor.untyped_storage()
        self.kept.append(tensor)  # alive, so that no address comes twice
        if storage.data_ptr() not in self.known:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self):
        return sum(self.sizes.values())


# ---- Linear ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", ["", "weight", "input"])
def test_linear_equals_torchs_under_autocast(shape, bias, dtype, frozen):
    ours, theirs = pair(bias)
    x = torch.randn(shape).to(dtype).requires_grad_(frozen != "input")
    for module in (ours, theirs):
        module.weight.requires_grad_(frozen != "weight")
    if frozen == "weight" and bias:
        assert ours.bias.requires_grad
    found, wanted = run(ours, x), run(theirs, x)
    assert found[0].dtype == torch.bfloat16
    assert_same(found[0], wanted[0], "output")
    assert_same(found[1], wanted[1], "gradient of the input")
    for one, other in zip(found[2], wanted[2], strict=True):
        assert_same(one, other, "gradient of a parameter")
    assert any(grad is not None for grad in (found[1], *found[2]))


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_equals_torchs_without_a_cast(cast, dtype):
    """bfloat16 weights, or no autocast: nothing to do without."""
    ours, theirs = (module.to(dtype) for module in pair(True))
    x = torch.randn(2, 5, 24).to(dtype).requires_grad_()
    found, wanted = run(ours, x, cast), run(theirs, x, cast)
    assert_same(found[0], wanted[0])
    assert_same(found[1], wanted[1])
    for one, other in zip(found[2], wanted[2], strict=True):
        assert_same(one, other)


def test_linear_outside_autocast_refuses_what_torch_refuses():
    ours, theirs = pair(False)
    for module in (ours, theirs):
        with pytest.raises(RuntimeError, match="dtype"):
            module(torch.zeros(2, 24, dtype=torch.bfloat16))


@pytest.mark.parametrize("recomputed", [False, True])
def test_linear_keeps_no_cast_copy(recomputed):
    ours, theirs = pair(False)
    ours.recomputed = recomputed
    x = torch.randn(6, 24, requires_grad=True)
    x_bytes, copy_bytes = 2 * x.numel(), 2 * ours.weight.numel()
    kept = []
    for module in (ours, theirs):
        with Saved(module.weight) as saved, autocast():
            out = module(x)
        kept.append(saved.total)
        del out
    assert kept == [x_bytes + recomputed * copy_bytes, x_bytes + copy_bytes]


def test_linear_without_gradients_saves_nothing():
    ours, theirs = pair(True)
    x = torch.randn(6, 24)
    with torch.no_grad(), autocast(), Saved() as saved:
        assert torch.equal(ours(x), theirs(x))
    assert saved.total == 0


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------

def norms(size, eps, dtype=torch.float32):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = RMSNorm(size, eps), LlamaRMSNorm(size, eps)
    with torch.no_grad():
        ours.weight.normal_(1.0, 0.3, generator=torch.Generator().manual_seed(0))
        theirs.weight.copy_(ours.weight)
    return ours.to(dtype), theirs.to(dtype)


class Float64Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, arXiv 1910.07467 eq. 4, in float64."""

    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight.detach().double()), eps

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cast", [False, True])
def test_rms_norm_equals_float64(shape, eps, dtype, cast):
    ours, _ = norms(24, eps, dtype)
    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(2))).to(dtype).requires_grad_()
    found = run(ours, x, cast)
    out_dtype = torch.bfloat16 if cast else dtype
    assert found[0].dtype == out_dtype
    assert found[1].dtype == found[2][0].dtype == dtype
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(out_dtype).double()
    reference, wide = Float64Norm(ours.weight, eps), x.detach().double().requires_grad_()
    out = reference(wide)
    out.backward(grad)
    precise = {torch.bfloat16: 2.0**-8, torch.float32: 1e-6, torch.float64: 1e-12}
    for value, wanted, what in ((found[0], out, "output"), (found[1], wide.grad, "gradient of the input"),
                                (found[2][0], reference.weight.grad, "gradient of the weight")):
        error = ((value.double() - wanted).abs() / wanted.abs().clamp_min(wanted.abs().mean())).max().item()
        assert error <= precise[value.dtype], f"{what}: relative error {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype):
    """Within float32's rounding; in bfloat16 within one rounding more, which theirs does before the weight."""
    ours, theirs = norms(24, 1e-5, dtype)
    x = torch.randn(2, 5, 24).to(dtype).requires_grad_()
    found, wanted = run(ours, x, cast=False), run(theirs, x, cast=False)
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-6
    for one, other in ((found[0], wanted[0]), (found[1], wanted[1]), (found[2][0], wanted[2][0])):
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).abs().max() <= tolerance * other.float().abs().max()


@pytest.mark.parametrize("cast", [False, True])
def test_rms_norm_keeps_a_number_per_token(cast):
    ours, theirs = norms(24, 1e-5)
    x = torch.randn(2, 5, 24, requires_grad=True)
    with Saved(x, ours.weight) as saved, autocast(cast):
        ours(x)
    assert saved.total == 4 * 10, saved.sizes
    with Saved(x, theirs.weight) as saved, autocast(cast):
        theirs(x)
    assert saved.total > 4 * x.numel(), "transformers' keeps more: else nothing was measured"


def test_rms_norm_with_frozen_weight_or_input():
    ours, _ = norms(24, 1e-5)
    x = torch.randn(6, 24, requires_grad=True)
    wanted = run(ours, x)
    ours.zero_grad()
    assert_same(run(ours, x.detach())[2][0], wanted[2][0])
    frozen = copy.deepcopy(ours)
    frozen.weight.requires_grad_(False)
    frozen.weight.grad = None
    found = run(frozen, x)
    assert found[2] == [None]
    assert_same(found[1], wanted[1])


# ---- SwiGLU ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [2**20, 128])  # whole vectors: the rest of a row of numbers is computed in another way
@pytest.mark.parametrize("contiguous", [True, False])
def test_swiglu_equals_torchs(dtype, block, contiguous, monkeypatch):
    monkeypatch.setattr(layers, "BLOCK_NUMBERS", block)
    torch.manual_seed(0)
    leaves = [torch.randn(3, 7, 40, dtype=dtype) for _ in range(3)]
    if not contiguous:
        leaves = [leaf.transpose(0, 2) for leaf in leaves]
    found = []
    for function in (swiglu, lambda gate, up: F.silu(gate) * up):
        gate, up = (leaf.detach().clone().requires_grad_() for leaf in leaves[:2])
        out = function(gate * 2, up * 3)  # what it takes over must not be a leaf
        out.backward(leaves[2].clone())
        found.append((out.detach(), gate.grad, up.grad))
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


def test_swiglu_keeps_gate_and_up_and_works_in_them(monkeypatch, peak_bytes):
    monkeypatch.setattr(layers, "BLOCK_NUMBERS", 64)
    gate, up = (torch.randn(64, 512, requires_grad=True) for _ in range(2))
    with Saved() as saved:
        out = swiglu(gate * 2, up * 3)
    assert saved.total == 2 * out.nbytes
    grad = torch.randn_like(out)
    kept = SimpleNamespace(saved_tensors=(gate * 2, up * 3), spent=False)
    with torch.no_grad():
        assert peak_bytes(lambda: layers._SwiGLU.backward(kept, grad)) <= 4 * 64 * 4
    out.backward(grad, retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        out.backward(grad)
