"""The head's gradient in blocks of the vocabulary, each updated and freed in the backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from memtrain.command import BadInput
from memtrain.model import loss as loss_module
from memtrain.model.embedding import Embedding, Int8Embedding
from memtrain.model.loss import IGNORE, linear_cross_entropy
from memtrain.optim.factory import OPTIMIZERS, make_optimizer, rows_updater, update_in_backward
from memtrain.options import RunConfig
from memtrain.rules import config_problems
from memtrain.training.check import check_run

# adamw_factored sums columns in the order of the blocks: tests/optim/test_by_rows.py
BY_ROWS = [name for name in OPTIMIZERS if name not in ("adafactor", "adamw_factored")]
T, D, V = 40, 16, 1000  # several blocks of 256 rows, the last one short


@pytest.fixture
def small_blocks(monkeypatch):
    """256 rows and 4 tokens at a time."""
    monkeypatch.setattr(loss_module, "UPDATE_BYTES", 4 * D * 256)


def example(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=generator).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(V, D, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (T,), generator=generator)
    targets[::5] = IGNORE
    return hidden, weight, targets


def float64_gradient(hidden, weight, targets, scale):
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    (scale * F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORE, reduction="sum")).backward()
    return weight.grad


@pytest.mark.parametrize(("dtype", "autocast", "tolerance"), [
    (torch.float32, False, 1e-6), (torch.bfloat16, False, 1e-2), (torch.float32, True, 1e-2)])
def test_gradients(small_blocks, dtype, autocast, tolerance):
    """Loss and gradient of hidden are those of the whole head bit for bit; the rows, put together, are the gradient."""
    hidden, weight, targets = example(dtype)
    blocks = []
    results = []
    for update in (None, lambda first, grad: blocks.append((first, grad.clone()))):
        hidden.grad = weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy(hidden, weight, targets, 7, update)
        (loss * 0.125).backward()
        results.append((loss.detach(), hidden.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert weight.grad is None and [first for first, _ in blocks] == [0, 256, 512, 768]
    grad = torch.cat([grad for _, grad in blocks])
    assert grad.dtype == torch.float32 and grad.shape == weight.shape
    wanted = float64_gradient(hidden, weight, targets, 0.125)
    assert (grad.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_a_block_may_change_once_its_gradient_is_out(small_blocks):
    """The gradient of hidden and of later rows is that of the weights before the step."""
    hidden, weight, targets = example()
    wanted = float64_gradient(hidden, weight, targets, 1.0)
    found = []

    def update(first, grad):
        found.append(grad.clone())
        with torch.no_grad():
            weight[first:first + len(grad)] = 1e3

    linear_cross_entropy(hidden, weight, targets, 7, update).backward()
    assert (torch.cat(found).double() - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert (weight == 1e3).all()


def test_without_gradients_nothing_is_updated():
    hidden, weight, targets = example()
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, targets, 7, lambda *_: pytest.fail("updated"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding(small_blocks, dtype):
    """The rows, put together, are the gradient of nn.Embedding bit for bit, tokens that come often and never included."""
    ids = torch.randint(0, V // 2, (3, 50), generator=torch.Generator().manual_seed(0))
    ids[0, :20] = 7
    module = Embedding(V, D).to(dtype)
    upstream = torch.randn(3, 50, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    module(ids).backward(upstream)
    wanted, module.weight.grad = module.weight.grad, None
    blocks = []
    module.update_rows = lambda first, grad: blocks.append((first, grad.clone()))
    out = module(ids)
    assert torch.equal(out, F.embedding(ids, module.weight))
    out.backward(upstream)
    assert module.weight.grad is None and [first for first, _ in blocks] == [0, 256, 512, 768]
    assert torch.equal(torch.cat([grad for _, grad in blocks]), wanted)
    with torch.no_grad():
        assert torch.equal(module(ids), out)


def test_int8_embedding(small_blocks):
    """Rows and gradient are those of nn.Embedding with the widened weight, summed in float32; rows may change at once."""
    module = Int8Embedding(V, D)
    module.initialise(0.5)
    module.dtype = torch.bfloat16
    ids = torch.randint(0, V // 2, (3, 50), generator=torch.Generator().manual_seed(0))
    ids[0, :40] = 7
    weight = (module.weight * module.weight_scale[:, None]).requires_grad_()
    assert abs(weight.std() - 0.5) < 0.01
    upstream = torch.randn(3, 50, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = F.embedding(ids, weight)
    wanted.backward(upstream.float())
    assert torch.equal(module(ids), wanted.bfloat16()) and not module(ids).requires_grad
    found = []

    def update(first, grad):
        found.append(grad.clone())
        with torch.no_grad():
            module.weight[first:first + len(grad)] = 0

    module.update_rows = update
    out = module(ids)
    assert torch.equal(out, wanted.bfloat16())
    out.backward(upstream)
    torch.testing.assert_close(torch.cat(found), weight.grad, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        assert (module(ids) == 0).all() and len(found) == 4


@pytest.mark.parametrize("optimizer", BY_ROWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_one_after_the_other_are_the_whole_update(optimizer, dtype):
    """The same gradient, whole and by rows, three times: weights and state bit for bit."""
    config = RunConfig(max_steps=1, optimizer=optimizer, param_dtype=dtype, learning_rate=0.01, seed=5)
    found = []
    for by_rows in (False, True):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(D, V, bias=False)]).to(getattr(torch, dtype))
        model[0].weight.requires_grad_(False)
        weight = model[1].weight
        made = make_optimizer(model, config)
        schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (step + 1))
        for step in range(3):
            # bfloat16 numbers: what a bfloat16 weight's own gradient can hold
            grad = torch.randn(V, D, generator=torch.Generator().manual_seed(step)).bfloat16()
            if by_rows:
                update = rows_updater(made, weight)
                for first in range(0, V, 256):
                    update(first, grad[first:first + 256].float())
            else:
                weight.grad = grad.to(weight.dtype)
                made.step()
                made.zero_grad()
            schedule.step()
        found.append((weight.detach(), made.state[weight]))
    (whole, state), (rows, rows_state) = found
    assert torch.equal(whole, rows)
    assert state.keys() == rows_state.keys()
    for name in state:
        assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(rows_state[name])), name


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_training_goes_the_same_way(make_model, optimizer):
    """The head's gradient is summed in another order; nothing else differs from the update in the backward."""
    batch = torch.randint(0, 97, (2, 17), generator=torch.Generator().manual_seed(0))
    model = make_model()
    weights = []
    for by_rows in (False, True):
        trained = copy.deepcopy(model)
        made = make_optimizer(trained, RunConfig(max_steps=1, optimizer=optimizer, max_grad_norm=None))
        update_in_backward(made)
        if by_rows:
            trained.update_head_rows = rows_updater(made, trained.head_weight)
            trained.model.embed_tokens.update_rows = rows_updater(made, trained.model.embed_tokens.weight)
        for _ in range(3):
            (trained(batch[:, :-1], batch[:, 1:]) / 32).backward()
        assert {int(state["step"]) for state in made.state.values()} == {3}
        assert len(made.state) == len(list(trained.parameters()))
        weights.append({name: weight.detach() for name, weight in trained.named_parameters()})
    for name, weight in weights[0].items():
        # three steps of 3e-4; Adam's first steps are as long for any gradient, so a sign of a tiny one may turn
        assert (weight - weights[1][name]).abs().mean() < 1e-6, name
        assert not torch.equal(weight, dict(model.named_parameters())[name])


