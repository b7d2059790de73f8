"""When checkpoints are written: at once, or behind the training."""

from __future__ import annotations

import contextlib
import shutil
import threading
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from accelerate.checkpointing import save_accelerator_state
from accelerate.utils import save
from accelerate.utils.constants import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME
from torch import Tensor

from memtrain.options import RunConfig, parse_bytes
from memtrain.training.agreement import Agreement, everywhere
from memtrain.training.checkpoint import RunState, check_weights, complete, partial_folder, save_checkpoint
from memtrain.training.checkpoint_files import WRITE_ERRORS, checkpoint_name, stop_when_refused
from memtrain.training.disk import model_bytes, optimizer_bytes
from memtrain.training.step import TrainState


def host_memory(value: Any) -> Any:
    """A nest of dicts and lists with memory on the host for every tensor, already cleared by the system: new memory costs
    several times the copying into it."""
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="cpu", requires_grad=False).fill_(0)
    if isinstance(value, dict):
        return {key: host_memory(item) for key, item in value.items()}
    return [host_memory(item) for item in value] if isinstance(value, list) else value


def host_copy(value: Any, into: Any = None) -> Any:
    """A nest of dicts and lists with every tensor copied to the host, where training does not change it; where it fits, to the
    memory of `into`."""
    if isinstance(value, Tensor):
        fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (value.shape, value.dtype)
        return into.copy_(value.detach()) if fits else value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return type(value)((key, host_copy(item, into.get(key) if isinstance(into, dict) else None))
                           for key, item in value.items())
    if isinstance(value, list):
        memory = into if isinstance(into, list) and len(into) == len(value) else [None] * len(value)
        return [host_copy(item, other) for item, other in zip(value, memory, strict=True)]
    return value


class Saver:
    """Writes the checkpoints of a run. Every process has one and calls it alike.

    With `save_async`, `save(behind=True)` returns when a copy is in host memory (taken at the first `check`, and kept until the
    run ends); a thread of the main process writes it by the same rules as ever. At most one is being written. Its error is
    raised by the next call of any method, on all processes.
    """

    def __init__(self, state: TrainState, run: RunState, tokenizer: Any, folder: Path, config: RunConfig,
                 agreement: Agreement) -> None:
        self.state, self.run, self.tokenizer, self.folder, self.config = state, run, tokenizer, folder, config
        self.agreement, self.accelerator = agreement, state.accelerator
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.copy: list[Any] = []  # model and optimizer in host memory, kept for the next one
        self.asked_for_room = self.said_no_room = False

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif self.thread is not None:  # the run ends for another reason: let the last checkpoint be finished
            self.thread.join()

    def save(self, behind: bool = False) -> None:
        """Save the run as it is now. Raises TrainingStopped if the disk refuses this or the last one."""
        self.wait()
        if behind and self.config.save_async and self._has_room():
            self._save_behind()
        else:
            save_checkpoint(self.state, self.run, self.tokenizer, self.folder, self.config.keep_last, self.config.keep_best)

    def wait(self) -> None:
        """Until nothing is being written."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self._raise_error()

    def check(self) -> None:
        """After each update. Raises TrainingStopped, on all processes, if writing behind the training has failed."""
        self._raise_error()
        if self.config.save_async and not self.asked_for_room:
            self.asked_for_room = True
            if self._has_room() and self.accelerator.is_main_process and self.thread is None:
                self.thread = threading.Thread(target=self._take_memory, args=(self._state(),), daemon=True)
                self.thread.start()

    def _raise_error(self) -> None:
        if self.config.save_async and self.agreement.highest(self.error is not None):
            with stop_when_refused(self.folder, self.folder):
                raise self.error or OSError("the main process could not write it")

    def _take_memory(self, state: list[Any]) -> None:
        with contextlib.suppress(RuntimeError, MemoryError):  # then the first save asks again
            self.copy = host_memory(state)

    def _state(self) -> list[Any]:
        return [self.accelerator.get_state_dict(self.state.model), self.state.optimizer.state_dict()]

    def _has_room(self) -> bool:
        need, free = 0, 0
        if self.accelerator.is_main_process and not self.copy:
            need = model_bytes(self.state.model) + optimizer_bytes(self.state.optimizer)
            free = psutil.virtual_memory().available
            if self.config.memory_budget is not None and self.accelerator.device.type == "cpu":
                free = min(free, parse_bytes(self.config.memory_budget) - psutil.Process().memory_info().rss)
        has_room = not self.agreement.highest(need > free)
        if not has_room and not self.said_no_room:
            self.said_no_room = True
            self.accelerator.print(f"save_async: a copy takes {need:,} bytes of host memory, and {max(free, 0):,} are free; "
                                   "training waits for the writing instead")
        return has_room

    def _save_behind(self) -> None:
        check_weights(self.state, self.run, self.folder)
        accelerator, final = self.accelerator, self.folder / checkpoint_name(self.run.progress.step)
        with partial_folder(self.state, final) as partial:
            # small, and of this moment: schedule, scaler, and the random numbers of each process
            everywhere(accelerator, lambda: save_accelerator_state(
                str(partial), [], [], [self.state.scheduler], [], accelerator.process_index, accelerator.step,
                accelerator.scaler), WRITE_ERRORS)
        if accelerator.is_main_process:
            self.copy = host_copy(self._state(), self.copy)
            self.thread = threading.Thread(target=self._write, args=(partial, final, asdict(self.run)), daemon=True)
            self.thread.start()

    def _write(self, partial: Path, final: Path, run: dict[str, Any]) -> None:
        """What `accelerator.save_state` does with model and optimizer, from their copies."""
        model, optimizer = self.copy
        try:
            save(model, partial / SAFE_WEIGHTS_NAME, safe_serialization=True)
            save(optimizer, partial / f"{OPTIMIZER_NAME}.bin")
            complete(partial, final, run, self.tokenizer, self.config.keep_last, self.config.keep_best)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            self.error = error
