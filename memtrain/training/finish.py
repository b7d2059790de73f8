"""What a run does with its model: evaluate it on held-out text, export it, let it write a sample."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from memtrain.command import BadInput
from memtrain.data.corpus import source_problems
from memtrain.data.order import eval_batches
from memtrain.data.prepare import Data, prepare, prepare_evaluation
from memtrain.data.tokenizer import pad_token_id
from memtrain.model.generate import generate
from memtrain.model.huggingface import export
from memtrain.model.presets import LlamaConfig
from memtrain.options import RunConfig
from memtrain.training.check import precision_problems
from memtrain.training.checkpoint import Opened
from memtrain.training.checkpoint_files import stop_when_refused
from memtrain.training.metrics import evaluation_metrics
from memtrain.training.step import TrainState, evaluate, micro_batch_size, on_main_first

SAMPLE_TOKENS = 100


def evaluate_data(model: Any, accelerator: Accelerator, data: Data, config: RunConfig,
                  most_batches: int | None = None) -> dict[str, float] | None:
    """Metrics on the held-out documents (None if none are held out), or on their first `most_batches` micro-batches."""
    if data.evaluation is None:
        return None
    batches = data.evaluation_batches(micro_batch_size(config, accelerator.num_processes), accelerator.process_index,
                                      accelerator.num_processes)
    batches = itertools.islice(batches, most_batches)
    return evaluation_metrics(*evaluate(model, accelerator, batches), data.eval_bytes)


def evaluate_text(opened: Opened, config: RunConfig, accelerator: Accelerator, held_out: bool) -> dict[str, float]:
    """Metrics of a model on the documents that `config` holds out, or on all of them. Raises BadInput."""
    if problems := precision_problems(config) + source_problems(config):
        raise BadInput("\n".join(problems))
    config = replace(config, tokenizer=opened.tokenizer.name_or_path, vocab_size=None)
    model = accelerator.prepare_model(opened.model, evaluation_mode=True)
    if not held_out:
        rows, text_bytes = on_main_first(accelerator, lambda: prepare_evaluation(config, opened.tokenizer))
        end_id = opened.tokenizer.eos_token_id if config.document_mask else None
        batches = eval_batches(rows, micro_batch_size(config, accelerator.num_processes), accelerator.process_index,
                               accelerator.num_processes, config.seq_len, pad_token_id(opened.tokenizer), end_id)
        return evaluation_metrics(*evaluate(model, accelerator, batches), text_bytes)
    data = on_main_first(accelerator, lambda: prepare(config, opened.model.config.vocab_size))
    metrics = evaluate_data(model, accelerator, data, config)
    if metrics is None:
        raise BadInput(f"{opened.path}: its run held out no documents (eval_fraction=0); set --dataset")
    return metrics


def finish(state: TrainState, shape: LlamaConfig, data: Data, folder: Path, say: Callable[[str], Any]) -> None:
    """Export the model to `folder` in its own dtype and show a sample of its text."""
    accelerator = state.accelerator
    weights = accelerator.get_state_dict(state.model)
    if accelerator.is_main_process:
        with stop_when_refused(folder, folder.parent / "checkpoints"):
            export(weights, shape, data.tokenizer, folder)
        model = accelerator.unwrap_model(state.model)
        start = data.tokenizer.bos_token_id if data.tokenizer.bos_token_id is not None else data.end_id
        tokens = generate(model, [start], SAMPLE_TOKENS, temperature=0.8, top_k=50, end_id=data.end_id)
        say(f"a sample:\n{data.tokenizer.decode(tokens, skip_special_tokens=True)}\n\nexported to {folder}")
    accelerator.wait_for_everyone()
