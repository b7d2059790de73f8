"""The other way round: the most that fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memtrain.command import BadInput
from memtrain.memory.compose import Composer
from memtrain.memory.device import device_type
from memtrain.memory.estimate import needed_bytes, predict
from memtrain.memory.planner import STATES
from memtrain.model.presets import PRESETS, LlamaConfig, model_config
from memtrain.options import RunConfig

QUANTITIES = ("micro_batch_size", "seq_len", "layers", "model")
LARGEST = 1 << 20
ROW_GROUPS = 16  # each costs a play of a layer, and more of them would save next to nothing
SEQ_LEN_MULTIPLE = 64
MOST_WHOLE_LAYERS = 64  # a deeper model takes minutes to play whole
COMPOSED_ERROR = 0.001  # of a peak from plays of three layers, at most


@dataclass
class Most:
    """The largest value of a quantity under the budget by one recipe; None: not even the smallest fits."""

    recipe: str
    changes: dict[str, Any]
    value: int | str | None
    peak_bytes: int


def recipes(config: RunConfig, allow: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """The recipes of the table: precision x checkpointing, and with leave what changes the result."""
    plain: dict[str, Any] = {"param_dtype": "float32", "checkpointed_layers": "all"}
    found = [(precision + ("" if kind == "none" else f" + {kind} checkpointing"),
              {**plain, "mixed_precision": mixed, "gradient_checkpointing": kind})
             for precision, mixed in (("fp32", "no"), ("bf16", "bf16")) for kind in ("none", "selective", "full")]
    full = {**plain, "mixed_precision": "bf16", "gradient_checkpointing": "full"}
    pure = {**full, "mixed_precision": "no", "param_dtype": "bfloat16"}
    smaller = {"optimizer": "adamw_8bit"} if "optimizer" in allow and config.optimizer in STATES else {}
    if smaller:
        found.append(("bf16 + full checkpointing + adamw_8bit", {**full, **smaller}))
    if "rounding" in allow:
        found.append(("bf16 weights + full checkpointing", pure))
    if smaller and "rounding" in allow:
        lean = {**pure, **smaller, "optimizer_in_backward": True, "max_grad_norm": None}
        found.append(("bf16 weights + full checkpointing + adamw_8bit in backward", lean))
        found.append(("the same, rows in groups, head in blocks", {**lean, "recomputed_rows": 1, "head_in_blocks": True}))
    return found


def maximize(quantity: str, config: RunConfig, shape: LlamaConfig, budget_bytes: int,
             allow: Sequence[str] = ()) -> list[Most]:
    """The largest `quantity` under the budget for each recipe, with one micro-batch an update. Each is played whole, but for
    models of more than MOST_WHOLE_LAYERS on a CPU."""
    rows = config.global_batch_size if config.micro_batch_size == "auto" else int(config.micro_batch_size)
    config = replace(config, micro_batch_size=rows, global_batch_size=rows)
    found = []
    for name, changes in recipes(config, allow):
        if shape.tie_word_embeddings and changes.get("head_in_blocks"):
            name, changes = name.replace(", head in blocks", ""), {**changes, "head_in_blocks": False}
        if quantity == "layers" and "recomputed_rows" in changes:  # of hundreds of layers, groups take minutes to play
            name, changes = name.replace("rows in groups, ", ""), {**changes, "recomputed_rows": "all"}
        changed = replace(config, **changes)
        value, peak_bytes = (_largest_model(changed, budget_bytes) if quantity == "model"
                             else _largest_value(quantity, changed, shape, budget_bytes))
        if changes.get("recomputed_rows", "all") != "all":
            last_rows = value if quantity == "micro_batch_size" and isinstance(value, int) else rows
            changes = {**changes, "recomputed_rows": group_rows(last_rows)}
        found.append(Most(name, changes, value, peak_bytes))
    return found


def group_rows(rows: int) -> int:
    """Rows of a group where a layer takes a micro-batch in ROW_GROUPS of them."""
    return -(-rows // ROW_GROUPS)


def _largest_value(quantity: str, config: RunConfig, shape: LlamaConfig, budget_bytes: int
                   ) -> tuple[int | None, int]:
    step = SEQ_LEN_MULTIPLE if quantity == "seq_len" else 1
    composer = Composer(shape)  # keeps its plays by everything but the shape, of which only the depth may change here

    def peak(count: int) -> int:
        return composer.compose(*AT[quantity](config, shape, count * step)).peak_bytes

    count = largest(peak, budget_bytes, LARGEST // step)
    if quantity == "layers" and count > MOST_WHOLE_LAYERS and device_type() == "cpu":
        count = largest(peak, int(budget_bytes * (1 - COMPOSED_ERROR)), LARGEST)
        return count, peak(count)
    while count:  # a play of three layers agrees with the whole to a few bytes; the whole decides
        prediction = predict(*AT[quantity](config, shape, count * step))
        if needed_bytes(prediction) <= budget_bytes:
            return count * step, prediction.peak_bytes
        count -= 1
    return None, 0


def _rows(config: RunConfig, shape: LlamaConfig, value: int) -> tuple[RunConfig, LlamaConfig]:
    group = config.recomputed_rows if config.recomputed_rows == "all" else group_rows(value)
    return replace(config, micro_batch_size=value, global_batch_size=value, recomputed_rows=group), shape


def _seq_len(config: RunConfig, shape: LlamaConfig, value: int) -> tuple[RunConfig, LlamaConfig]:
    return (replace(config, seq_len=value),
            replace(shape, max_position_embeddings=max(shape.max_position_embeddings, value)))


def _layers(config: RunConfig, shape: LlamaConfig, value: int) -> tuple[RunConfig, LlamaConfig]:
    return replace(config, num_hidden_layers=value), replace(shape, num_hidden_layers=value)


AT: dict[str, Callable[..., tuple[RunConfig, LlamaConfig]]] = {
    "micro_batch_size": _rows, "seq_len": _seq_len, "layers": _layers}


def largest(peak: Callable[[int], int], budget_bytes: int, most: int) -> int:
    """The largest count from 1 to `most` whose peak is within the budget; 0: none.

    The peak is the highest of several straight lines (the optimizer's, that of the loss, ...), so the straight line through two
    counts says nearly where the budget is crossed. Every third time the interval is halved, should it say so badly.
    """
    low, low_bytes, high, high_bytes = 0, 0, most + 1, 0
    guess, turn = 1, 0
    while high - low > 1:
        found, before, turn = peak(guess), (low, low_bytes), turn + 1
        if found <= budget_bytes:
            low, low_bytes = guess, found
        else:
            high, high_bytes = guess, found
        if high > most:
            rise = low_bytes - before[1] if before[0] else 0
            there = low + (budget_bytes - low_bytes) * (low - before[0]) // rise if rise > 0 else 0
            guess = min(max(there, 4 * low), most)
        elif low == 0 or turn % 3 == 0:
            guess = (low + high) // 2
        else:
            there = low + (budget_bytes - low_bytes) * (high - low) // (high_bytes - low_bytes)
            guess = min(max(there, low + 1), high - 1)
    return low


def _largest_model(config: RunConfig, budget_bytes: int) -> tuple[str | None, int]:
    """The preset of most parameters that fits as it is, with the options of `config`."""
    for name in sorted(PRESETS, key=lambda name: PRESETS[name].parameter_count, reverse=True):
        candidate = replace(config, model=name)
        try:
            shape = model_config(candidate)
        except BadInput:  # options of the run that do not go with this shape
            continue
        if candidate.head_in_blocks and shape.tie_word_embeddings:
            candidate = replace(candidate, head_in_blocks=False)
        weights = shape.parameter_count * (4 if candidate.param_dtype == "float32" else 2)
        if weights > budget_bytes or Composer(shape).compose(candidate).peak_bytes > budget_bytes:
            continue
        prediction = predict(candidate, shape)
        if needed_bytes(prediction) <= budget_bytes:
            return name, prediction.peak_bytes
    return None, 0
