"""Peaks of models of any depth from plays of three layers: decoder layers in the middle of a stack are all alike.

A play is cut into windows (embedding, each layer forward, loss, each layer backward, ...). A deeper model goes through the same
windows, those of the middle layer more often; every window rises as far above the level at its start, and changes it as much.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from memtrain.memory.estimate import Play, play
from memtrain.memory.ledger import Window, Work
from memtrain.model.presets import LlamaConfig
from memtrain.options import RunConfig
from memtrain.training.step import micro_batch_size

PLAYED_LAYERS = 3  # a first, a middle and a last one


@dataclass
class Composed:
    """Peaks by phase (evaluation and save included), and the work of an update."""

    phases: dict[str, int]
    work: Work

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values())


def checkpointed(config: RunConfig, layers: int) -> int:
    """Layers that are computed again in the backward."""
    if config.gradient_checkpointing == "none":
        return 0
    return layers if config.checkpointed_layers == "all" else min(int(config.checkpointed_layers), layers)


class Composer:
    """`compose` predicts recipes of one run; plays are kept, so that recipes share them."""

    def __init__(self, shape: LlamaConfig, num_processes: int = 1) -> None:
        self.shape, self.num_processes = shape, num_processes
        self.plays: dict[tuple[object, ...], Play] = {}

    def compose(self, config: RunConfig, shape: LlamaConfig | None = None) -> Composed:
        """Peaks of `config` for the run's shape, or for one that differs from it in the number of layers."""
        layers = (shape or self.shape).num_hidden_layers
        whole = self._whole_plays(config)
        again = checkpointed(config, layers)
        # the optimizer matters within the windows only where it updates within the backward
        plain = config if config.optimizer_in_backward else replace(config, optimizer="adamw")
        kind = replace(plain, gradient_checkpointing="none")
        first = self._play(plain if again else kind)
        last = self._play(plain if again == layers else kind)
        own = self._play(replace(config, gradient_checkpointing="none", loss_chunk_tokens="auto"), any_rows=True)
        start = self._start(own, layers)
        played_shape = replace(self.shape, num_hidden_layers=PLAYED_LAYERS)
        by_size = replace(self.shape, num_hidden_layers=layers).parameter_count / played_shape.parameter_count
        level, phases, work = start, {"forward": 0, "backward": 0, "optimizer": 0}, Work()
        often = 1.0  # the first micro-batch; those after the first are like the second
        blocks_first, blocks_last = _blocks(first.windows), _blocks(last.windows)
        assert len(blocks_first) == len(blocks_last), "both have the same micro-batches"
        for index, (block, other) in enumerate(zip(blocks_first, blocks_last, strict=True)):
            # 4 blocks a micro-batch: before the layers, the layers forward, the loss, the layers backward
            position, micro_batch = index % 4, index // 4
            if position == 0 and index + 1 == len(blocks_first):  # after all micro-batches
                windows = _after_layers(block, [] if config.optimizer_in_backward else own.windows)
                often = 1.0
            elif position in (1, 3):
                order = range(layers) if position == 1 else range(layers - 1, -1, -1)
                windows = [_layer(block if layer < again else other, layer, layers) for layer in order]
                if again == 0 or again == layers:
                    windows = [_layer(block, layer, layers) for layer in order]
            else:
                windows = block if position == 0 else other
            if position == 0 and micro_batch == 1 and index + 1 < len(blocks_first):
                often = float(first.wanted - 1)
            for window in windows:
                name = window.phase if window.phase in phases else "forward"
                phases[name] = max(phases[name], level + window.peak_bytes - window.start_bytes)
                level += window.end_bytes - window.start_bytes
                work += window.work.times(often * (by_size if window.phase == "optimizer" else 1.0))
        return Composed({**phases, **self._evaluate_and_save(*whole, start, layers)}, work)

    def _start(self, own: Play, layers: int) -> int:
        return own.windows[0].start_bytes + (layers - PLAYED_LAYERS) * own.layer_bytes

    def _whole_plays(self, config: RunConfig) -> tuple[Play, Play]:
        """Plays with evaluation and save, of three layers with these rows, and of two."""
        # int8 weights have no other optimizer, and no update elsewhere
        ordinary: dict[str, Any] = {} if config.param_dtype == "int8" else {
            "optimizer": "adamw", "optimizer_in_backward": False, "head_in_blocks": False}
        plain = replace(config, **ordinary, gradient_checkpointing="none",
                        global_batch_size=micro_batch_size(config, self.num_processes) * self.num_processes)
        less = replace(plain, micro_batch_size=1, global_batch_size=self.num_processes, loss_chunk_tokens="auto")
        return self._play(plain, whole=True), self._play(less, whole=True, layers=PLAYED_LAYERS - 1)

    def _evaluate_and_save(self, whole: Play, less: Play, start: int, layers: int) -> dict[str, int]:
        """Both rise above the level between updates: evaluation as in any model, a save by what it copies of each layer."""
        rise, less_rise = ({name: found.peak_bytes - played.windows[0].start_bytes
                            for name, found in played.ledger.snapshots().items()} for played in (whole, less))
        by_layer = rise["save"] - less_rise["save"]
        return {"evaluate": start + rise["evaluate"],
                "save": start + rise["save"] + (layers - PLAYED_LAYERS) * by_layer}

    def _play(self, config: RunConfig, whole: bool = False, any_rows: bool = False, layers: int = PLAYED_LAYERS) -> Play:
        rows = micro_batch_size(config, self.num_processes)
        if any_rows and not config.optimizer_in_backward:
            rows = 1
            config = replace(config, micro_batch_size=1, global_batch_size=self.num_processes)
        wanted = config.global_batch_size // self.num_processes // rows
        key: tuple[object, ...] = (
            config.param_dtype, config.mixed_precision, config.optimizer, config.optimizer_in_backward, config.head_in_blocks,
            config.gradient_checkpointing, config.recomputed_rows, config.offload_activations, config.loss_chunk_tokens,
            config.seq_len, rows, min(wanted, 2), layers)
        if (*key, True) in self.plays:  # a play with evaluation and save serves one without
            whole = True
        key = (*key, whole)
        if key not in self.plays:
            played = replace(config, checkpointed_layers="all", global_batch_size=rows * min(wanted, 2) * self.num_processes,
                             micro_batch_size=rows)
            shape = replace(self.shape, num_hidden_layers=layers)
            self.plays[key] = play(played, shape, self.num_processes, whole, first_update=False)
        return replace(self.plays[key], wanted=wanted)


def _blocks(windows: list[Window]) -> list[list[Window]]:
    """The windows of layers, and those before, between and after them, in turn."""
    blocks: list[list[Window]] = [[]]
    for window in windows:
        is_layer = window.place.startswith("layer ")
        same_run = blocks[-1] and blocks[-1][-1].phase == window.phase
        if is_layer != (len(blocks) % 2 == 0) or (is_layer and blocks[-1] and not same_run):
            blocks.append([])
        blocks[-1].append(window)
    return blocks


def _layer(block: list[Window], layer: int, layers: int) -> Window:
    """The played window that stands for `layer` of `layers`."""
    index = 0 if layer == 0 else PLAYED_LAYERS - 1 if layer == layers - 1 else 1
    return next(window for window in block if window.place == f"layer {index}")


def _after_layers(block: list[Window], own: list[Window]) -> list[Window]:
    """The end of an update, with the optimizer's windows of `own` (if any) in place of those played."""
    if not own:
        return block
    before = list(itertools.takewhile(lambda window: window.phase != "optimizer", block))
    return before + [window for window in own if window.phase == "optimizer"]
