"""The other way round: the most that fits a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memtrain.command import BadInput
from memtrain.memory.compose import Composer
from memtrain.memory.estimate import Prediction, needed_bytes, predict
from memtrain.memory.planner import STATES
from memtrain.model.presets import PRESETS, LlamaConfig, model_config
from memtrain.options import RunConfig

QUANTITIES = ("micro_batch_size", "seq_len", "layers", "model")
LARGEST = 1 << 20
SEQ_LEN_MULTIPLE = 64


@dataclass
class Most:
    """The largest value of a quantity under the budget by one recipe; None: not even the smallest fits."""

    recipe: str
    changes: dict[str, Any]
    value: int | str | None
    peak_bytes: int
    prediction: Prediction | None


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
        found.append(("bf16 weights + full checkpointing + adamw_8bit in backward",
                      {**pure, **smaller, "optimizer_in_backward": True, "max_grad_norm": None}))
    return found


def maximize(quantity: str, config: RunConfig, shape: LlamaConfig, budget_bytes: int,
             allow: Sequence[str] = ()) -> list[Most]:
    """The largest `quantity` under the budget for each recipe, with one micro-batch an update. Each is played whole."""
    rows = config.global_batch_size if config.micro_batch_size == "auto" else int(config.micro_batch_size)
    config = replace(config, micro_batch_size=rows, global_batch_size=rows)
    found = []
    for name, changes in recipes(config, allow):
        changed = replace(config, **changes)
        value, prediction = (_largest_model(changed, budget_bytes) if quantity == "model"
                             else _largest_value(quantity, changed, shape, budget_bytes))
        found.append(Most(name, changes, value, 0 if prediction is None else prediction.peak_bytes, prediction))
    return found


def _largest_value(quantity: str, config: RunConfig, shape: LlamaConfig, budget_bytes: int
                   ) -> tuple[int | None, Prediction | None]:
    step = SEQ_LEN_MULTIPLE if quantity == "seq_len" else 1
    composer = Composer(shape)  # keeps its plays by everything but the shape, of which only the depth may change here

    def peak(count: int) -> int:
        return composer.compose(*AT[quantity](config, shape, count * step)).peak_bytes

    count = largest(peak, budget_bytes, LARGEST // step)
    while count:  # a play of three layers agrees with the whole to a few bytes; the whole decides
        prediction = predict(*AT[quantity](config, shape, count * step))
        if needed_bytes(prediction) <= budget_bytes:
            return count * step, prediction
        count -= 1
    return None, None


def _rows(config: RunConfig, shape: LlamaConfig, value: int) -> tuple[RunConfig, LlamaConfig]:
    return replace(config, micro_batch_size=value, global_batch_size=value), shape


def _seq_len(config: RunConfig, shape: LlamaConfig, value: int) -> tuple[RunConfig, LlamaConfig]:
    return (replace(config, seq_len=value),
            replace(shape, max_position_embeddings=max(shape.max_position_embeddings, value)))


def _layers(config: RunConfig, shape: LlamaConfig, value: int) -> tuple[RunConfig, LlamaConfig]:
    return replace(config, num_hidden_layers=value), replace(shape, num_hidden_layers=value)


AT: dict[str, Callable[..., tuple[RunConfig, LlamaConfig]]] = {
    "micro_batch_size": _rows, "seq_len": _seq_len, "layers": _layers}


def largest(peak: Callable[[int], int], budget_bytes: int, most: int) -> int:
    """The largest count from 1 to `most` whose peak is within the budget; 0: none.

    The peak is the highest of several straight lines (the optimizer's, that of the loss, ...): two counts above the budget lie
    on the line that decides, and say where it crosses. Where they do not, the interval is halved.
    """
    low, high, guess = 0, most + 1, 1
    above: list[tuple[int, int]] = []
    while high - low > 1:
        width, found = high - low, peak(guess)
        if found <= budget_bytes:
            low = guess
        else:
            high = guess
            above = [*above[-1:], (guess, found)]
        if high > most:
            guess = min(4 * low, most)
            continue
        guess = (low + high) // 2
        if len(above) == 2:
            (far, far_bytes), (near, near_bytes) = above
            crossing = near - math.ceil((near_bytes - budget_bytes) * (far - near) / max(far_bytes - near_bytes, 1))
            if 2 * (high - low) > width:  # the last step halved nothing: the crossing is near, look beside it
                crossing = low + 1 if crossing <= low else min(crossing, high - 1)
            guess = crossing if low < crossing < high else guess
    return low


def _largest_model(config: RunConfig, budget_bytes: int) -> tuple[str | None, Prediction | None]:
    """The largest preset that fits as it is, with the options of `config`."""
    best: tuple[str | None, Prediction | None] = (None, None)
    for name in sorted(PRESETS, key=lambda name: PRESETS[name].parameter_count):
        candidate = replace(config, model=name)
        try:
            shape = model_config(candidate)
        except BadInput:  # options of the run that do not go with this shape
            continue
        if Composer(shape).compose(candidate).peak_bytes > budget_bytes:
            break
        prediction = predict(candidate, shape)
        if needed_bytes(prediction) > budget_bytes:
            break
        best = name, prediction
    return best
