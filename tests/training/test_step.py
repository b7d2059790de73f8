"""The one training step against plain torch in float64, and under real fp16 with a real gradient scaler."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from jobs import reset_accelerate

from memtrain.data.order import Update
from memtrain.model.llama import LlamaForCausalLM
from memtrain.model.presets import LlamaConfig
from memtrain.optim.schedule import learning_rate_factor
from memtrain.options import RunConfig
from memtrain.training import step as steps
from memtrain.training.checkpoint import RunState, load_checkpoint, save_checkpoint
from memtrain.training.metrics import TrainLog
from memtrain.training.progress import Progress
from memtrain.training.step import TrainState, build, evaluate, train_step

SHAPE = LlamaConfig(97, 32, 64, 2, 4, 2, 8, max_position_embeddings=64)
SEQ = 20
pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def make_config(**options):
    return RunConfig(**{"max_steps": 8, "learning_rate": 0.01, "warmup_steps": 2, "max_grad_norm": None, **options})


def make_accelerator(precision="no"):
    return Accelerator(cpu=True, mixed_precision=precision, step_scheduler_with_optimizer=False)


def make_state(config=None, accelerator=None, total_steps=8):
    return build(config or make_config(), SHAPE, accelerator or make_accelerator(), total_steps)


def make_rows(*target_counts, seed=0):
    """Right-padded rows of SEQ positions with so many targets: input_ids and targets, int64 [N, SEQ]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(97, (len(target_counts), SEQ + 1), generator=generator)
    real = torch.arange(SEQ)[None] < torch.tensor(target_counts)[:, None]
    return {"input_ids": tokens[:, :-1].clone(), "targets": tokens[:, 1:].where(real, -100)}


def make_update(batch, micro_batch_size):
    """All rows of `batch` as micro-batches of that size."""
    count = len(batch["input_ids"])
    parts = [{name: value[i:i + micro_batch_size] for name, value in batch.items()}
             for i in range(0, count, micro_batch_size)]
    return Update(parts, int((batch["targets"] >= 0).sum()), count, count)


def weights(state):
    model = state.accelerator.unwrap_model(state.model)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def gradients_of(batch, micro_batch_size, monkeypatch, **options):
    """What the optimizer is about to apply."""
    state = make_state(make_config(**options))
    caught = {}

    def catch(s):
        caught.update({name: p.grad.clone() for name, p in s.model.named_parameters() if p.grad is not None})
        return True

    monkeypatch.setattr(steps, "optimizer_step", catch)
    return caught, train_step(state, make_update(batch, micro_batch_size))


def reference_gradients(batch):
    """Gradients of the mean over all real targets, in float64, by F.cross_entropy on the whole logits."""
    config = make_config()
    model = steps.build_model(config, SHAPE).double()
    logits = model(batch["input_ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.item()


# ---- A: loss and accumulation ----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("target_counts", "micro_batch_sizes"), [
    ((15, 3), (1, 2)),  # A1
    ((20, 20, 20, 20, 20), (1, 2, 4, 5)),  # A2: 5 rows by 4 leave a tail of one
    ((20, 1, 7, 0, 13, 2), (1, 2, 3, 6)),  # A6: one row has no target at all
])
def test_gradients_are_of_the_token_mean(target_counts, micro_batch_sizes, monkeypatch):
    batch = make_rows(*target_counts)
    reference, loss = reference_gradients(batch)
    scale = max(float(value.abs().max()) for value in reference.values())
    for size in micro_batch_sizes:
        found, result = gradients_of(batch, size, monkeypatch)
        assert found.keys() == reference.keys()
        error = max(float((found[name] - reference[name]).abs().max()) for name in reference) / scale
        assert error < 1e-5, f"micro-batch {size}: relative error {error}"
        assert float(result.loss_sum) / result.target_count == pytest.approx(loss, rel=1e-6)


def test_uneven_rows_agree_to_1e6(monkeypatch):
    """A1: 2 x 1 and 1 x 2."""
    batch = make_rows(15, 3)
    one, two = (gradients_of(batch, size, monkeypatch)[0] for size in (1, 2))
    for name in one:
        assert (one[name] - two[name]).norm() <= 1e-6 * two[name].norm(), name


