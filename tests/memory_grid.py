"""Configurations on which predictions are compared with what a device gives out."""

from __future__ import annotations

from typing import Any

BF16: dict[str, Any] = {"mixed_precision": "bf16"}
PURE: dict[str, Any] = {"param_dtype": "bfloat16"}
IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": "true", "max_grad_norm": "none"}
IN_BLOCKS = {**IN_BACKWARD, "head_in_blocks": "true", "tie_word_embeddings": "false"}
INT8 = {**IN_BLOCKS, "param_dtype": "int8", "optimizer": "adafactor"}

# precision x checkpointing x optimizer x accumulation x padding x loss chunk x offload
GRID: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 1},
    {"packing": "padded", "tie_word_embeddings": "false"},
    {"gradient_checkpointing": "full", "micro_batch_size": 2},
    {"gradient_checkpointing": "selective", "checkpointed_layers": 2, "loss_chunk_tokens": 64},
    {"gradient_checkpointing": "selective_deep", "optimizer": "adamw_8bit", "packing": "padded"},
    {"optimizer": "adafactor", "micro_batch_size": 2, "loss_chunk_tokens": 100},
    {"optimizer": "lion_8bit", "tie_word_embeddings": "false"},
    {**IN_BACKWARD},
    {**IN_BACKWARD, "optimizer": "adamw_4bit", "gradient_checkpointing": "full", "offload_activations": "true"},
    {"document_mask": "true", "attention_dropout": 0.1, "gradient_checkpointing": "full", "checkpointed_layers": 1},
    {"offload_activations": "true", "gradient_checkpointing": "full", "optimizer": "adamw_4bit"},
    {**BF16},
    {**BF16, "micro_batch_size": 2, "packing": "padded"},
    {**BF16, "gradient_checkpointing": "full", "offload_activations": "true"},
    {**BF16, "gradient_checkpointing": "full", "optimizer": "adamw_8bit", "micro_batch_size": 1, "loss_chunk_tokens": 32},
    {**BF16, "gradient_checkpointing": "selective", "optimizer": "adafactor", "tie_word_embeddings": "false"},
    {**BF16, "gradient_checkpointing": "selective_deep", "checkpointed_layers": 1, "micro_batch_size": 2},
    {**BF16, "optimizer": "adamw_4bit", "loss_chunk_tokens": 64, "packing": "padded"},
    {**BF16, **IN_BACKWARD, "optimizer": "lion_8bit", "gradient_checkpointing": "selective"},
    {**PURE},
    {**PURE, "optimizer": "adamw_8bit", "micro_batch_size": 2, "gradient_checkpointing": "full"},
    {**PURE, **IN_BACKWARD, "optimizer": "adafactor", "gradient_checkpointing": "selective_deep"},
    {**PURE, **IN_BACKWARD, "optimizer": "adamw_8bit", "packing": "padded", "tie_word_embeddings": "false"},
    {**PURE, "optimizer": "lion_8bit", "gradient_checkpointing": "selective", "micro_batch_size": 1, "loss_chunk_tokens": 16},
    {"offload_activations": "true", "optimizer": "adamw_8bit", "micro_batch_size": 2},
    {**PURE, **IN_BLOCKS, "optimizer": "adamw_8bit", "gradient_checkpointing": "full", "recomputed_rows": 1},
    {**BF16, **IN_BLOCKS, "gradient_checkpointing": "selective", "recomputed_rows": 2},
    {"gradient_checkpointing": "full", "recomputed_rows": 3, "document_mask": "true"},
    {**INT8, "optimizer": "adamw_factored", "packing": "padded"},
    {**INT8, "gradient_checkpointing": "full", "loss_chunk_tokens": 32},
    {**PURE, **IN_BACKWARD, "optimizer": "adamw_factored", "gradient_checkpointing": "full"},
    {"optimizer": "adamw_factored", "tie_word_embeddings": "false"},
]
