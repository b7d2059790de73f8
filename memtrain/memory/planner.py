"""The fastest recipe that fits a budget, at an unchanged global batch; and the most that fits one.

Order of preference: what changes nothing in the result, by time; only then, and only if allowed, what changes the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memtrain.command import BadInput
from memtrain.data.corpus import source_problems
from memtrain.memory.compose import Composer, checkpointed
from memtrain.memory.device import device_type
from memtrain.memory.estimate import Prediction, in_child, needed_bytes, predict
from memtrain.memory.host import host_needs
from memtrain.memory.ledger import Work
from memtrain.model.loss import automatic_chunk_tokens
from memtrain.model.presets import LlamaConfig
from memtrain.options import RunConfig, parse_bytes
from memtrain.training.check import computation_problems, launch_precision
from memtrain.training.step import micro_batch_size

# Nominal devices: operations and bytes a second, seconds to start an operation. Only ratios of times are shown. cpu: two cores
# with AMX, as measured; cuda: between an RTX 4090 and an H100 (their data sheets) at 60 % of the peak.
SPEEDS = {"cpu": {"float32": 1e11, "bfloat16": 2e11, "bytes": 2e10, "start": 1e-5},
          "cuda": {"float32": 5e13, "bfloat16": 2e14, "bytes": 1.5e12, "start": 5e-6}}
KINDS = ("none", "selective", "selective_deep", "full")  # each keeps less than the one before
STATES = ("adamw", "adamw_8bit", "adamw_4bit", "adafactor")  # each has less state than the one before
MOST_LAYER_STEPS = 8  # numbers of checkpointed layers that are tried
MOST_MICRO_BATCHES = 6  # sizes of micro-batches that are tried
# what int8 weights bring with them
INT8: dict[str, Any] = {"param_dtype": "int8", "mixed_precision": "no", "optimizer": "adamw_factored", "compile": False,
                        "optimizer_in_backward": True, "head_in_blocks": True, "recomputed_rows": "all"}
ROW_GROUPS = 4  # in which a checkpointed layer may take a micro-batch


@dataclass
class Row:
    """A recipe: what it changes, what it takes. seconds: of an update on the nominal device. peak_bytes: of the tensors."""

    config: RunConfig
    changes: dict[str, Any]
    accuracy: int  # 0: the result is unchanged
    peak_bytes: int
    seconds: float
    relative_time: float = 1.0
    fits: bool = False

    @property
    def rank(self) -> tuple[Any, ...]:
        return self.accuracy, self.seconds, len(self.changes), self.peak_bytes, sorted(map(str, self.changes.items()))


@dataclass
class Plan:
    """config and prediction: of the recipe chosen, or where nothing fits (`fits` False) of the smallest one."""

    budget_bytes: int | None
    rows: list[Row]
    fits: bool
    chosen: Row
    prediction: Prediction
    device: str = "cpu"
    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> RunConfig:
        return self.chosen.config

    @property
    def lacking_bytes(self) -> int:
        """Bytes by which even the smallest recipe is over the budget."""
        return 0 if self.fits or self.budget_bytes is None else needed_bytes(self.prediction) - self.budget_bytes

    def as_json(self) -> list[dict[str, Any]]:
        """The ranked recipes."""
        return [{"changes": row.changes, "peak_bytes": row.peak_bytes, "relative_time": row.relative_time,
                 "changes_result": bool(row.accuracy), "fits": row.fits, "chosen": row is self.chosen and self.fits}
                for row in self.rows]


def planned(config: RunConfig, num_processes: int = 1) -> tuple[RunConfig, LlamaConfig]:
    """The options with the precision of the launch in them, and the shape of the model. Raises one BadInput with a line for
    every problem: those of `check_run`, but for data and folders, which a plan does not touch."""
    shape, problems = computation_problems(config, num_processes)
    if problems or shape is None:
        raise BadInput("\n".join(problems))
    return replace(config, mixed_precision=launch_precision(config)), shape


def seconds(work: Work, config: RunConfig, device: str) -> float:
    """Time of this work on a nominal device of that type."""
    speed = SPEEDS["cuda" if device == "cuda" else "cpu"]
    narrow = config.param_dtype != "float32" or config.mixed_precision not in (None, "no")
    return (work.flops / speed["bfloat16" if narrow else "float32"] + work.moved_bytes / speed["bytes"]
            + work.operations * speed["start"])


def plan(config: RunConfig, shape: LlamaConfig, budget_bytes: int | None, allow: Sequence[str] = (), num_processes: int = 1,
         say: Callable[[str], Any] = lambda line: None) -> Plan:
    """The first recipe in the order of preference whose whole play stays within `budget_bytes` (None: no limit)."""
    planner = Planner(config, shape, allow, num_processes)
    say(f"{len(planner.rows)} recipes from {len(planner.composer.plays)} plays")
    return planner.choose(budget_bytes)


def fit_run(config: RunConfig, num_processes: int, say: Callable[[str], Any]) -> RunConfig:
    """The options of a run with `memory_budget`, as a plan made in a process of its own chooses them. Raises BadInput."""
    budget = str(config.memory_budget)
    if num_processes > 1:
        raise BadInput(f"memory_budget={budget} on {num_processes} processes: a run plans itself on one process only; "
                       "plan with scripts/plan_memory.py and set the options it prints")
    if problems := source_problems(config):
        raise BadInput("\n".join(problems))
    config, shape = planned(config)
    found: Plan = in_child(plan, config, shape, parse_bytes(budget), config.allow)
    if not found.fits:
        raise BadInput(f"memory_budget={budget}: nothing fits; the smallest recipe lacks {found.lacking_bytes:,} bytes; raise "
                       "the budget, or look at scripts/plan_memory.py for what takes them")
    say(f"memory_budget={budget}: {needed_bytes(found.prediction):,} bytes predicted at the peak, with "
        + (", ".join(f"{name}={value}" for name, value in found.chosen.changes.items()) or "nothing changed"))
    return found.config


class Planner:
    """All recipes of a run, ranked; `choose` takes the first that fits a budget, which may be asked for many budgets."""

    def __init__(self, config: RunConfig, shape: LlamaConfig, allow: Sequence[str] = (), num_processes: int = 1) -> None:
        self.shape, self.num_processes = shape, num_processes
        self.device = device_type()
        self.composer = Composer(shape, num_processes)
        self.unconstrained = replace(config, micro_batch_size=micro_batch_size(config, num_processes))
        self.notes = notes(config, allow, num_processes)
        self.rows = [self._row(candidate, accuracy) for candidate, accuracy in
                     candidates(self.unconstrained, shape, allow, num_processes, self.device)]
        first = next(row for row in self.rows if not row.changes)
        for row in self.rows:
            row.relative_time = row.seconds / first.seconds
        self.rows.sort(key=lambda row: row.rank)
        self._whole: dict[int, Prediction] = {}

    def _row(self, candidate: RunConfig, accuracy: int) -> Row:
        composed = self.composer.compose(candidate)
        changes = {name: value for name, value in asdict(candidate).items() if value != getattr(self.unconstrained, name)}
        return Row(candidate, changes, accuracy, composed.peak_bytes, seconds(composed.work, candidate, self.device))

    def whole(self, index: int) -> Prediction:
        """The prediction for `rows[index]` from a play of all its layers."""
        if index not in self._whole:
            config = self.rows[index].config
            found = self._whole[index] = predict(config, self.shape, self.num_processes)
            found.host = host_needs(found, config, self.shape, self.num_processes, self.device)
        return self._whole[index]

    def choose(self, budget_bytes: int | None) -> Plan:
        """The plan for this budget. A recipe is promised only after its whole play; others are listed by plays of three layers.

        Each recipe needs a number of bytes that does not depend on the budget: a larger budget never chooses a later one.
        """
        limit = math.inf if budget_bytes is None else budget_bytes
        chosen: int | None = None
        for index, row in enumerate(self.rows):
            row.fits = row.peak_bytes <= limit
            if row.fits and chosen is None:
                row.fits = needed_bytes(self.whole(index)) <= limit
                chosen = index if row.fits else None
        fits = chosen is not None
        at = chosen if chosen is not None else min(range(len(self.rows)), key=lambda index: self.rows[index].peak_bytes)
        return Plan(budget_bytes, self.rows, fits, self.rows[at], self.whole(at), self.device, self.notes)


def notes(config: RunConfig, allow: Sequence[str], num_processes: int) -> list[str]:
    """What was not tried, and why."""
    found = []
    if config.max_grad_norm is not None and not config.optimizer_in_backward and num_processes == 1:
        found.append(f"optimizer_in_backward was not tried: it cannot clip (max_grad_norm={config.max_grad_norm:g}); with "
                     "--max_grad_norm none it frees each gradient at once")
    if not allow:
        found.append("nothing that changes the result was tried: --allow rounding,optimizer adds bfloat16 weights and "
                     "optimizers with less state")
    if "rounding" in allow and "optimizer" in allow and config.max_grad_norm is not None:
        found.append("int8 weights were not tried: they are updated in the backward, which cannot clip; --max_grad_norm none "
                     "tries them, with an untied head and one micro-batch")
    if config.compile:
        found.append("played without torch.compile, which keeps no more than that")
    return found


def candidates(config: RunConfig, shape: LlamaConfig, allow: Sequence[str], num_processes: int, device: str
               ) -> Iterator[tuple[RunConfig, int]]:
    """Every recipe tried, with how much of the result it changes; `config` itself among them."""
    share = config.global_batch_size // num_processes
    layers = shape.num_hidden_layers
    largest = int(config.micro_batch_size)
    sizes = [size for size in range(largest, 0, -1) if share % size == 0]
    sizes = sizes if len(sizes) <= MOST_MICRO_BATCHES else [*sizes[:MOST_MICRO_BATCHES - 1], 1]
    kinds: list[tuple[str, int | str]] = [(config.gradient_checkpointing, config.checkpointed_layers)]
    for kind in KINDS[KINDS.index(config.gradient_checkpointing):]:
        if kind != "none":
            kinds += [(kind, "all" if count == layers else count) for count in layer_counts(layers)
                      if kind != config.gradient_checkpointing or count > checkpointed(config, layers)]
    for accuracy, changed in accuracy_changes(config, allow):
        int8 = changed.param_dtype == "int8"
        if int8 and (shape.tie_word_embeddings or not in_backward_possible(changed, share, share, num_processes)):
            continue
        for size, (kind, count) in itertools.product(sizes, kinds):
            if int8 and (size != share or kind.startswith("selective")):
                continue
            tokens = size * config.seq_len
            automatic = automatic_chunk_tokens(shape.vocab_size, device)
            chunks: list[int | str] = [config.loss_chunk_tokens]
            if config.loss_chunk_tokens == "auto" and tokens > automatic // 4:
                chunks.append(automatic // 4)
            in_backward = [changed.optimizer_in_backward]
            if not in_backward[0] and in_backward_possible(config, size, share, num_processes):
                in_backward.append(True)
            offload = [config.offload_activations]
            if device == "cuda" and kind in ("none", "full") and not offload[0]:
                offload.append(True)
            rows = [changed.recomputed_rows]
            if not int8 and kind == "full" and count == "all" and rows == ["all"] and size > 1:
                rows.append(max(1, size // ROW_GROUPS))
            for chunk, early, host, group in itertools.product(chunks, in_backward, offload, rows):
                recipe = replace(changed, micro_batch_size=size, gradient_checkpointing=kind, checkpointed_layers=count,
                                 loss_chunk_tokens=chunk, optimizer_in_backward=early, offload_activations=host,
                                 recomputed_rows=group)
                yield recipe, accuracy
                if early and not (recipe.head_in_blocks or shape.tie_word_embeddings or recipe.optimizer == "adafactor"):
                    yield replace(recipe, head_in_blocks=True), accuracy


def layer_counts(layers: int) -> list[int]:
    """Up to MOST_LAYER_STEPS evenly spaced numbers of layers, all of them the last."""
    steps = min(layers, MOST_LAYER_STEPS)
    return [layers * (step + 1) // steps for step in range(steps)]


def in_backward_possible(config: RunConfig, size: int, share: int, num_processes: int) -> bool:
    return size == share and num_processes == 1 and config.max_grad_norm is None and config.mixed_precision != "fp16"


def accuracy_changes(config: RunConfig, allow: Sequence[str]) -> list[tuple[int, RunConfig]]:
    """(how much of the result changes, the recipe with that change), the mildest first."""
    dtypes = [(0, config)]
    if "rounding" in allow and config.param_dtype == "float32":
        dtypes.append((1, replace(config, param_dtype="bfloat16", mixed_precision="no")))
    found = []
    for level, changed in dtypes:
        found.append((level, changed))
        if "optimizer" in allow and config.optimizer in STATES:
            at = STATES.index(config.optimizer)
            found += [(level + step, replace(changed, optimizer=name)) for step, name in enumerate(STATES[at + 1:], 1)]
    if "rounding" in allow and "optimizer" in allow and config.param_dtype != "int8" and config.max_grad_norm is None:
        # an adafactor stays one: its learning rate is relative
        optimizer = "adafactor" if config.optimizer == "adafactor" else INT8["optimizer"]
        found.append((1 + max(level for level, _ in found), replace(config, **{**INT8, "optimizer": optimizer})))
    return sorted(found, key=lambda item: item[0])
