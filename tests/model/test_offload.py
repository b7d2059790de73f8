"""Activations in host memory: which tensors go, in which order they return, and that values stay the same."""

from __future__ import annotations

import copy

import pytest
import torch

from memtrain.model import offload
from memtrain.model.llama import NOT_OFFLOADED
from memtrain.model.offload import offload_activations

LAYERS = 4


class StandIn:
    """The part of `_Stored` that decides, without streams: host memory is a copy, the device's a second one."""

    made: list[StandIn] = []  # noqa: RUF012
    returned = most_returned = 0  # tensors back on the device

    def __init__(self, tensor, stream):
        self.host, self.returning, self.uses, self.takes = tensor.detach().clone(), None, 0, 0
        self.address = tensor.untyped_storage().data_ptr()
        StandIn.made.append(self)

    def fetch(self):
        if self.returning is None:
            self.returning = self.host.clone()
            StandIn.returned += 1
            StandIn.most_returned = max(StandIn.most_returned, StandIn.returned)

    def take(self):
        self.fetch()
        tensor = self.returning
        self.uses, self.takes = self.uses - 1, self.takes + 1
        if self.uses <= 0:
            self.returning = None
            StandIn.returned -= 1
        return tensor


@pytest.fixture
def stand_in(monkeypatch):
    """The CPU as if it were the device that tensors leave; tensors of any size go."""
    monkeypatch.setattr(offload, "OFFLOADED", "cpu")
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(offload, "_Stored", StandIn)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    StandIn.made, StandIn.returned, StandIn.most_returned = [], 0, 0
    return StandIn


def batch():
    input_ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    return input_ids, input_ids.roll(-1, 1)


def step(model, device="cpu", autocast=False):
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = model(*(tensor.to(device) for tensor in batch()))
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def assert_equal_steps(plain, offloaded, **options):
    loss, wanted = step(plain, **options)
    other_loss, found = step(offloaded, **options)
    assert torch.equal(loss, other_loss)
    for name, grad in wanted.items():
        assert torch.equal(grad, found[name]), f"{name} differs with offloaded activations"


def models(make_model, kind="none", **changes):
    plain = make_model(num_hidden_layers=LAYERS, **changes)
    plain.set_gradient_checkpointing(kind)
    offloaded = copy.deepcopy(plain)
    offloaded.set_gradient_checkpointing(kind)
    offloaded.model.offload_activations = True
    return plain, offloaded


@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_cpu_nothing_moves(make_model, kind, autocast, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(offload, "_Stored", None)  # to store a tensor would raise
    assert_equal_steps(*models(make_model, kind, attention_dropout=0.1), autocast=autocast)


@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_equal_bit_for_bit(make_model, kind, autocast, stand_in):
    assert_equal_steps(*models(make_model, kind, attention_dropout=0.1, attention_bias=True), autocast=autocast)
    assert stand_in.made


@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_and_the_last_layers_stay(make_model, stand_in, autocast):
    _, model = models(make_model)
    seen = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: seen.__setitem__(index, len(stand_in.made)))
    step(model, autocast=autocast)
    per_layer = [seen[index] - seen.get(index - 1, 0) for index in range(LAYERS)]
    assert all(count > 5 for count in per_layer[:-NOT_OFFLOADED]), per_layer
    assert per_layer[-NOT_OFFLOADED:] == [0] * NOT_OFFLOADED
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert not weights & {stored.address for stored in stand_in.made}, "a parameter was moved"


def test_full_checkpointing_moves_a_layers_input_alone(make_model, stand_in):
    _, model = models(make_model, "full")
    step(model)
    assert [tuple(stored.host.shape) for stored in stand_in.made] == [(2, 16, 32)] * (LAYERS - NOT_OFFLOADED)


def test_a_tensor_that_several_operations_save_goes_once(stand_in):
    x = torch.randn(4, 4, requires_grad=True) * 2
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    with offload_activations():
        out = sum((x @ weight).sum() for weight in weights)
    assert [stored.uses for stored in stand_in.made] == [3]
    out.backward()
    assert [stored.takes for stored in stand_in.made] == [3]
    assert stand_in.made[0].returning is None, "returned tensors must not pile up on the device"
    for weight in weights:
        assert torch.equal(weight.grad, x.detach().t() @ torch.ones(4, 4))


def test_a_tensor_changed_in_place_goes_again(stand_in):
    leaf = torch.randn(4, 4, requires_grad=True)
    with offload_activations():
        x = leaf * 2
        first = x.square()
        x.add_(1)  # torch alone would refuse the backward: the value that was saved is gone
        second = x.square()
    assert len(stand_in.made) == 2
    (first + second).sum().backward()
    assert torch.allclose(leaf.grad, 8 * leaf + 4 * (2 * leaf + 1))


def test_a_new_tensor_at_the_address_of_an_old_one_goes_too(stand_in):
    leaf = torch.randn(4, 4, requires_grad=True)
    found, wanted = [], []
    with offload_activations():
        for index in range(5):
            x = leaf * (index + 1)  # lands where the last one was freed
            wanted.append(x.detach().clone())
            found.append(x.square())
            del x
    assert len(stand_in.made) == 5
    for stored, value in zip(stand_in.made, wanted, strict=True):
        assert torch.equal(stored.host, value)
    sum(value.sum() for value in found).backward()
    assert torch.allclose(leaf.grad, sum(2 * (i + 1) ** 2 for i in range(5)) * leaf)


def test_tensors_return_a_few_ahead_and_do_not_stay(make_model, stand_in):
    _, model = models(make_model)
    step(model)
    assert stand_in.returned == 0
    assert all(stored.takes >= 1 for stored in stand_in.made)
    assert 1 < stand_in.most_returned <= offload.PREFETCHED + 4 < len(stand_in.made)


def test_a_second_backward_finds_its_tensors(stand_in):
    leaf = torch.randn(4, 4, requires_grad=True)
    with offload_activations():
        out = (leaf * 2).square().sum()
    out.backward(retain_graph=True)
    first = leaf.grad.clone()
    out.backward()
    assert torch.equal(leaf.grad, 2 * first)
    assert stand_in.returned == 0


def test_small_tensors_stay(stand_in, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 65)
    leaf = torch.randn(4, 4, requires_grad=True)
    with offload_activations():
        (leaf * 2).square().sum().backward()
    assert not stand_in.made


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu(make_model, kind, autocast, monkeypatch):
    """Really moved: equal gradients over several steps, and fewer bytes at the end of the forward."""
    plain, offloaded = (model.cuda() for model in models(make_model, kind, hidden_size=256, intermediate_size=512, head_dim=64))
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 2**10)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(3):
            assert_equal_steps(plain, offloaded, device="cuda", autocast=autocast)
    finally:
        torch.use_deterministic_algorithms(False)
    live = {}
    tokens = torch.randint(0, 97, (32, 128), device="cuda")
    for name, model in (("plain", plain), ("offloaded", offloaded)):
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(tokens, tokens)
        torch.cuda.synchronize()
        live[name] = torch.cuda.memory_allocated() - before
        loss.backward()
        del loss
    assert live["offloaded"] < (0.7 if kind == "none" else 0.9) * live["plain"], live
