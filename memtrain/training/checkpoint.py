"""Checkpoints: complete or absent, and loaded only when complete."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from memtrain.command import BadInput, TrainingStopped
from memtrain.config import changed_options, read_recipe
from memtrain.data.prepare import Data
from memtrain.data.tokenizer import load_tokenizer
from memtrain.model.huggingface import load_model, load_weights
from memtrain.model.llama import LlamaForCausalLM
from memtrain.model.presets import LlamaConfig
from memtrain.optim.low_memory import local_tensor
from memtrain.options import RunConfig
from memtrain.training.disk import require_space
from memtrain.training.load import load_state
from memtrain.training.out_of_memory import RECIPE, is_out_of_memory, words
from memtrain.training.progress import Progress
from memtrain.training.step import TrainState

RUN_STATE = "run_state.json"
PARTIAL = ".partial-"
# torch and safetensors report a full disk by errors of their own
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
LIBRARIES = ("memtrain", "torch", "accelerate", "transformers", "datasets")


@dataclass
class RunState:
    """`run_state.json`: what a checkpoint is of."""

    progress: Progress
    world_size: int
    config: dict[str, Any]
    model: dict[str, Any]
    data: str
    files: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)  # of `config`, before memory ran out and it was made smaller

    @property
    def shape(self) -> LlamaConfig:
        return LlamaConfig(**self.model)


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def new_run_state(config: RunConfig, shape: LlamaConfig, data: Data, world_size: int,
                  progress: Progress | None = None) -> RunState:
    """What checkpoints of this run will say of themselves."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
    return RunState(progress or Progress(), world_size, asdict(config), asdict(shape), data.fingerprint, versions=versions)


def save_checkpoint(state: TrainState, run: RunState, tokenizer: Any, folder: Path, keep_last: int) -> Path:
    """Write `folder/step-...`: first under a temporary name, then flushed, verified and renamed; only then are all but the
    newest `keep_last` removed. Every process calls it. Raises TrainingStopped if the disk refuses; older checkpoints stay."""
    accelerator = state.accelerator
    final = folder / checkpoint_name(run.progress.step)
    partial = folder / (PARTIAL + final.name)
    # smallest and largest show nan and infinity, and take no copy of a parameter (a sum in float32 would)
    bounds = [bound.float() for parameter in state.model.parameters()
              for bound in local_tensor(parameter.detach()).aminmax()]
    if not torch.stack(bounds).isfinite().all():
        raise TrainingStopped(f"update {run.progress.step}: weights are not finite and were not saved; "
                              f"{last_good(folder)}; lower learning_rate")
    try:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            require_space(state, folder)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial), safe_serialization=True)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            tokenizer.save_pretrained(partial / "tokenizer")
            _seal(partial, run)
            replaced = folder / (PARTIAL + "replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            if final.exists():  # the same step, saved before a resume from an older one
                os.replace(final, replaced)
            os.replace(partial, final)
            shutil.rmtree(replaced, ignore_errors=True)
            _flush(folder)
            for old in complete_checkpoints(folder)[0][:-keep_last]:
                shutil.rmtree(old)
    except WRITE_ERRORS as error:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        with stop_when_refused(final, folder):
            raise error
    accelerator.wait_for_everyone()
    return final


def _seal(partial: Path, run: RunState) -> None:
    """Flush every file, note its size, and write run_state.json last: its presence says that all is there."""
    files = {}
    for path in sorted(partial.rglob("*")):
        _flush(path)
        if path.is_file():
            files[str(path.relative_to(partial))] = path.stat().st_size
    run.files = files
    path = partial / RUN_STATE
    path.write_text(json.dumps(asdict(run), indent=1), encoding="utf-8")
    _flush(path)
    _flush(partial)
    if problem := checkpoint_problem(partial):
        raise OSError(problem)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_run_state(checkpoint: Path) -> RunState:
    """Raises BadInput if `checkpoint` is none, or is incomplete."""
    if problem := checkpoint_problem(checkpoint):
        raise BadInput(f"{checkpoint}: {problem}; choose a complete checkpoint")
    values = json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))
    return RunState(**{**values, "progress": Progress(**values["progress"])})


def checkpoint_problem(checkpoint: Path) -> str | None:
    """Why a folder is no complete checkpoint, or None."""
    try:
        files = json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"no readable {RUN_STATE}"
    for name, size in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def complete_checkpoints(folder: Path) -> tuple[list[Path], list[str]]:
    """(complete checkpoints, oldest first; a line for every folder that is not one)."""
    complete, ignored = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(PARTIAL):
            ignored.append(f"{path}: ignored, its writing did not end")
        elif path.name.startswith("step-"):
            problem = checkpoint_problem(path)
            if problem is None:
                complete.append(path)
            else:
                ignored.append(f"{path}: ignored, {problem}")
    return complete, ignored


