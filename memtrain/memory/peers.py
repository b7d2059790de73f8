"""The training steps that ours is measured beside."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from memtrain.model.presets import LlamaConfig


def transformers_step(shape: LlamaConfig, precision: str, checkpointing: bool) -> Callable[[Tensor], float]:
    """A plain loop's step over ids [rows, tokens + 1]: forward with labels, backward, AdamW. Returns the loss."""
    from transformers import LlamaConfig as TransformersConfig
    from transformers import LlamaForCausalLM

    from memtrain.model.huggingface import config_dict

    values = config_dict(shape, "float32", None, None, None)
    torch.manual_seed(0)
    model = LlamaForCausalLM(TransformersConfig(**{**values, "use_cache": False}))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(ids: Tensor) -> float:
        model.train()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            # labels shift inside; one target less than ours, so both see the same tokens
            loss = model(input_ids=ids[:, :-1], labels=ids[:, :-1]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def has_torchtune() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torchtune", "torchao"))


def torchtune_step(shape: LlamaConfig) -> Callable[[Tensor], float]:
    """torchtune's recipe for least memory, of its and torchao's parts: bfloat16 weights, checkpointed layers, chunked loss,
    torchao's 8-bit AdamW with stochastic rounding, updated in the backward. Returns the loss."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
    from torchao.optim import AdamW8bit
    from torchtune.models.llama3 import llama3
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = llama3(shape.vocab_size, shape.num_hidden_layers, shape.num_attention_heads, shape.num_key_value_heads,
                   shape.hidden_size, shape.max_position_embeddings, rope_base=int(shape.rope_theta),
                   intermediate_dim=shape.intermediate_size)
    torch.set_default_dtype(default)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=shape.initializer_range)
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    assert isinstance(model.layers[0], CheckpointWrapper)
    head_loss = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(head_loss.num_output_chunks)

    def update_with(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def update(parameter: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()
        return update

    for parameter in model.parameters():
        optimizer = AdamW8bit([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, bf16_stochastic_round=True)
        parameter.register_post_accumulate_grad_hook(update_with(optimizer))

    def step(ids: Tensor) -> float:
        model.train()
        loss = head_loss(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        return loss.item()

    return step
