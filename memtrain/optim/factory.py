"""From a run's options to an optimizer: parameter groups, names, and updates within the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from memtrain.optim.low_memory import LowMemoryOptimizer, Rows
from memtrain.options import RunConfig

# name: (update rule, bits of a number of its state)
OPTIMIZERS = {
    "adamw": ("adamw", 32),
    "adamw_8bit": ("adamw", 8),
    "adamw_4bit": ("adamw", 4),
    "adafactor": ("adafactor", 32),
    "lion_8bit": ("lion", 8),
    "adamw_factored": ("adamw_factored", 32),
}

# of adamw_factored: learning rate of the head / that of the other matrices. On the model of `benchmark.py quality`, one
# seed each, 1 and 2 ended at losses of 3.33 and 3.26 with a rate of 1e-3, and 2 and 4 at 3.20 and 3.08 with 7e-4.
HEAD_RATE = 4.0


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, which decay, and one-dimensional parameters (norms, biases), which do not."""
    # int8 matrices have no gradient: their layers hand it over by rows
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad or parameter.dtype == torch.int8]
    matrices = [parameter for parameter in trainable if parameter.dim() >= 2]
    vectors = [parameter for parameter in trainable if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _head_apart(groups: list[dict[str, Any]], head: Tensor | None, **options: Any) -> list[dict[str, Any]]:
    """The same groups, but the head in one of its own, with these options."""
    found = []
    for group in groups:
        others = [parameter for parameter in group["params"] if parameter is not head]
        found += [{**group, "params": others}] if others else []
        found += [{**group, "params": [head], **options}] if len(others) < len(group["params"]) else []
    return found


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, which can also update a matrix by rows. Number for number the same update."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, rows: Rows | None = None) -> float | None:  # type: ignore[override]
        if rows is None:
            return super().step(closure)
        group = next(group for group in self.param_groups if any(rows.parameter is each for each in group["params"]))
        state, zeros = self.state[rows.parameter], partial(torch.zeros_like, rows.parameter.detach())
        if not state:
            state |= {"step": torch.zeros((), device=rows.parameter.device), "exp_avg": zeros(), "exp_avg_sq": zeros()}
        part = slice(rows.first, rows.first + rows.grad.shape[0])
        step = state["step"] if rows.first == 0 else state["step"] - 1  # counted with the first rows
        adamw([rows.parameter.detach()[part]], [rows.grad], [state["exp_avg"][part]], [state["exp_avg_sq"][part]], [], [step],
              amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
              weight_decay=group["weight_decay"], eps=group["eps"], maximize=False, fused=True)
        return None


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """The optimizer `config.optimizer` over the trainable parameters of `model`."""
    groups = parameter_groups(model, config.weight_decay)
    betas = (config.adam_beta1, config.adam_beta2)
    if config.optimizer == "adamw" and config.param_dtype == "float32":
        # fused: one pass over memory and no temporaries (foreach needs several copies of all parameters)
        return FusedAdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_eps, fused=True)
    rule, bits = OPTIMIZERS[config.optimizer]
    if rule == "adafactor" and config.param_dtype == "int8":
        rule = "adafactor_rows"
    elif rule == "adamw_factored":
        groups = _head_apart(groups, getattr(model, "head_weight", None), lr=HEAD_RATE * config.learning_rate,
                             first_moment=config.adam_beta1 > 0)
    return LowMemoryOptimizer(groups, rule=rule, state_bits=bits, lr=config.learning_rate, betas=betas, eps=config.adam_eps,
                              seed=config.seed)


def update_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """From now on each parameter is updated in the backward, as soon as its gradient is complete, and the gradient freed
    (arXiv 2306.09782). The update is that of `optimizer.step()`, which finds this one gradient alone."""
    def update(parameter: Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(update)


def rows_updater(optimizer: torch.optim.Optimizer, parameter: Tensor, scale: Tensor | None = None
                 ) -> Callable[[int, Tensor], None]:
    """(first row, gradient of the rows from there on) -> an update of these rows of `parameter`. scale: of an int8 one."""
    def update(first: int, grad: Tensor) -> None:
        optimizer.step(rows=Rows(parameter, first, grad, scale))  # type: ignore[call-overload]

    return update
