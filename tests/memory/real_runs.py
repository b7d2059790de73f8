"""Real runs of tiny models, measured by the allocator's own events."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from memtrain.config import make_config
from memtrain.data.order import Update
from memtrain.options import RunConfig

SHAPE = {"model": "tiny", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "seq_len": 128, "global_batch_size": 4, "micro_batch_size": 4,
         "max_steps": 10}
TOKENIZER = SimpleNamespace(save_pretrained=lambda folder: None, bos_token_id=None, eos_token_id=0, pad_token_id=None)


def tiny_config(**options: Any) -> RunConfig:
    return make_config(SHAPE, options)


def make_update(config: RunConfig) -> Update:
    """An update of random rows; padded rows end early."""
    rows, size = config.global_batch_size, int(config.micro_batch_size)
    ids = torch.randint(0, config.vocab_size or 2000, (rows, config.seq_len))
    targets = ids.clone()
    if config.packing == "padded":
        for row in range(rows):
            targets[row, config.seq_len - 7 * row - 5:] = -100
    batches: list[dict[str, Any]] = [{"input_ids": ids[i:i + size].clone(), "targets": targets[i:i + size].clone()}
                                     for i in range(0, rows, size)]
    if config.document_mask:
        for batch in batches:
            batch["document_lengths"] = [config.seq_len] * size
    return Update(batches, int((targets >= 0).sum()), rows, rows)


class Steps:
    """The steps of a real run in order, each under a name that the profiler sees."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        from memtrain.model.presets import model_config
        self.config, self.folder, self.shape = config, folder, model_config(config)
        self.update = make_update(config)

    def run(self, named: Callable[[str], Any], attach: Callable[[Any], None] = lambda state: None) -> None:
        from memtrain.model.huggingface import export
        from memtrain.training import checkpoint as checkpoints
        from memtrain.training.progress import Progress
        from memtrain.training.step import build, evaluate, make_accelerator, train_step
        accelerator = make_accelerator(self.config)
        with named("train"):
            self.state = build(self.config, self.shape, accelerator, 10)
            attach(self.state)
            for _ in range(2):
                train_step(self.state, self.update)
        with named("evaluate"):
            evaluate(self.state.model, accelerator, (self.update.micro_batches[0] for _ in range(3)))
        with named("save"):
            checkpoints.save_checkpoint(self.state, checkpoints.RunState(Progress(step=1), 1, {}, {}, ""), TOKENIZER,
                                        self.folder / "checkpoints", 1)
            export(accelerator.get_state_dict(self.state.model), self.shape, TOKENIZER, self.folder / "export")

    def resume(self, named: Callable[[str], Any]) -> None:
        """Go on from the checkpoint that `run` left."""
        from memtrain.training import checkpoint as checkpoints
        from memtrain.training.checkpoint_files import complete_checkpoints
        from memtrain.training.step import build, make_accelerator, train_step
        path, = complete_checkpoints(self.folder / "checkpoints")
        with named("load"):
            self.state = build(self.config, self.shape, make_accelerator(self.config), 10)
            checkpoints.load_checkpoint(self.state, path, checkpoints.read_run_state(path), print)
        with named("train"):
            train_step(self.state, self.update)


def allocator_peaks(function: Callable[[Callable[[str], Any]], Any]) -> dict[str, int]:
    """Peaks by name of what `function(named)` does within `named(...)`: every allocation of the CPU allocator, in order."""
    gc.collect()  # what an earlier test left must not be freed within
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function(lambda name: torch.profiler.record_function(f"part {name}"))
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    spans = [(event.start_ns(), event.end_ns(), event.name()[5:]) for event in events if event.name().startswith("part ")]
    level, peaks = 0, {name: 0 for *_, name in spans}
    for event in events:
        if event.name() == "[memory]":
            level += event.nbytes()
            for start, end, name in spans:
                if start <= event.start_ns() <= end:
                    peaks[name] = max(peaks[name], level)
    assert len(peaks) == len(spans) and all(peaks.values()), peaks
    return peaks
