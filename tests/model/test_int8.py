"""int8 linear layers against plain ones with the same numbers; their weights in and out of files."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from steps import batch
from torch.utils.checkpoint import checkpoint

from memtrain.model import int8 as int8_module
from memtrain.model.huggingface import export, load_model, load_weights
from memtrain.model.int8 import Int8Linear, quantise_, widened
from memtrain.model.llama import LlamaForCausalLM, new_model
from memtrain.model.loss import linear_cross_entropy
from memtrain.model.weights_file import write_tensors


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of rows in the smallest weight, the last one short."""
    monkeypatch.setattr(int8_module, "BLOCK_NUMBERS", 5 * 32)


def layer(dtype=torch.float64, bias=False):
    torch.manual_seed(0)
    made = Int8Linear(32, 48, bias=bias)
    made.initialise(0.2)
    x = torch.randn(3, 7, 32).to(dtype).requires_grad_()
    return made, x, torch.randn(3, 7, 48).to(dtype)


def wide(made, dtype=torch.float64):
    return (made.weight.double() * made.weight_scale.double()[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_product_and_gradients(small_blocks, dtype):
    """Against F.linear in float64. Rows that change as soon as their gradient is out do not reach the input's gradient."""
    made, x, upstream = layer(dtype)
    weight = wide(made).requires_grad_()
    twin = x.detach().double().requires_grad_()
    wanted = F.linear(twin, weight)
    wanted.backward(upstream.double())
    found = []

    def update(first, grad):
        assert made.weight[first:first + len(grad)].float().abs().max() > 0, "a row is handed over once"
        found.append(grad.clone())
        made.weight[first:first + len(grad)] = 0

    made.update_rows = update
    out = made(x)
    out.backward(upstream)
    limit = 1e-10 if dtype == torch.float64 else 0.02
    for one, other in ((out, wanted), (x.grad, twin.grad), (torch.cat(found), weight.grad)):
        assert one.dtype == dtype and (one - other).abs().max() <= limit * other.abs().max()
    assert len(found) == 10 and (made.weight == 0).all() and made.weight.grad is None


def test_bias_and_no_gradients(small_blocks):
    made, x, upstream = layer(torch.float32, bias=True)
    with torch.no_grad():
        made.bias.normal_()
    made.update_rows = lambda *_: pytest.fail("updated")
    with torch.no_grad():
        out = made(x)
    torch.testing.assert_close(out, F.linear(x, wide(made, torch.float32), made.bias))
    made.update_rows = None
    made(x).backward(upstream)
    torch.testing.assert_close(made.bias.grad, upstream.flatten(0, 1).sum(0))


def test_checkpointing_runs_no_product_for_nothing(monkeypatch):
    """The recomputation of a layer ends when all inputs of its products are there: before the last product."""
    made, x, _ = layer(torch.float32)
    last = Int8Linear(48, 32, bias=False)
    last.initialise(0.2)
    ran = []
    product = Int8Linear.product
    monkeypatch.setattr(Int8Linear, "product", lambda self, x: ran.append(self) or product(self, x))
    grads = []
    for run in (lambda x: last(made(x).sin()), lambda x: checkpoint(lambda x: last(made(x).sin()), x, use_reentrant=False)):
        ran.clear()
        x.grad = None
        out = run(x)
        out.sum().backward()
        grads.append(x.grad)
    assert ran == [made, last, made] and torch.equal(*grads)


def test_initial_weights():
    """N(0, std) to a 254th of a row's range, the same for any size of blocks, and never in another dtype for a whole weight."""
    made, _, _ = layer()
    torch.manual_seed(0)
    values = torch.empty(48, 32).normal_(std=0.2)
    assert torch.equal(made.weight.abs().amax(1), torch.full((48,), 127))
    assert ((wide(made) - values).abs() <= 0.5001 * made.weight_scale[:, None]).all()


def test_building_takes_the_bytes_of_int8(make_shape, peak_bytes):
    shape = make_shape(hidden_size=512, intermediate_size=2048, num_hidden_layers=4, head_dim=128)
    kept = sum(tensor.nbytes for tensor in new_model(shape, "int8").parameters())
    assert kept < 1.1 * shape.parameter_count
    assert peak_bytes(lambda: new_model(shape, "int8")) < kept + 3 * 4 * int8_module.BLOCK_NUMBERS < 4 * shape.parameter_count


def test_head(small_blocks):
    """Loss, gradient of hidden and rows of the weight's gradient are those of the widened head."""
    torch.manual_seed(0)
    hidden, targets = torch.randn(30, 32, dtype=torch.float64), torch.randint(0, 300, (30,))
    head = Int8Linear(32, 300, bias=False)
    head.initialise(0.2)
    found = []
    one, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    weight = wide(head).requires_grad_()
    F.cross_entropy(F.linear(other, weight), targets, reduction="sum").backward()
    loss = linear_cross_entropy(one.float(), head.weight, targets, 7, lambda first, grad: found.append(grad.clone()),
                                head.weight_scale)
    loss.backward()
    assert loss.item() == pytest.approx(F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum").item(), rel=1e-5)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(found).double(), weight.grad, rtol=1e-4, atol=1e-5)


def int8_model(shape, seed=0):
    torch.manual_seed(seed)
    model = new_model(shape, "int8")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.bfloat16:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            elif name.endswith("scale"):
                parameter.mul_(10)
    return model.eval()


class Tokenizer:
    bos_token_id, eos_token_id, pad_token_id = None, 0, None

    def save_pretrained(self, folder):
        pass


@pytest.mark.parametrize("shards", ["5GB", "20KB"])
def test_export_is_the_model_in_transformers(make_shape, tmp_path, shards):
    """In float32 the very numbers; in bfloat16 the same loss to 1e-3."""
    import transformers

    model = int8_model(make_shape())
    ids, targets = batch()
    with torch.no_grad():
        ours = model(ids, targets).item() / (targets >= 0).sum().item()
    for dtype in ("float32", "bfloat16"):
        export(model.state_dict(), model.config, Tokenizer(), tmp_path / dtype, dtype, shards)
        assert (tmp_path / dtype / "model.safetensors.index.json").exists() == (shards == "20KB")
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype, output_loading_info=True,
                                                                        dtype=getattr(torch, dtype))
        assert not any(info.values()), info
        with torch.no_grad():
            logits = theirs(ids).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).item()
        assert loss == pytest.approx(ours, rel=1e-3), dtype
    wide_weights = dict(load_model(str(tmp_path / "float32")).named_parameters())
    name = "model.layers.0.mlp.down_proj.weight"
    own = model.get_submodule(name.removesuffix(".weight"))
    assert torch.equal(wide_weights[name], own.weight.float() * own.weight_scale[:, None])


def test_weights_of_a_folder_are_quantised_by_rows(small_blocks, make_model, tmp_path):
    wide_model = make_model(tie_word_embeddings=False)
    export(wide_model.state_dict(), wide_model.config, Tokenizer(), tmp_path / "export", max_shard_size="20KB")
    model = new_model(wide_model.config, "int8")
    load_weights(model, str(tmp_path / "export"))
    for name, parameter in wide_model.named_parameters():
        own = dict(model.named_parameters())[name]
        if own.dtype == torch.int8:
            scale = dict(model.named_parameters())[name + "_scale"]
            torch.testing.assert_close(scale, parameter.abs().amax(1) / 127)
            assert ((own * scale[:, None] - parameter).abs() <= 0.5001 * scale[:, None]).all(), name
        else:
            assert torch.equal(own, parameter.to(torch.bfloat16)), name


@pytest.mark.parametrize("param_dtype", ["float32", "int8"])
def test_a_start_from_a_folder_makes_no_random_weights(param_dtype, make_model, tmp_path, monkeypatch):
    """7B of them would take a minute; nothing of what was there before may be left."""
    from memtrain.config import make_config
    from memtrain.training.step import build_model

    wide_model = make_model(tie_word_embeddings=False)
    export(wide_model.state_dict(), wide_model.config, Tokenizer(), tmp_path / "export")
    options = {"optimizer": "adafactor", "optimizer_in_backward": True, "head_in_blocks": True, "max_grad_norm": None}
    config = make_config({"model": str(tmp_path / "export"), "max_steps": 1, "param_dtype": param_dtype,
                          **(options if param_dtype == "int8" else {})})
    monkeypatch.setattr(LlamaForCausalLM, "_initialise", lambda *_: pytest.fail("random weights"))
    model = build_model(config, wide_model.config)
    found, wanted = model.state_dict(), wide_model.state_dict()
    for name, tensor in wanted.items():
        own = widened(found[name], found.get(name + "_scale"), torch.float32)
        assert (own - tensor).abs().max() <= (0 if param_dtype == "float32" else 0.01 * tensor.abs().max()), name


def test_own_weights_come_back_as_they_are(make_shape, tmp_path):
    from safetensors.torch import save_file

    model = int8_model(make_shape())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    again = new_model(model.config, "int8")
    load_weights(again, str(tmp_path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    from memtrain.command import BadInput

    with pytest.raises(BadInput, match="_scale has no place"):
        load_weights(LlamaForCausalLM(model.config), str(tmp_path))


def test_files_are_those_of_the_library(small_blocks, tmp_path):
    """What we write, safetensors reads: matrices, vectors, every dtype, int8 widened."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    tensors = {"matrix": torch.randn(13, 32), "vector": torch.randn(7), "narrow": torch.randn(4, 32).bfloat16()}
    tensors["int8"], scale = torch.empty(13, 32, dtype=torch.int8), torch.empty(13)
    quantise_(tensors["int8"], scale, tensors["matrix"])
    for dtype in ("float32", "bfloat16", "float16"):
        write_tensors(tmp_path / "file.safetensors", tensors, {"int8": scale}, dtype)
        found = load_file(tmp_path / "file.safetensors")
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            wanted = widened(tensor, scale, torch.float32) if name == "int8" else tensor
            assert torch.equal(found[name], wanted.to(getattr(torch, dtype))), name


def test_export_casts_a_few_rows_at_a_time(make_shape, tmp_path, peak_bytes, monkeypatch):
    monkeypatch.setattr(int8_module, "BLOCK_NUMBERS", 4096)
    model = int8_model(make_shape(vocab_size=4096, hidden_size=64))
    weights = model.state_dict()
    assert peak_bytes(lambda: export(weights, model.config, Tokenizer(), tmp_path / "export", "float32")) < 16 * 4096
