"""From a run's options to an optimizer: parameter groups, and a table from names to constructors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memtrain.config import RunConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, which decay, and one-dimensional parameters (norms, biases), which do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.dim() >= 2]
    vectors = [parameter for parameter in trainable if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _adamw(groups: list[dict[str, Any]], config: RunConfig) -> torch.optim.Optimizer:
    # fused: one pass over memory and no temporaries (foreach needs several copies of all parameters)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
                             eps=config.adam_eps, fused=True)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], RunConfig], torch.optim.Optimizer]] = {"adamw": _adamw}


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """The optimizer `config.optimizer` over the trainable parameters of `model`."""
    return OPTIMIZERS[config.optimizer](parameter_groups(model, config.weight_decay), config)
