"""Checkpoints: complete or absent, and loaded only when complete."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import load

from memtrain.command import BadInput, TrainingStopped
from memtrain.config import changed_options, read_recipe
from memtrain.data.prepare import Data
from memtrain.data.tokenizer import load_tokenizer
from memtrain.model.huggingface import load_model, load_weights
from memtrain.model.llama import LlamaForCausalLM, new_model
from memtrain.model.presets import LlamaConfig
from memtrain.optim.low_memory import local_tensor
from memtrain.options import SAID_WHEN_CHANGED, RunConfig
from memtrain.training.agreement import everywhere, on_main_only
from memtrain.training.checkpoint_files import (
    PARTIAL,
    RUN_STATE,
    WRITE_ERRORS,
    checkpoint_name,
    checkpoint_problem,
    clear_leftovers,
    last_good,
    newest_complete,
    prune,
    publish,
    seal,
    set_aside_newer,
    stop_when_refused,
)
from memtrain.training.disk import require_space
from memtrain.training.load import load_state
from memtrain.training.out_of_memory import RECIPE, words
from memtrain.training.progress import Progress
from memtrain.training.step import TrainState

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
    checksums: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    evaluated: tuple[int, float] | None = None  # (update, loss) of the last evaluation
    asked: dict[str, Any] = field(default_factory=dict)  # of `config`, before memory ran out and it was made smaller

    @property
    def shape(self) -> LlamaConfig:
        return LlamaConfig(**self.model)


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def new_run_state(config: RunConfig, shape: LlamaConfig, data: Data, world_size: int,
                  progress: Progress | None = None) -> RunState:
    """What checkpoints of this run will say of themselves."""
    return RunState(progress or Progress(), world_size, asdict(config), asdict(shape), data.fingerprint, versions=versions())


def check_weights(state: TrainState, run: RunState, folder: Path) -> None:
    """Raises TrainingStopped, on all processes, if a weight is not finite on any: such weights are never saved."""
    accelerator = state.accelerator
    # smallest and largest show nan and infinity, and take no copy of a parameter (a sum in float32 would)
    bounds = [bound.float() for parameter in state.model.parameters()
              for bound in local_tensor(parameter.detach()).aminmax()]
    finite = torch.stack(bounds).isfinite().all().int()
    if int(accelerator.reduce(finite, "sum")) < accelerator.num_processes:
        raise TrainingStopped(f"update {run.progress.step}: weights are not finite and were not saved; "
                              f"{last_good(folder)}; lower learning_rate")


def save_checkpoint(state: TrainState, run: RunState, tokenizer: Any, folder: Path, keep_last: int,
                    keep_best: bool = False) -> Path:
    """Write `folder/step-...`: first under a temporary name, then flushed, verified and renamed; only then do older ones go.
    Every process calls it. Raises TrainingStopped, on all of them, if the disk refuses; older checkpoints stay."""
    accelerator = state.accelerator
    check_weights(state, run, folder)
    final = folder / checkpoint_name(run.progress.step)
    with partial_folder(state, final) as partial:
        everywhere(accelerator, lambda: accelerator.save_state(str(partial), safe_serialization=True), WRITE_ERRORS)

        def finish() -> None:
            if accelerator.is_main_process:
                complete(partial, final, asdict(run), tokenizer, keep_last, keep_best)

        everywhere(accelerator, finish, WRITE_ERRORS)
    return final


@contextmanager
def partial_folder(state: TrainState, final: Path) -> Iterator[Path]:
    """An empty folder beside `final` for all processes; removed, and TrainingStopped raised, where the disk refuses."""
    accelerator = state.accelerator
    partial = final.with_name(PARTIAL + final.name)

    def make() -> None:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            require_space(state, final.parent)
            partial.mkdir(parents=True)

    try:
        everywhere(accelerator, make, WRITE_ERRORS)
        yield partial
    except WRITE_ERRORS as error:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        with stop_when_refused(final, final.parent):
            raise error


def complete(partial: Path, final: Path, run: dict[str, Any], tokenizer: Any, keep_last: int, keep_best: bool) -> None:
    """Make a checkpoint of what Accelerate wrote to `partial`. One process calls it."""
    tokenizer.save_pretrained(partial / "tokenizer")
    seal(partial, run)
    publish(partial, final)
    config = RunConfig(**run["config"])
    prune(final.parent, keep_last, keep_best, lambda other: other["model"] == run["model"] and other["data"] == run["data"]
          and not changed_options(other["config"], config))


def read_run_state(checkpoint: Path, contents: bool = False) -> RunState:
    """Raises BadInput if `checkpoint` is none, or is incomplete (`contents`: down to the bytes of its files)."""
    if problem := checkpoint_problem(checkpoint, contents):
        raise BadInput(f"{checkpoint}: {problem}; choose a complete checkpoint")
    values = json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))
    try:
        return RunState(**{**values, "progress": Progress(**values["progress"])})
    except TypeError as error:
        raise BadInput(f"{checkpoint}: {RUN_STATE} is of another version ({error}); choose another checkpoint") from None


def choose_checkpoint(config: RunConfig, shape: LlamaConfig, data: str, accelerator: Accelerator
                      ) -> tuple[Path | None, RunState | None]:
    """The checkpoint to go on from, by `config.resume`, and what it is of. What killed writers left is cleared away first.
    Every process calls it. Raises BadInput."""
    chosen = on_main_only(accelerator, lambda: _choose(config, shape, data, accelerator.print))
    return chosen, None if chosen is None else read_run_state(chosen)


def _choose(config: RunConfig, shape: LlamaConfig, data: str, say: Callable[[str], Any]) -> Path | None:
    output = Path(config.output_dir).expanduser()
    clear_leftovers(output, say)
    refused: list[list[str]] = []
    passed_over: list[str] = []

    def problem(path: Path) -> str | None:
        try:
            found = resume_problems(read_run_state(path), config, shape, data)
        except BadInput as error:
            found = [str(error)]
        if found:
            refused.append(found)
        return f"written by another run ({found[0]})" if found else None

    folder = output / "checkpoints"
    given = None if config.resume in ("auto", "none") else Path(config.resume).expanduser()
    if given is not None and (reason := checkpoint_problem(given, contents=True) or problem(given)):
        raise BadInput("\n".join(refused[0]) if refused else
                       f"resume={given}: {reason}; choose a complete checkpoint, or resume=auto")
    if given is not None and given.resolve().parent == folder.resolve():
        chosen: Path | None = given  # back to it: newer ones are set aside
    else:  # a run that started from another's checkpoint goes on from its own
        chosen = newest_complete(folder, passed_over.append, problem) or given
    if chosen is None and refused:
        raise BadInput("\n".join(refused[0]))
    for line in passed_over:
        say(line)
    if chosen is not None and config.resume == "none":
        raise BadInput(f"resume=none: {output} holds {chosen.name}, which a new run would write over; set resume=auto, "
                       "or another output_dir")
    if chosen is not None:
        set_aside_newer(folder, read_run_state(chosen).progress.step, say)
    return chosen


def resume_problems(run: RunState, config: RunConfig, shape: LlamaConfig, data: str) -> list[str]:
    """What makes a run another one than that which saved its checkpoint, a line each."""
    found = [f"{name}={getattr(config, name)}: the checkpoint was trained with {name}={run.config[name]}; set that, or "
             "another output_dir" for name in changed_options(run.config, config)]
    if not found:
        now = asdict(shape)
        found += [f"the shape of the model has {name}={now[name]}, the checkpoint's {run.model.get(name)}; use the model it "
                  "was trained with, or another output_dir" for name in now if run.model.get(name) != now[name]]
    if not found and run.data != data:
        found.append(f"the text, tokenizer or rows are not those the checkpoint was trained on (now {data}; then {run.data}); "
                     "restore them, or choose another output_dir")
    return found


def resume_notes(run: RunState, config: RunConfig, num_processes: int) -> list[str]:
    """What a run that goes on does otherwise than the one that wrote its checkpoint, a line each."""
    found = [f"{name} was {run.config[name]} and is now {getattr(config, name)}" for name in SAID_WHEN_CHANGED
             if run.config.get(name) != getattr(config, name)]
    found += [f"{name} was {before} and is now {versions()[name]}: the last bits may differ"
              for name, before in run.versions.items() if name in ("torch", "python") and versions()[name] != before]
    if run.world_size != num_processes:
        found.append(f"saved by {run.world_size} process(es), going on with {num_processes}: updates keep their samples; the "
                     "random numbers of dropout cannot be kept, and sums may round otherwise")
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
    schedule = state.scheduler.scheduler
    rates = schedule.base_lrs  # of the options, which may have changed
    own = checkpoint / f"random_states_{accelerator.process_index}.pkl"
    try:
        load_state(accelerator, checkpoint)
        # it goes on without a word where random numbers are missing, or cannot be read
        random_state = load(own)["torch_manual_seed"] if own.exists() else None
    except UnpicklingError as error:  # all parts load with weights_only
        raise BadInput(f"{checkpoint}: holds what is no tensor or number ({str(error).splitlines()[0][:150]}); remove it if "
                       "you did not save it") from None
    schedule.base_lrs = rates
    schedule._last_lr = [rate * factor(schedule.last_epoch) for rate, factor in zip(rates, schedule.lr_lambdas, strict=True)]
    for group, rate, now in zip(state.optimizer.param_groups, rates, schedule._last_lr, strict=True):
        group["initial_lr"], group["lr"] = rate, now
    if missing := [str(rank) for rank in range(accelerator.num_processes)
                   if not (checkpoint / f"random_states_{rank}.pkl").exists()]:
        say(f"{checkpoint}: holds no random state for process {', '.join(missing)}; dropout draws anew from the seed")
    if random_state is not None and not torch.equal(random_state, torch.get_rng_state()):
        raise BadInput(f"{own}: its random state could not be set; remove {checkpoint} to go on from an older one")


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
    newest = newest_complete(path / "checkpoints", lambda line: print(line, file=sys.stderr))
    path = newest or path
    if (path / RUN_STATE).exists() or path.name.startswith(("step-", PARTIAL)):
        run = read_run_state(path, contents=newest is None)
        model = new_model(run.shape, "int8" if run.config["param_dtype"] == "int8" else "float32", initialise=False)
        load_weights(model, str(path))
        return Opened(path, model.eval(), load_tokenizer(str(path / "tokenizer")), run.config)
    if (not path.exists() and source.startswith((".", "/", "~"))) or path.is_file():
        raise BadInput(f"{source}: no such folder; want a checkpoint, a run's folder, or a Llama folder of transformers")
    model = load_model(source)
    beside = path.parent / "config.yaml"  # an export lies in the folder of its run
    options = read_recipe(str(beside)) if path.is_dir() and beside.is_file() else None
    return Opened(path, model, load_tokenizer(source), options)
