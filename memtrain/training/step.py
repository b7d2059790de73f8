"""Build a run, and the one forward/backward/update there is: the trainer runs it on data, an estimate on fake tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
    set_seed,
)
from torch import Tensor

from memtrain.command import BadInput
from memtrain.data.order import Update, check_row_count
from memtrain.data.prepare import Data
from memtrain.model.embedding import Embedding, Int8Embedding
from memtrain.model.huggingface import load_weights
from memtrain.model.int8 import Int8Linear
from memtrain.model.llama import LlamaForCausalLM, new_model
from memtrain.model.presets import LlamaConfig, is_weights_source
from memtrain.optim.factory import make_optimizer, rows_updater, update_in_backward
from memtrain.optim.schedule import learning_rate_factor
from memtrain.options import RunConfig

Result = TypeVar("Result")


@dataclass
class TrainState:
    """All that a training step reads and changes. `model`, `optimizer` and `scheduler` are as Accelerate prepared them."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any
    max_grad_norm: float | None
    in_backward: bool = False

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self.scheduler.get_last_lr()[0]


@dataclass
class StepResult:
    """loss_sum: float32 scalar on the device, summed over this process's targets. grad_norm: scalar on the device, over
    all processes, before clipping; None where no moment has all gradients. applied: whether the weights moved."""

    loss_sum: Tensor
    target_count: int
    grad_norm: Tensor | None
    applied: bool


def make_accelerator(config: RunConfig) -> Accelerator:
    """The Accelerator of a run; precision from the options, else from the launch configuration."""
    handlers: list[Any] = [
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # the buckets are the gradients: no second copy
        InitProcessGroupKwargs(timeout=timedelta(hours=6)),  # the first process may tokenise a large corpus for long
    ]
    precision = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    # Each weight is used once in a forward: kept casts (2 bytes a parameter) would never be used again.
    handlers.append(AutocastKwargs(cache_enabled=False))
    if precision == "fp8":
        handlers.append(AORecipeKwargs())
    # The schedule counts updates that were made, on any number of processes: the loop steps it, not Accelerate.
    return Accelerator(mixed_precision=precision, step_scheduler_with_optimizer=False, log_with=config.report_to,
                       project_dir=config.output_dir if config.report_to else None, kwargs_handlers=handlers)


def on_main_first(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """`work()` on the main process, then on the others (which find its caches). Its BadInput ends all of them alike."""
    result: Result | None = None
    problem: list[str | None] = [None]
    if accelerator.is_main_process:
        try:
            result = work()
        except BadInput as error:
            problem = [str(error)]
    broadcast_object_list(problem)
    if problem[0] is not None:
        raise BadInput(problem[0])
    return work() if result is None else result


def build_model(config: RunConfig, shape: LlamaConfig, initialise: bool = True) -> LlamaForCausalLM:
    """The model with its first weights (from the seed, or those of `config.model`), on the CPU, in `param_dtype`. initialise:
    False where others are read over them."""
    set_seed(config.seed)
    from_source = is_weights_source(config.model)
    model = new_model(shape, config.param_dtype, initialise and not from_source)
    if initialise and from_source:
        load_weights(model, config.model)
    set_recipe(model, config)
    return model


def set_recipe(model: LlamaForCausalLM, config: RunConfig) -> None:
    """How the model computes its gradients, which may change between updates."""
    model.set_gradient_checkpointing(config.gradient_checkpointing, config.checkpointed_layers, config.compile)
    model.model.offload_activations = config.offload_activations
    model.model.recomputed_rows = None if config.recomputed_rows == "all" else int(config.recomputed_rows)
    model.loss_chunk_tokens = None if config.loss_chunk_tokens == "auto" else int(config.loss_chunk_tokens)


def build(config: RunConfig, shape: LlamaConfig, accelerator: Accelerator, total_steps: int,
          initialise: bool = True) -> TrainState:
    """Model, optimizer and schedule of a run, prepared by Accelerate. initialise: False where a checkpoint is read over it."""
    model = build_model(config, shape, initialise)
    optimizer = make_optimizer(model, config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, total_steps, config))
    # each process draws its own dropout
    torch.manual_seed(config.seed + accelerator.process_index)
    model, prepared_optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if config.optimizer_in_backward:
        update_in_backward(optimizer)
    if config.head_in_blocks:
        causal = accelerator.unwrap_model(model, keep_torch_compile=False)
        causal.update_head_rows = rows_updater(optimizer, causal.head_weight, getattr(causal.lm_head, "weight_scale", None))
        for module in causal.model.modules():
            if isinstance(module, (Embedding, Int8Embedding, Int8Linear)):
                module.update_rows = rows_updater(optimizer, module.weight, getattr(module, "weight_scale", None))
    return TrainState(accelerator, model, prepared_optimizer, scheduler, config.max_grad_norm, config.optimizer_in_backward)


