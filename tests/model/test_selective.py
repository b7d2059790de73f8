"""Selective checkpointing: the same bits, what it keeps, what it computes again, and that it compiles."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from steps import batch, step
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from memtrain.model.gradient_checkpointing import POLICIES, PRODUCTS
from memtrain.model.llama import LlamaForCausalLM
from memtrain.model.presets import PRESETS

KINDS = ("selective", "selective_deep")
CHANGES = {"plain": {}, "dropout": {"attention_dropout": 0.1}, "biases": {"attention_bias": True, "mlp_bias": True},
           "no groups": {"num_key_value_heads": 4}}
INPUTS = {"causal": {}, "documents": {"document_lengths": [30, 34, 64]},
          "mask": {"attention_mask": torch.arange(128).view(2, 64) > 20}}


def assert_same(plain, other, *args, **kwargs):
    (loss, wanted), (other_loss, found) = step(plain, *args, **kwargs), step(other, *args, **kwargs)
    assert torch.equal(loss, other_loss)
    for name, grad in wanted.items():
        assert torch.equal(grad, found[name]), f"{name} differs with checkpointing"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("changes", CHANGES)
def test_gradients_are_equal_bit_for_bit(make_model, kind, precision, changes):
    plain = make_model(num_hidden_layers=3, **CHANGES[changes])
    if precision == "bfloat16":
        plain = plain.to(torch.bfloat16)
    recomputed = copy.deepcopy(plain)
    for layers in ("all", 2):
        recomputed.set_gradient_checkpointing(kind, layers)
        for kwargs in INPUTS.values():
            assert_same(plain, recomputed, precision, **kwargs)


# ---- what is computed again --------------------------------------------------------------------------------------------

class Calls(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func.overloadpacket)
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kwargs", ["causal", "documents"])
def test_the_products_that_run_again(make_model, bias, kwargs):
    """Counted: a forward runs 7 products a layer, a backward 14; attention never runs twice."""
    found = {}
    for kind in POLICIES:
        model = make_model(num_hidden_layers=3, attention_bias=bias, mlp_bias=bias)
        model.set_gradient_checkpointing(kind)
        hidden = model.model(batch()[0], None, INPUTS[kwargs].get("document_lengths"), None)
        with Calls() as calls:
            hidden.sum().backward()
        products = calls.counts.get("aten.mm", 0) + calls.counts.get("aten.addmm", 0)
        attention = sum(count for name, count in calls.counts.items() if "attention" in name and "backward" not in name)
        found[kind] = (products / 3 - 14, attention / 3)
    documents = len(INPUTS[kwargs].get("document_lengths", [0]))
    # recomputing stops before the last product of a layer, which nothing needs
    assert found == {"none": (0, 0), "selective": (0, 0), "selective_deep": (3, 0), "full": (6, documents)}


def test_the_products_are_those_of_a_layer_in_order(make_model):
    model, seen = make_model(num_hidden_layers=1), []
    for name, module in model.model.layers[0].named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(lambda *_, name=name: seen.append(name.rpartition(".")[2]))
    model(*batch())
    assert tuple(seen) == PRODUCTS


def training_flops(model, input_ids, autocast):
    """(FLOPs of forward and backward of the layers, FLOPs of the head: one product forward and two backward)."""
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model.model(input_ids, None, None, None)
        hidden.backward(torch.ones_like(hidden))
    return counter.get_total_flops(), 6 * input_ids.numel() * model.head_weight.numel()


SHAPE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "head_dim": 16, "num_hidden_layers": 4}


@pytest.mark.parametrize("autocast", [False, True])
def test_flops(make_model, autocast):
    flops, head = {}, 0
    for kind in POLICIES:
        model = make_model(**SHAPE)
        model.set_gradient_checkpointing(kind)
        flops[kind], head = training_flops(model, batch(s=64, vocab=512)[0], autocast)
    assert flops["none"] > 0
    step_flops = flops["none"] + head
    added = {kind: (value - flops["none"]) / step_flops for kind, value in flops.items()}
    assert added["selective"] <= 0.01, added
    assert 0.05 < added["selective_deep"] <= 0.18, added
    assert 0.2 < added["full"] <= 0.34, added


# ---- what is kept ------------------------------------------------------------------------------------------------------

class Alive(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def total(self, *known):
        known = {tensor.untyped_storage()._cdata for tensor in known}
        return sum(size for key, (reference, size) in self.storages.items() if key not in known and not reference.expired())


def kept_bytes(model, input_ids, autocast):
    """Bytes alive between forward and backward, beside parameters and inputs."""
    with Alive() as alive, torch.autocast("cpu", torch.bfloat16, cache_enabled=False, enabled=autocast):
        hidden = model.model(input_ids, None, None, None)
        total = alive.total(*model.parameters(), input_ids)
    del hidden
    return total


@pytest.mark.parametrize("autocast", [False, True])
def test_kept_bytes(make_model, autocast):
    """About a half and a fifth of all, and what the policies say to the byte: h, gh, i numbers of a token and layer."""
    kept = {}
    input_ids = batch(n=4, s=128, vocab=512)[0]
    for kind in POLICIES:
        for layers in (2, 4):
            model = make_model(**{**SHAPE, "num_hidden_layers": layers})
            model.set_gradient_checkpointing(kind)
            kept[kind, layers] = kept_bytes(model, input_ids, autocast)
    per_layer = {kind: (kept[kind, 4] - kept[kind, 2]) / 2 / input_ids.numel() for kind in POLICIES}
    h, kv, i, heads = 64, 32, 176, 4
    wide, narrow = 4, 2 if autocast else 4
    attention = narrow * h + 4 * heads  # output and log-sum-exp
    assert per_layer["full"] == wide * h
    assert per_layer["selective_deep"] == wide * h + narrow * (h + 2 * kv) + attention
    assert per_layer["selective"] == per_layer["selective_deep"] + narrow * (h + 2 * i)
    assert 0.45 <= per_layer["selective"] / per_layer["none"] <= 0.6, per_layer
    assert 0.15 <= per_layer["selective_deep"] / per_layer["none"] <= 0.27, per_layer


def test_of_the_8b_shape():
    """8B at sequence 4096 on fake tensors: added FLOPs of a whole step, and kept bytes."""
    shape, flops, kept = PRESETS["8b"], {}, {}
    with FakeTensorMode():
        input_ids = torch.zeros(1, 4096, dtype=torch.int64)
        for kind in POLICIES:
            found = []
            for count in (1, 2):
                model = LlamaForCausalLM(replace(shape, num_hidden_layers=count)).train()
                model.set_gradient_checkpointing(kind)
                total, head = training_flops(model, input_ids, autocast=True)
                found.append((total, kept_bytes(model, input_ids, autocast=True)))
            flops[kind], kept[kind] = (two - one for one, two in zip(*found, strict=True))
    # the counter does not know the CPU's attention: half of 2 products of S x S x h forward, 5 backward (arXiv 2205.14135)
    attention = 7 * 4096**2 * shape.hidden_size
    step_flops = shape.num_hidden_layers * (flops["none"] + attention) + head
    added = {kind: shape.num_hidden_layers * (value - flops["none"]) / step_flops for kind, value in flops.items()}
    assert added["selective"] <= 0.01, added
    assert added["selective_deep"] <= 0.18, added
    assert kept["selective"] <= 0.57 * kept["none"] and kept["selective_deep"] <= 0.21 * kept["none"], kept


# ---- compiled ----------------------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_compiled(make_model, kind, precision):
    """One graph for all layers, without a break, compiled once; values as without, up to the order of sums."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain = make_model(num_hidden_layers=3)
    compiled = copy.deepcopy(plain)
    compiled.set_gradient_checkpointing(kind, compiled=True)
    loss, wanted = step(plain, precision)
    for _ in range(3):
        other_loss, found = step(compiled, precision)
        assert torch.allclose(loss, other_loss, rtol=1e-5 if precision == "float32" else 1e-2)
        for name, grad in wanted.items():
            error = (grad - found[name]).norm() / grad.norm()
            assert error <= (1e-5 if precision == "float32" else 5e-2), f"{name}: {error}"
        assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])
        assert not counters["graph_break"], counters["graph_break"]
        assert counters["frames"]["ok"] == counters["frames"]["total"] == 1


@pytest.mark.slow
def test_compiled_layers_keep_less(make_model, peak_bytes):
    """The compiler keeps what the policy says, not all."""
    torch._dynamo.reset()
    peaks = {}
    for kind in ("none", *KINDS, "full"):
        model = make_model(**{**SHAPE, "num_hidden_layers": 8})
        model.set_gradient_checkpointing(kind, compiled=True)
        input_ids, targets = batch(n=4, s=128, vocab=512)
        model(input_ids, targets).backward()  # compiles; gradients exist
        peaks[kind] = peak_bytes(lambda model=model, a=input_ids, b=targets: model(a, b).backward())
    assert peaks["full"] < peaks["selective_deep"] < peaks["selective"] < peaks["none"], peaks
