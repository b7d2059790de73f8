"""What contradicts what within the options of a run."""

from __future__ import annotations

from pathlib import Path

from memtrain.command import BadInput
from memtrain.options import RunConfig, parse_bytes


def config_problems(config: RunConfig) -> list[str]:
    """What contradicts what within the options, a line each."""
    found = []
    if (config.max_steps is None) == (config.epochs is None):
        given = "neither" if config.max_steps is None else "both"
        found.append(f"max_steps and epochs: {given} given; set exactly one of them")
    if config.streaming and config.epochs is not None:
        found.append(f"epochs={config.epochs} with streaming=true: a stream has no known length; set max_steps instead")
    if config.streaming and config.tokenizer in (None, "train") and not Path(config.model).expanduser().is_dir():
        found.append("streaming=true without a tokenizer: none can be trained on a stream; set tokenizer to a folder or hub id")
    if config.max_steps is not None and (config.warmup_steps or 0) > config.max_steps:
        found.append(f"warmup_steps={config.warmup_steps}: more than max_steps={config.max_steps}; lower warmup_steps")
    if config.document_mask and config.packing != "packed":
        found.append("document_mask=true with packing=padded: a padded row holds one document; leave document_mask out")
    if config.param_dtype != "float32" and config.mixed_precision not in (None, "no"):
        found.append(f"param_dtype={config.param_dtype} with mixed_precision={config.mixed_precision}: autocast needs float32 "
                     "weights; set mixed_precision=no or param_dtype=float32")
    if config.optimizer_in_backward and config.max_grad_norm is not None:
        found.append(f"optimizer_in_backward=true with max_grad_norm={config.max_grad_norm:g}: the norm of all gradients is "
                     "known only after the first are gone; set max_grad_norm=none, or optimizer_in_backward=false")
    if config.recomputed_rows != "all" and config.gradient_checkpointing == "none":
        found.append(f"recomputed_rows={config.recomputed_rows} with gradient_checkpointing=none: nothing is computed again; "
                     "set gradient_checkpointing=full, or leave recomputed_rows out")
    if config.head_in_blocks and not config.optimizer_in_backward:
        found.append("head_in_blocks=true with optimizer_in_backward=false: the whole gradient is wanted before any row may "
                     "change; set optimizer_in_backward=true, or head_in_blocks=false")
    if config.head_in_blocks and config.optimizer == "adafactor":
        found.append("head_in_blocks=true with optimizer=adafactor: it scales by sums over the whole gradient; set "
                     "head_in_blocks=false, or optimizer=adamw_8bit")
    if config.offload_activations and config.gradient_checkpointing.startswith("selective"):
        found.append(f"offload_activations=true with gradient_checkpointing={config.gradient_checkpointing}: what selective "
                     "keeps is out of reach of the offload; set gradient_checkpointing to full or none")
    if config.max_grad_norm == 0:
        found.append("max_grad_norm=0: every gradient would become zero; set it above 0, or none for no clipping")
    if config.memory_budget is not None:
        try:
            parse_bytes(config.memory_budget)
        except BadInput as error:
            found.append(f"memory_budget={error}; change --memory_budget")
    elif config.enforce_budget:
        found.append("enforce_budget=true without memory_budget: there is no limit to enforce; set memory_budget, or leave "
                     "enforce_budget out")
    if config.learning_rate == 0:
        found.append("learning_rate=0: nothing would be learned; set it above 0")
    return found