def micro_batch_size(config: RunConfig, num_processes: int) -> int:
    """Rows of one forward on one process: the option, or (auto) this process's whole share of an update."""
    if config.micro_batch_size != "auto":
        return int(config.micro_batch_size)
    return config.global_batch_size // num_processes


def total_steps(config: RunConfig, row_count: int | None, num_processes: int) -> int:
    """Updates of the whole run over `row_count` rows an epoch (None: a stream). Raises BadInput for too few rows.

    The last update of the last epoch may be short; it is an update like any other, over the targets it has.
    """
    if row_count is not None:
        check_row_count(row_count, config.global_batch_size, num_processes)
    if config.max_steps is not None:
        return config.max_steps
    assert config.epochs is not None and row_count is not None, "config_problems() asks for max_steps with a stream"
    return math.ceil(config.epochs * row_count / config.global_batch_size)


def samples_in_run(config: RunConfig, row_count: int | None) -> int | None:
    """Samples after which the run ends even if updates were skipped (fp16 overflows); None where updates alone count."""
    return None if config.epochs is None or row_count is None else config.epochs * row_count


def training_updates(config: RunConfig, data: Data, position: int, accelerator: Accelerator) -> Iterable[Update]:
    """This process's share of every update from `position` (samples since the start of the run) on."""
    return data.updates(seed=config.seed, start_position=position, total=samples_in_run(config, data.row_count),
                        global_batch_size=config.global_batch_size,
                        micro_batch_size=micro_batch_size(config, accelerator.num_processes),
                        rank=accelerator.process_index, world_size=accelerator.num_processes,
                        num_workers=config.num_workers, pin_memory=accelerator.device.type == "cuda")


def forward_loss(state_or_model: Any, batch: dict[str, Any], device: torch.device) -> Tensor:
    """Summed loss of a micro-batch, float32 scalar."""
    moved = {name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
             for name, value in batch.items()}
    return state_or_model(**moved)


def train_step(state: TrainState, update: Update) -> StepResult:
    """One update: the loss is the sum over its real targets / their number, over all micro-batches and processes.

    An update without a single target changes nothing. Gradients are clipped once, by their norm over the whole update. Under
    a gradient scaler, an update whose gradients overflowed moves neither weights nor schedule (`applied` is False).
    """
    accelerator = state.accelerator
    loss_sum = torch.zeros((), device=accelerator.device)
    if update.target_count == 0:
        return StepResult(loss_sum, 0, None, applied=False)
    state.model.train()
    # data-parallel gradients are averaged over processes; the loss of an update is a sum
    scale = accelerator.num_processes / update.target_count
    last = len(update.micro_batches) - 1
    for index, batch in enumerate(update.micro_batches):
        with nullcontext() if index == last else accelerator.no_sync(state.model):
            loss = forward_loss(state.model, batch, accelerator.device)
            accelerator.backward(loss * scale)
        loss_sum += loss.detach()
    # without a limit the norm is still wanted: a non-finite one must stop the run before it is saved
    limit = math.inf if state.max_grad_norm is None else state.max_grad_norm
    grad_norm = None if state.in_backward else accelerator.clip_grad_norm_(state.model.parameters(), limit)
    applied = optimizer_step(state)
    return StepResult(loss_sum, update.target_count, grad_norm, applied)


def optimizer_step(state: TrainState) -> bool:
    """Update weights and schedule, free the gradients. False when the scaler found an overflow and nothing moved."""
    scaler = state.accelerator.scaler
    before = scaler.get_scale() if scaler is not None else 0.0
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    # Accelerate's own flag misses an overflow with a fused optimizer; a lowered scale is the scaler's word for one
    applied = scaler is None or scaler.get_scale() >= before
    if applied:
        state.scheduler.step()
    return applied


@torch.no_grad()
def evaluate(model: Any, accelerator: Accelerator, batches: Iterable[dict[str, Any]]) -> tuple[float, int]:
    """(sum of -log p over all targets, number of targets), over all processes.

    `batches` gives every process the same number of micro-batches; padding targets count nothing, so the sums depend neither
    on the size of the batches nor on the number of processes.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        loss = forward_loss(model, batch, accelerator.device)
        totals += torch.tensor([loss.item(), (batch["targets"] >= 0).sum().item()], dtype=torch.float64)
    device_totals = totals if accelerator.device.type == "cpu" else totals.to(accelerator.device)
    loss_sum, count = accelerator.reduce(device_totals, "sum").tolist()
    return loss_sum, int(count)