def test_an_update_without_targets_changes_nothing():
    """A6."""
    state = make_state()
    train_step(state, make_update(make_rows(20, 20), 1))
    before, rate = weights(state), state.learning_rate
    moments = copy.deepcopy(state.optimizer.state_dict())
    result = train_step(state, make_update(make_rows(0, 0), 1))
    assert not result.applied and result.target_count == 0 and float(result.loss_sum) == 0.0
    assert state.learning_rate == rate
    assert all(torch.equal(before[name], value) for name, value in weights(state).items())
    after = state.optimizer.state_dict()
    assert all(torch.equal(moments["state"][i][key], after["state"][i][key])
               for i in moments["state"] for key in ("step", "exp_avg", "exp_avg_sq"))


class Weight(torch.nn.Module):
    """loss = sum of weight * factor: the gradients are made by hand."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, factor):
        return (self.weight * factor).sum()


def weight_state(max_grad_norm):
    accelerator = make_accelerator()
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return TrainState(accelerator, *accelerator.prepare(model, optimizer, scheduler), max_grad_norm)


@pytest.mark.parametrize(("factors", "limit", "applied", "norm"), [
    ((20.0, -18.0), 3.0, 1.0, 1.0),  # A4: clipped a micro-batch at a time it would be 0 (or -3 by the last one)
    ((20.0, 18.0), 3.0, 3.0, 19.0),
    ((20.0, 18.0), None, 19.0, 19.0),
])
def test_gradients_are_clipped_once_per_update(factors, limit, applied, norm):
    state = weight_state(limit)
    result = train_step(state, Update([{"factor": torch.tensor([f])} for f in factors], 2, 2, 2))
    assert float(result.grad_norm) == pytest.approx(norm)
    assert state.model.weight.item() == pytest.approx(-applied, rel=1e-5)


def test_gradients_do_not_pile_up_over_updates():
    state = weight_state(None)
    for total in (-2.0, -4.0):
        train_step(state, Update([{"factor": torch.tensor([2.0])}], 1, 1, 1))
        assert state.model.weight.item() == total


def test_trajectory_equals_plain_torch():
    """8 updates against a plain loop in float64 with AdamW written out (arXiv 1711.05101, algorithm 2)."""
    config = make_config(max_grad_norm=0.5, weight_decay=0.1)
    state = make_state(config)
    model = steps.build_model(config, SHAPE).double()
    first = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    # weights of float32 can follow float64 only while gradients are far from eps
    for step in range(8):
        batch = make_rows(20, 3, 11, 20, seed=step)
        rate = state.learning_rate
        assert rate == pytest.approx(0.01 * learning_rate_factor(step, 8, config), rel=1e-12)
        result = train_step(state, make_update(batch, 2))
        model.zero_grad()
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        assert float(result.loss_sum) / result.target_count == pytest.approx(loss.item(), rel=1e-5)
        assert float(result.grad_norm) == pytest.approx(norm, rel=1e-4)
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = p.grad * min(1.0, 0.5 / norm)
                first[name].lerp_(g, 1 - 0.9)
                second[name].mul_(0.95).addcmul_(g, g, value=0.05)
                p.mul_(1 - rate * (0.1 if p.dim() > 1 else 0.0))
                p.sub_(rate * (first[name] / (1 - 0.9 ** (step + 1)))
                       / ((second[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8))
    found, wanted = weights(state), dict(model.named_parameters())
    for name in wanted:
        assert (found[name] - wanted[name]).norm() < 1e-3 * wanted[name].norm(), name


# ---- B: precision ----------------------------------------------------------------------------------------------------

def test_optimizer_holds_float32_under_bf16():
    """B1."""
    state = make_state(accelerator=make_accelerator("bf16"))
    seen = []
    state.accelerator.unwrap_model(state.model).model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype))
    train_step(state, make_update(make_rows(20, 20), 1))
    assert seen == [torch.bfloat16] * 2, "autocast is on"
    held = [p for group in state.optimizer.param_groups for p in group["params"]]
    assert len(held) == len(list(state.model.parameters()))
    assert {p.dtype for p in held} == {torch.float32}
    assert {value.dtype for entry in state.optimizer.state.values() for value in entry.values()} == {torch.float32}


def fp16_accelerator(scale=65536.0, growth_interval=2000):
    """Real fp16 autocast with a real gradient scaler, on a CPU. (Accelerate alone would train in fp32.)"""
    accelerator = make_accelerator("fp16")
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    return accelerator


def test_norm_and_clipping_under_a_scaler():
    """A5: reported and clipped norm are those without the scale of 65536."""
    batch = make_rows(20, 20, 5)
    found = {}
    for name in ("fp32", "fp16"):
        reset_accelerate()
        steps_state = make_state(make_config(max_grad_norm=0.1), fp16_accelerator() if name == "fp16" else None)
        caught = []
        steps_state.optimizer.optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs, caught=caught: caught.append(torch.stack(
                [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]).norm().item()))
        result = train_step(steps_state, make_update(batch, 1))
        assert result.applied
        found[name] = (float(result.grad_norm), caught[0])
    assert found["fp32"][0] > 0.5, "there must be something to clip"
    assert found["fp16"][0] == pytest.approx(found["fp32"][0], rel=1e-3)
    assert found["fp16"][1] == pytest.approx(0.1, rel=1e-3) and found["fp32"][1] == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_moves_nothing(fused, monkeypatch):
    """B4, and training goes on after it."""
    if not fused:
        monkeypatch.setattr(steps, "make_optimizer",
                            lambda model, config: torch.optim.AdamW(model.parameters(), lr=0.01, fused=False))
    state = make_state(accelerator=fp16_accelerator(scale=1024.0))
    good = make_update(make_rows(20, 20), 1)
    assert train_step(state, good).applied
    before, rate, moments = weights(state), state.learning_rate, copy.deepcopy(state.optimizer.state_dict())
    scheduled = state.scheduler.state_dict()["last_epoch"]
    state.accelerator.scaler._scale.fill_(2.0**60)
    assert not train_step(state, good).applied
    assert state.accelerator.scaler.get_scale() == 2.0**59
    assert state.learning_rate == rate and state.scheduler.state_dict()["last_epoch"] == scheduled
    assert all(torch.equal(before[name], value) for name, value in weights(state).items())
    after = state.optimizer.state_dict()
    assert all(torch.equal(moments["state"][i][key], after["state"][i][key])
               for i in moments["state"] for key in moments["state"][i])
    assert all(p.grad is None for p in state.model.parameters())
    state.accelerator.scaler._scale.fill_(1024.0)
    assert train_step(state, good).applied
    assert not all(torch.equal(before[name], value) for name, value in weights(state).items())
    assert state.scheduler.state_dict()["last_epoch"] == scheduled + 1


def test_a_scale_that_grows_is_no_overflow():
    state = make_state(accelerator=fp16_accelerator(scale=4.0, growth_interval=1))
    for step in range(3):
        assert train_step(state, make_update(make_rows(20, 20), 1)).applied
        assert state.accelerator.scaler.get_scale() == 4.0 * 2 ** (step + 1)


def test_overflows_at_any_scale_stop_the_run(tmp_path):
    from memtrain.command import TrainingStopped

    state = make_state(accelerator=fp16_accelerator())
    log = TrainLog(tmp_path / "metrics.jsonl", state.accelerator)
    log.check_scale()
    state.accelerator.scaler.scale(torch.ones(1))
    state.accelerator.scaler._scale.fill_(1e-5)
    with pytest.raises(TrainingStopped, match="overflow in fp16"):
        log.check_scale()


# ---- save and load ---------------------------------------------------------------------------------------------------

class Tokenizer:
    """As much of one as a checkpoint needs."""

    def save_pretrained(self, folder):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")


def save(state, folder, progress):
    return save_checkpoint(state, RunState(progress, 1, {}, {}, "data"), Tokenizer(), folder, keep_last=9)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_save_and_load(tmp_path, precision, after):
    """B3 and D8: after a load, weights, moments, schedule, scaler and the updates that follow are equal bit for bit."""
    def make():
        reset_accelerate()
        return make_state(accelerator=make_accelerator(precision) if precision != "fp16" else
                          fp16_accelerator(scale=2.0**20, growth_interval=3))

    def results(state, updates):
        return [(float(r.loss_sum), float(r.grad_norm), r.applied) for r in (train_step(state, u) for u in updates)]

    updates = [make_update(make_rows(20, 4, 20, seed=step), 1) for step in range(6)]
    state = make()
    for update in updates[:after]:
        train_step(state, update)
    run = RunState(Progress(after, 3 * after), 1, {}, {}, "data")
    path = save(state, tmp_path, run.progress)
    scaler_before = state.accelerator.scaler.state_dict() if precision == "fp16" else None
    following = results(state, updates[after:])

    said = []
    other = make()
    load_checkpoint(other, path, run, said.append)
    assert said == []
    if precision == "fp16":
        assert other.accelerator.scaler.state_dict() == scaler_before
        assert scaler_before["scale"] != 2.0**20 or after == 0, "the scaler must have something to remember"
    # as text, because an overflow may have a norm that is not equal to itself
    assert repr(results(other, updates[after:])) == repr(following)
    assert weights(other).keys() == weights(state).keys()
    assert all(torch.equal(value, weights(state)[name]) for name, value in weights(other).items())
    assert other.learning_rate == state.learning_rate


# ---- evaluation ------------------------------------------------------------------------------------------------------

def test_evaluation_is_the_token_mean_for_every_batch_size():
    """H3 on one process, against float64."""
    batch = make_rows(20, 3, 20, 11, 1)
    state = make_state()
    model = copy.deepcopy(state.accelerator.unwrap_model(state.model)).double().eval()
    with torch.no_grad():
        wanted = float(F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten()))
    for size in (1, 2, 4, 5):
        loss_sum, count = evaluate(state.model, state.accelerator, make_update(batch, size).micro_batches)
        assert count == 55 and loss_sum / count == pytest.approx(wanted, rel=1e-6), size


def test_evaluation_leaves_training_as_it_was(monkeypatch):
    """No gradients, no draw from the random numbers, and dropout is on again in the next step."""
    shape = LlamaConfig(97, 32, 64, 2, 4, 2, 8, attention_dropout=0.5)
    state = build(make_config(), shape, make_accelerator(), 8)
    before = torch.get_rng_state()
    evaluate(state.model, state.accelerator, make_update(make_rows(20, 20), 1).micro_batches)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in state.model.parameters())
    train_step(state, make_update(make_rows(20, 20), 1))
    assert state.model.training and not torch.equal(before, torch.get_rng_state())


# ---- sizes -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("epochs", "row_count", "rows", "wanted"), [
    (1, 16, 8, 2), (1, 17, 8, 3), (3, 9, 8, 4), (2, 4, 8, 1),
])
def test_total_steps(epochs, row_count, rows, wanted):
    config = RunConfig(epochs=epochs, global_batch_size=rows)
    assert steps.total_steps(config, row_count, 1) == wanted
    assert steps.samples_in_run(config, row_count) == epochs * row_count
    assert steps.total_steps(RunConfig(max_steps=5, global_batch_size=rows), row_count, 1) == 5
    assert steps.samples_in_run(RunConfig(max_steps=5), row_count) is None


def test_micro_batch_size():
    assert [steps.micro_batch_size(RunConfig(global_batch_size=8), n) for n in (1, 2, 4)] == [8, 4, 2]
    assert steps.micro_batch_size(RunConfig(global_batch_size=8, micro_batch_size=2), 2) == 2


def test_the_seed_decides_the_first_weights():
    def first(seed):
        return steps.build_model(make_config(seed=seed), SHAPE).model.embed_tokens.weight

    assert torch.equal(first(3), first(3)) and not torch.equal(first(3), first(4))


def test_param_dtype_holds_for_weights_and_state_alone():
    default = torch.get_default_dtype()
    state = make_state(make_config(param_dtype="bfloat16"))
    assert torch.get_default_dtype() == default
    assert {p.dtype for p in state.model.parameters()} == {torch.bfloat16}
    result = train_step(state, make_update(make_rows(20, 20), 1))
    assert result.loss_sum.dtype == torch.float32
    assert math.isfinite(float(result.loss_sum))


def test_gradient_checkpointing_changes_no_bit(monkeypatch):
    """C1 through the training step, with dropout."""
    batch = make_rows(20, 7, 20, 3)
    shape = LlamaConfig(97, 32, 64, 2, 4, 2, 8, attention_dropout=0.1)
    found = []
    for kind in ("none", "full"):
        reset_accelerate()
        state = build(make_config(gradient_checkpointing=kind), shape,
                      make_accelerator(), 8)
        train_step(state, make_update(batch, 2))
        found.append(weights(state))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_on_main_first_tells_every_process_of_bad_input():
    from memtrain.command import BadInput

    def work():
        raise BadInput("found this, want that")

    with pytest.raises(BadInput, match="found this, want that"):
        steps.on_main_first(Accelerator(cpu=True), work)
    calls = []
    other = SimpleNamespace(is_main_process=False)
    assert steps.on_main_first(other, lambda: calls.append(1) or 7) == 7 and calls == [1]


def test_model_is_ours():
    assert isinstance(steps.build_model(make_config(), SHAPE), LlamaForCausalLM)
