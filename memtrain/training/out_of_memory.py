"""Out of memory in a run: the failed try is freed, the recipe made smaller, and the same samples are computed again.

The global batch is the experiment and stays; micro-batches, gradient checkpointing and chunks of the loss are only how it is
computed. What cannot be tried again (half an update was made) starts from the newest checkpoint, or from the seed.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator

from memtrain.command import TrainingStopped
from memtrain.data.order import Update
from memtrain.model.loss import automatic_chunk_tokens
from memtrain.model.presets import LlamaConfig
from memtrain.options import RunConfig
from memtrain.training.progress import Progress
from memtrain.training.step import StepResult, TrainState, micro_batch_size, set_recipe

Result = TypeVar("Result")
# what may become smaller without another result, beyond the rounding of sums
RECIPE = ("micro_batch_size", "gradient_checkpointing", "checkpointed_layers", "recomputed_rows", "loss_chunk_tokens")
NEXT_CHECKPOINTING = {"none": "selective", "selective": "full", "selective_deep": "full"}
SMALLEST_CHUNK_TOKENS = 16  # fewer save next to nothing and cost a product each
# functions in which memory ran out -> phase; the outermost counts
PHASE_OF = {"build": "init", "load_checkpoint": "load", "save_checkpoint": "save", "_save_behind": "save", "finish": "save",
            "evaluate": "evaluate", "forward_loss": "forward", "backward": "backward", "clip_grad_norm_": "optimizer",
            "optimizer_step": "optimizer"}


class OutOfMemory(TrainingStopped):
    """Memory ran out in `phase`, and no smaller recipe is left or would help."""

    def __init__(self, phase: str, detail: str) -> None:
        super().__init__(f"out of memory in phase {phase}: {detail}")
        self.phase, self.detail = phase, detail


class Restart(Exception):
    """Half an update was made, and the recipe has been made smaller: the run has to start anew from what is saved."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocator, and nothing else, is behind this error."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemory)):
        return True
    # the CPU's allocator and cuBLAS have no error of their own
    return type(error) is RuntimeError and any(
        text in str(error) for text in ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"))


def phase_of(error: BaseException) -> str:
    """The phase of the run in which an error was raised."""
    if isinstance(error, OutOfMemory):
        return error.phase
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((PHASE_OF[name] for name in names if name in PHASE_OF), "init")


def detail_of(error: BaseException) -> str:
    """What the allocator said, in a line."""
    if isinstance(error, OutOfMemory):
        return error.detail
    return " ".join(str(error).split())[:200] or type(error).__name__


def free_failed_try() -> None:
    """Give back what only the frames of a handled error held. Call it outside of the handler."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def recipe(config: RunConfig) -> dict[str, Any]:
    """The options that may become smaller."""
    return {name: getattr(config, name) for name in RECIPE}


def words(changes: dict[str, Any]) -> str:
    """Options and their values, for people."""
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def smaller_recipe(config: RunConfig, shape: LlamaConfig, device_type: str, num_processes: int = 1) -> dict[str, Any] | None:
    """The next smaller way to compute the same update; None: there is none."""
    size, share = micro_batch_size(config, num_processes), config.global_batch_size // num_processes
    if size > 1 and not config.optimizer_in_backward:  # which needs the share in one micro-batch
        return {"micro_batch_size": max(rows for rows in range(1, size // 2 + 1) if share % rows == 0)}
    kind, layers, int8 = config.gradient_checkpointing, config.checkpointed_layers, config.param_dtype == "int8"
    if kind != "none" and layers != "all" and int(layers) < shape.num_hidden_layers:
        return {"checkpointed_layers": "all"}
    if kind in NEXT_CHECKPOINTING:
        # what selective checkpointing keeps is out of reach of an offload, and of int8 layers
        kind = "full" if config.offload_activations or int8 else NEXT_CHECKPOINTING[kind]
        return {"gradient_checkpointing": kind, "checkpointed_layers": "all"}
    rows = size if config.recomputed_rows == "all" else min(size, int(config.recomputed_rows))
    if rows > 1 and not int8:  # whose weights change with the first rows
        return {"recomputed_rows": rows // 2}
    chunk = config.loss_chunk_tokens
    tokens = automatic_chunk_tokens(shape.vocab_size, device_type) if chunk == "auto" else int(chunk)
    smaller = min(tokens, size * config.seq_len) // 4
    return {"loss_chunk_tokens": smaller} if smaller >= SMALLEST_CHUNK_TOKENS else None


class Retry:
    """The updates of a run on one process, each tried again with a smaller recipe where memory runs out. (On several
    processes an error is let through: the others wait for this one's gradients.)

    make_updates: the updates from `progress.position` on, as `config` says now. changed: called with a line for the user when
    `config` was changed. The random state is put back before a second try, so that dropout draws what it would have drawn in
    a run with the smaller recipe.
    """

    def __init__(self, state: TrainState, config: RunConfig, shape: LlamaConfig, progress: Progress,
                 make_updates: Callable[[], Iterable[Update]], changed: Callable[[str], Any],
                 say: Callable[[str], Any]) -> None:
        self.state, self.config, self.shape, self.progress = state, config, shape, progress
        self.make_updates, self.changed, self.say = make_updates, changed, say
        self.again = self.began = False
        self.evaluation_rows: int | None = None
        optimizer = getattr(state.optimizer, "optimizer", state.optimizer)
        optimizer.register_step_pre_hook(self._begin)

    def _begin(self, *_: Any) -> None:
        self.began = True

    def updates(self) -> Iterator[Update]:
        """Update after update; after `step` gave None, the same samples again."""
        while True:
            self.again = False
            for update in self.make_updates():
                yield update
                if self.again:
                    break
            else:
                return

    def step(self, train_step: Callable[[TrainState, Update], StepResult], update: Update) -> StepResult | None:
        """`train_step(state, update)`; None where memory ran out and the same samples are to be tried again.

        Raises OutOfMemory where that cannot help, and Restart where weights have begun to move."""
        if self.state.accelerator.num_processes > 1:
            return train_step(self.state, update)
        device = self.state.accelerator.device
        random_states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.began = False
        try:
            return train_step(self.state, update)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            phase, detail = phase_of(error), detail_of(error)
        self._forget()
        if self.began and not self.state.in_backward:  # the activations are gone by then: no recipe takes less
            raise OutOfMemory(phase, f"update {self.progress.step + 1} was half made and is lost; {detail}")
        self._shrink(phase, detail)
        if self.began:
            raise Restart("half an update was made: starting again from what is saved, or from the seed")
        torch.set_rng_state(random_states[0])
        if random_states[1] is not None:
            torch.cuda.set_rng_state(random_states[1], device)
        self.again = True
        return None

    def evaluate(self, evaluate: Callable[[RunConfig], Result]) -> Result:
        """`evaluate(config)`, with half as many rows at a time as often as memory runs out."""
        rows = self.evaluation_rows or micro_batch_size(self.config, self.state.accelerator.num_processes)
        while True:
            try:
                return evaluate(replace(self.config, micro_batch_size=rows))
            except Exception as error:
                if not is_out_of_memory(error) or rows == 1 or self.state.accelerator.num_processes > 1:
                    raise
                detail = detail_of(error)
            free_failed_try()
            rows = self.evaluation_rows = rows // 2
            self.say(f"\nout of memory in an evaluation ({detail}): going on with {rows} rows at a time")

    def _forget(self) -> None:
        """No gradient, graph or buffer of the failed try stays."""
        for parameter in self.state.model.parameters():
            parameter.grad = None
        scaler = self.state.accelerator.scaler
        if scaler is not None:  # it may have unscaled gradients that are gone now
            scaler._per_optimizer_states.clear()
        free_failed_try()

    def _shrink(self, phase: str, detail: str) -> None:
        changes = smaller_recipe(self.config, self.shape, self.state.accelerator.device.type)
        if changes is None:
            raise OutOfMemory(phase, f"update {self.progress.step + 1}, with the smallest recipe there is; {detail}")
        for name, value in changes.items():
            setattr(self.config, name, value)
        set_recipe(self.state.accelerator.unwrap_model(self.state.model, keep_torch_compile=False), self.config)
        self.changed(f"out of memory in the {phase} of update {self.progress.step + 1} ({detail}): the same "
                     f"{self.config.global_batch_size} samples again with {words(changes)}")


def with_restarts(run: Callable[[], int], say: Callable[[str], Any]) -> int:
    """`run()` until it ends otherwise than by Restart."""
    while True:
        try:
            return run()
        except Restart as restart:
            line = str(restart)
        free_failed_try()
        say(line)


@contextmanager
def end_together(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """With several processes, what stops one stops all with the same message: it leaves a note in `folder`, and its end breaks
    the connection that the others wait on."""
    if accelerator.num_processes == 1:
        yield
        return
    note = folder / ".stopped"
    if accelerator.is_main_process:
        note.unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    try:
        yield
    except TrainingStopped as error:
        with suppress(OSError):  # of a full disk all were told already
            note.write_text(str(error), encoding="utf-8")
        raise
    except RuntimeError as error:
        if not note.exists():
            raise
        raise TrainingStopped(note.read_text(encoding="utf-8")) from error