@contextmanager
def stop_when_refused(path: Path, folder: Path) -> Iterator[None]:
    """TrainingStopped where the disk refuses to take `path`; it names the newest complete checkpoint in `folder`."""
    try:
        yield
    except WRITE_ERRORS as error:
        if is_out_of_memory(error):  # no disk refused
            raise
        raise TrainingStopped(f"{path}: could not be written ({' '.join(str(error).split())[:200]}); {last_good(folder)}; "
                              "free some space and run the same command") from error


def last_good(folder: Path) -> str:
    """The newest complete checkpoint, in words."""
    complete = complete_checkpoints(folder)[0]
    return f"the last good checkpoint is {complete[-1]}" if complete else "there is no good checkpoint yet"


def choose_checkpoint(config: RunConfig, output: Path, say: Callable[[str], Any]) -> tuple[Path | None, RunState | None]:
    """The checkpoint to go on from, by `config.resume`, and what it is of. Raises BadInput."""
    if config.resume not in ("auto", "none"):
        path = Path(config.resume).expanduser()
        return path, read_run_state(path)
    complete, ignored = complete_checkpoints(output / "checkpoints")
    for line in ignored:
        say(line)
    if not complete:
        return None, None
    if config.resume == "none":
        raise BadInput(f"resume=none: {output} holds {complete[-1].name}, which a new run would write over; set resume=auto, "
                       "or another output_dir")
    return complete[-1], read_run_state(complete[-1])


def resume_problems(run: RunState, config: RunConfig, shape: LlamaConfig, data: str) -> list[str]:
    """What makes a run another one than that which saved its checkpoint, a line each."""
    found = [f"{name}={getattr(config, name)}: the checkpoint was trained with {name}={run.config[name]}; set that, or "
             "another output_dir" for name in changed_options(run.config, config)]
    if not found and run.shape != shape:
        found.append("the shape of the model is not the checkpoint's; use the model it was trained with, or another output_dir")
    if not found and run.data != data:
        found.append("the text, tokenizer or rows are not those the checkpoint was trained on; restore them, or choose "
                     "another output_dir")
    return found


def keep_fitted(config: RunConfig, asked: dict[str, Any], run: RunState, num_processes: int) -> str:
    """Let a resumed run go on with the recipe that its checkpoint was fitted to, where it asks for the same as then.

    asked: `recipe` as this run asks for it; `config` may already have been made smaller since. Returns what changed, in words.
    """
    changes = {name: run.config[name] for name in RECIPE if num_processes == run.world_size and name in run.asked
               and run.asked[name] == asked[name] == getattr(config, name) != run.config[name]}
    for name, value in changes.items():
        setattr(config, name, value)
    return words(changes)


def load_checkpoint(state: TrainState, checkpoint: Path, run: RunState, say: Callable[[str], Any]) -> None:
    """Put model, optimizer, schedule, scaler and random numbers back; `say` what could not be kept."""
    accelerator = state.accelerator
    load_state(accelerator, checkpoint)
    # load_state goes on without a word where one is missing
    if missing := [str(rank) for rank in range(accelerator.num_processes)
                   if not (checkpoint / f"random_states_{rank}.pkl").exists()]:
        say(f"{checkpoint}: holds no random state for process {', '.join(missing)} (saved by {run.world_size} process(es)); "
            "dropout draws anew from the seed")


@dataclass
class Opened:
    """A model on the CPU in evaluation mode, its tokenizer, and the options of the run it is from, if it is known."""

    path: Path
    model: LlamaForCausalLM
    tokenizer: Any
    options: dict[str, Any] | None

    def prompt_ids(self, text: str) -> list[int]:
        """`text` as its tokenizer encodes a prompt; never empty."""
        start = self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.tokenizer.eos_token_id
        return self.tokenizer(text).input_ids or [start]


def open_model(source: str) -> Opened:
    """The model of a checkpoint, of a run's folder (its newest complete checkpoint), or of a Llama folder or hub id of
    transformers. Raises BadInput."""
    path = Path(source).expanduser()
    complete, ignored = complete_checkpoints(path / "checkpoints")
    for line in ignored:
        print(line, file=sys.stderr)
    if complete:
        path = complete[-1]
    if (path / RUN_STATE).exists() or path.name.startswith(("step-", PARTIAL)):
        run = read_run_state(path)
        model = LlamaForCausalLM(run.shape)
        load_weights(model, str(path))
        return Opened(path, model.eval(), load_tokenizer(str(path / "tokenizer")), run.config)
    if (not path.exists() and source.startswith((".", "/", "~"))) or path.is_file():
        raise BadInput(f"{source}: no such folder; want a checkpoint, a run's folder, or a Llama folder of transformers")
    model = load_model(source)
    beside = path.parent / "config.yaml"  # an export lies in the folder of its run
    options = read_recipe(str(beside)) if path.is_dir() and beside.is_file() else None
    return Opened(path, model, load_tokenizer(source), options)