def test_the_whole_gradient_never_exists(make_model, peak_bytes, monkeypatch):
    monkeypatch.setattr(loss_module, "UPDATE_BYTES", 4 * 32 * 256)
    peaks = {}
    for by_rows in (False, True):
        model = make_model(vocab_size=32768)
        made = make_optimizer(model, RunConfig(max_steps=1, optimizer="adamw_8bit", max_grad_norm=None))
        update_in_backward(made)
        if by_rows:
            model.update_head_rows = rows_updater(made, model.head_weight)
            model.model.embed_tokens.update_rows = rows_updater(made, model.model.embed_tokens.weight)
        model.loss_chunk_tokens = 1
        batch = torch.zeros(1, 2, dtype=torch.int64)
        model(batch, batch).backward()  # the state exists
        peaks[by_rows] = peak_bytes(lambda model=model, batch=batch: model(batch, batch).backward())
    assert peaks[True] < peaks[False] - 0.5 * model.head_weight.nbytes, peaks


@pytest.mark.parametrize(("changes", "parts"), [
    ({"optimizer_in_backward": False}, ("optimizer_in_backward=false", "set optimizer_in_backward=true")),
    ({"optimizer": "adafactor"}, ("optimizer=adafactor", "head_in_blocks=false")),
])
def test_contradictions_are_refused(changes, parts):
    options = {"max_steps": 1, "head_in_blocks": True, "optimizer_in_backward": True, "max_grad_norm": None}
    (problem,) = config_problems(RunConfig(**{**options, **changes}))
    assert all(part in problem for part in ("head_in_blocks=true", *parts))


def test_a_tied_head_is_refused(tmp_path):
    options = {"max_steps": 1, "head_in_blocks": True, "optimizer_in_backward": True, "max_grad_norm": None,
               "output_dir": str(tmp_path / "run")}
    check_run(RunConfig(**options, tie_word_embeddings=False), 1)
    with pytest.raises(BadInput, match="head_in_blocks=true with tie_word_embeddings=true"):
        check_run(RunConfig(**options, tie_word_embeddings=True), 1)


def test_sharded_rows_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    options = {"max_steps": 1, "head_in_blocks": True, "optimizer_in_backward": True, "max_grad_norm": None,
               "output_dir": str(tmp_path / "run"), "tie_word_embeddings": False}
    with pytest.raises(BadInput, match="head_in_blocks=true on 2 processes"):
        check_run(RunConfig(**options), 2)
