"""What contradicts what within the options of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memtrain.command import BadInput
from memtrain.options import RunConfig, parse_bytes


def _length_problem(c: RunConfig) -> str | bool:
    given = "neither" if c.max_steps is None else "both"
    return (c.max_steps is None) == (c.epochs is None) and f"max_steps and epochs: {given} given; set exactly one of them"


def _budget_problem(c: RunConfig) -> str | bool:
    try:
        return c.memory_budget is not None and not parse_bytes(c.memory_budget)
    except BadInput as error:
        return f"memory_budget={error}; change --memory_budget"


# what int8 weights go together with, and why with nothing else
WITH_INT8: dict[str, tuple[tuple[object, ...], str, str]] = {
    "head_in_blocks": ((True,), "no gradient exists whole, the head's included", "true and optimizer_in_backward=true"),
    "optimizer": (("adafactor", "adamw_factored"), "only adafactor and adamw_factored update rows of int8", "adamw_factored"),
    "gradient_checkpointing": (("none", "full"), "a product comes in blocks, which selective cannot tell apart", "full"),
    "recomputed_rows": (("all",), "a weight changes with the first group of rows", "all"),
    "compile": ((False,), "its layers update themselves in the backward", "false"),
}


def _int8_rule(name: str) -> Callable[[RunConfig], object]:
    allowed, reason, wanted = WITH_INT8[name]

    def problem(c: RunConfig) -> str | bool:
        value = getattr(c, name)
        found = str(value).lower() if isinstance(value, bool) else value
        return c.param_dtype == "int8" and value not in allowed and (
            f"param_dtype=int8 with {name}={found}: {reason}; set {name}={wanted}, or param_dtype=bfloat16")

    return problem


# each returns a line that says found, wanted and remedy, or something false
RULES: tuple[Callable[[RunConfig], object], ...] = (
    # length and schedule
    _length_problem,
    lambda c: c.streaming and c.epochs is not None and (
        f"epochs={c.epochs} with streaming=true: a stream has no known length; set max_steps instead"),
    lambda c: c.max_steps is not None and (c.warmup_steps or 0) > c.max_steps and (
        f"warmup_steps={c.warmup_steps}: more than max_steps={c.max_steps}; lower warmup_steps"),
    lambda c: c.decay_steps is not None and c.lr_schedule != "wsd" and (
        f"decay_steps={c.decay_steps} with lr_schedule={c.lr_schedule}: only wsd has a decay of its own; set lr_schedule=wsd, "
        "or leave decay_steps out"),
    lambda c: c.decay_steps is not None and c.lr_schedule == "wsd" and c.max_steps is not None and (
        c.warmup_steps or 0) <= c.max_steps < (c.warmup_steps or 0) + c.decay_steps and (
        f"decay_steps={c.decay_steps} after warmup_steps={c.warmup_steps or 0}: more than max_steps={c.max_steps}; lower "
        "one of them"),
    lambda c: c.min_lr_ratio > 1 and (
        f"min_lr_ratio={c.min_lr_ratio:g}: the last learning rate would be above the highest; set it between 0 and 1"),
    lambda c: c.learning_rate == 0 and "learning_rate=0: nothing would be learned; set it above 0",
    lambda c: c.max_grad_norm == 0 and (
        "max_grad_norm=0: every gradient would become zero; set it above 0, or none for no clipping"),
    lambda c: c.adam_eps == 0 and (
        "adam_eps=0: a weight whose gradient was always zero would become 0 / 0; set it above 0, such as 1e-8"),
    # data
    lambda c: c.streaming and c.tokenizer in (None, "train") and not Path(c.model).expanduser().is_dir() and (
        "streaming=true without a tokenizer: none can be trained on a stream; set tokenizer to a folder or hub id"),
    lambda c: c.document_mask and c.packing != "packed" and (
        f"document_mask=true with packing={c.packing}: a padded row holds one document; leave document_mask out"),
    lambda c: Path(c.cache_dir).expanduser().absolute() == Path(c.output_dir).expanduser().absolute() and (
        f"cache_dir={c.cache_dir}: is the folder of the run; choose another cache_dir"),
    # memory
    _budget_problem,
    lambda c: c.enforce_budget and c.memory_budget is None and (
        "enforce_budget=true without memory_budget: there is no limit to enforce; set memory_budget, or leave enforce_budget "
        "out"),
    lambda c: c.param_dtype != "float32" and c.mixed_precision not in (None, "no") and (
        f"param_dtype={c.param_dtype} with mixed_precision={c.mixed_precision}: autocast needs float32 weights; set "
        "mixed_precision=no or param_dtype=float32"),
    lambda c: c.optimizer_in_backward and c.max_grad_norm is not None and (
        f"optimizer_in_backward=true with max_grad_norm={c.max_grad_norm:g}: the norm of all gradients is known only after the "
        "first are gone; set max_grad_norm=none, or optimizer_in_backward=false"),
    lambda c: c.offload_activations and c.gradient_checkpointing.startswith("selective") and (
        f"offload_activations=true with gradient_checkpointing={c.gradient_checkpointing}: what selective keeps is out of "
        "reach of the offload; set gradient_checkpointing to full or none"),
    lambda c: c.checkpointed_layers == 0 and c.gradient_checkpointing != "none" and (
        f"checkpointed_layers=0 with gradient_checkpointing={c.gradient_checkpointing}: nothing would be computed again; raise "
        "it, or set gradient_checkpointing=none"),
    lambda c: c.recomputed_rows != "all" and c.gradient_checkpointing == "none" and (
        f"recomputed_rows={c.recomputed_rows} with gradient_checkpointing=none: nothing is computed again; set "
        "gradient_checkpointing=full, or leave recomputed_rows out"),
    lambda c: c.head_in_blocks and not c.optimizer_in_backward and (
        "head_in_blocks=true with optimizer_in_backward=false: the whole gradient is wanted before any row may change; set "
        "optimizer_in_backward=true, or head_in_blocks=false"),
    lambda c: c.head_in_blocks and c.optimizer == "adafactor" and c.param_dtype != "int8" and (
        "head_in_blocks=true with optimizer=adafactor: it scales by sums over the whole gradient; set head_in_blocks=false, or "
        "optimizer=adamw_8bit"),
    *map(_int8_rule, WITH_INT8),
    # evaluations and checkpoints
    lambda c: c.eval_every is not None and c.eval_fraction == 0 and (
        f"eval_every={c.eval_every} with eval_fraction=0: nothing is held out to evaluate on; set eval_fraction above 0, or "
        "leave eval_every out"),
    lambda c: c.keep_best and c.eval_fraction == 0 and (
        "keep_best=true with eval_fraction=0: nothing is held out to tell the best by; set eval_fraction above 0, or "
        "keep_best=false"),
    lambda c: c.keep_best and c.eval_fraction > 0 and c.eval_every is None and (
        "keep_best=true without eval_every: only the last checkpoint would be evaluated; set eval_every"),
    lambda c: c.keep_best and c.eval_every is not None and (c.save_every or 0) % c.eval_every != 0 and (
        f"keep_best=true with save_every={c.save_every} and eval_every={c.eval_every}: a checkpoint is compared by the "
        f"evaluation at its own update; set save_every to a multiple of {c.eval_every}"),
    lambda c: c.keep_best and c.save_every is None and c.eval_every is not None and (
        "keep_best=true without save_every: only the last checkpoint would be there; set save_every"),
)


def config_problems(config: RunConfig) -> list[str]:
    """What contradicts what within the options, a line each."""
    return [str(problem) for rule in RULES if (problem := rule(config))]
