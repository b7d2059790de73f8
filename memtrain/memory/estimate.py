"""The bytes of a run before it is run: the very step that will train, played on fake tensors, which have shapes and no data.

Nothing here knows what a Llama, an optimizer or a checkpoint is made of: `training/` does it, and the tracker counts.
"""

from __future__ import annotations

import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.data.order import Update
from memtrain.memory.device import GPU_STATUS, gpu_apart
from memtrain.memory.ledger import PHASES, Ledger, Snapshot, Window, Work
from memtrain.memory.tracker import Tracker
from memtrain.model import int8, layers, loss
from memtrain.model.huggingface import export
from memtrain.model.presets import LlamaConfig
from memtrain.optim import by_rows, low_memory
from memtrain.optim.rule import numbers_at_a_time
from memtrain.options import RunConfig
from memtrain.training import checkpoint as checkpoints
from memtrain.training import disk
from memtrain.training.progress import Progress
from memtrain.training.step import StepResult, TrainState, build, evaluate, make_accelerator, micro_batch_size, train_step

Result = TypeVar("Result")
RANDOM_STATE_BYTES = torch.random.default_generator.get_state().nbytes


@dataclass
class Prediction:
    """Tensor bytes of a run on one process, at most and by part and phase; the work of an update; beside them, never mixed in,
    what the device adds (`apart`), what the machine around it gives (`host`), and what a GPU would add (`gpu_model`, not yet
    checked on one)."""

    peak_bytes: int
    parts: dict[str, int]
    phases: dict[str, int]
    operation: str
    phase_parts: dict[str, dict[str, int]] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    apart: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    gpu_model: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """What `memory.json` and `plan_memory.py --json` hold of it."""
        return {"peak_bytes": self.peak_bytes, "parts": self.parts, "phases": self.phases, "phase_parts": self.phase_parts,
                "operation": self.operation, "flops_per_update": self.work.flops,
                "moved_bytes_per_update": self.work.moved_bytes, "apart": self.apart, "host": self.host,
                "gpu_model": {**self.gpu_model, "status": GPU_STATUS}}


def prediction_of(snapshots: dict[str, Snapshot], work: Work | None = None) -> Prediction:
    """From what a tracker found."""
    whole = snapshots[""]
    found = {name: snapshots[name] for name in PHASES if name in snapshots}
    return Prediction(whole.peak_bytes, whole.parts, {name: phase.peak_bytes for name, phase in found.items()},
                      whole.operation, {name: phase.parts for name, phase in found.items()}, work or Work())


def needed_bytes(prediction: Prediction) -> int:
    """What a budget has to hold: the tensors, and on a GPU what the allocator, cuBLAS and the context add. (On a CPU a budget
    is of tensors; Python and its libraries stand beside it, as `process`.)"""
    return prediction.peak_bytes + sum(prediction.apart.get(name, 0) for name in ("allocator", "workspace", "context"))


def predict(config: RunConfig, shape: LlamaConfig, num_processes: int = 1) -> Prediction:
    """Bytes of the run that `config` describes, on the device it would run on."""
    played = play(config, shape, num_processes)
    prediction = prediction_of(played.ledger.snapshots(), played.work())
    prediction.gpu_model = gpu_apart(played.ledger.events(), prediction.peak_bytes)
    if played.device_type == "cuda":
        prediction.apart = dict(prediction.gpu_model)
    prediction.host = {"disk_checkpoint": played.checkpoint_bytes, "disk_export": played.model_bytes}
    return prediction


def in_child(function: Callable[..., Result], *arguments: Any) -> Result:
    """`function(*arguments)` in a process of its own, which leaves neither memory nor shared state behind."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the child's torch would announce its profiler on stderr
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def track(state: TrainState, update: Update) -> tuple[StepResult, Prediction]:
    """A real `train_step`, and the bytes it took by part and phase."""
    tracker = Tracker(state.accelerator.device.type)
    for batch in update.micro_batches:
        for value in batch.values():
            if isinstance(value, Tensor):
                tracker.ignore(value)
    with tracker:
        tracker.attach(state)
        try:
            result = train_step(state, update)
        finally:
            tracker.detach()
    return result, prediction_of(tracker.ledger.snapshots())


@dataclass
class Play:
    """What was played. `windows` are those of the last update, of which `played` micro-batches stand for `wanted`."""

    ledger: Ledger
    device_type: str
    windows: list[Window]
    played: int
    wanted: int
    layer_bytes: int  # parameters and optimizer state of one decoder layer
    model_bytes: int
    checkpoint_bytes: int  # on disk

    def work(self) -> Work:
        """Work of an update."""
        total = Work()
        for window in self.windows:
            often = self.wanted / self.played if window.phase in ("forward", "backward") else 1.0
            total += window.work.times(often)
        return total


def play(config: RunConfig, shape: LlamaConfig, num_processes: int = 1, whole: bool = True, first_update: bool = True) -> Play:
    """Initialisation, two updates (the second starts with optimizer state), and if `whole` evaluation, checkpoint and export.
    Of the micro-batches of an update two are played: those after are like the second. first_update: False leaves out the
    first of the updates, which changes no peak, but the holes in a GPU's memory."""
    config = replace(config, compile=False, report_to=None)
    rows = micro_batch_size(config, num_processes)
    wanted = max(1, config.global_batch_size // num_processes // rows)
    played = min(wanted, 2)
    with _own_state(), ExitStack() as stack:
        accelerator = make_accelerator(config)
        tracker = Tracker(accelerator.device.type, count_work=True, keep_all=True)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _shorten(stack, tracker)
        # the initial weights of a folder have the bytes of any others
        named = replace(config, model="tiny")
        batches = [_fake_batch(config, rows) for _ in range(played)]
        stack.enter_context(tracker)
        for batch in batches:
            for value in batch.values():
                if isinstance(value, Tensor):
                    tracker.ignore(value)
        with torch.device(accelerator.device) if accelerator.device.type != "cpu" else nullcontext():
            state = build(named, shape, accelerator, total_steps=config.max_steps or 1000)
        tracker.attach(state)
        if first_update:
            train_step(state, Update(batches[:1], rows * config.seq_len, rows, 0))
        else:
            _make_optimizer_state(tracker)
        first_window = len(tracker.windows)
        train_step(state, Update(batches, rows * config.seq_len, rows, 0))
        last_window = len(tracker.windows)
        if whole:
            with tracker.phase("evaluate"):
                evaluate(state.model, accelerator, batches[:1] * 2)
            with tracker.phase("save"):
                _play_save(tracker, state, shape)
            with tracker.phase("load"):
                _play_load(tracker, state)
        tracker.detach()
        layer = accelerator.unwrap_model(state.model).model.layers[0]
        states = [value for parameter in layer.parameters() for value in tracker.optimizer.state.get(parameter, {}).values()]
        layer_bytes = sum(tensor.nbytes for tensor in [*layer.parameters(), *states] if isinstance(tensor, Tensor))
        sizes = (layer_bytes, disk.export_bytes(state.model), disk.checkpoint_bytes(state))
    return Play(tracker.ledger, tracker.device_type, tracker.windows[first_window:last_window], played, wanted, *sizes)


def _make_optimizer_state(tracker: Tracker) -> None:
    """The state that a first update leaves, without the update (it has no state before it: its peak is below a second's)."""
    for parameter in tracker.parameters:
        if parameter.dtype == torch.int8:
            tracker.optimizer.step(rows=low_memory.no_rows(parameter))
        elif parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            tracker.optimizer.step()
            parameter.grad = None


def _fake_batch(config: RunConfig, rows: int) -> dict[str, Any]:
    batch: dict[str, Any] = {name: torch.zeros(rows, config.seq_len, dtype=torch.int64) for name in ("input_ids", "targets")}
    if config.document_mask:
        batch["document_lengths"] = [config.seq_len] * rows
    return batch


def _play_save(tracker: Tracker, state: TrainState, shape: LlamaConfig) -> None:
    """A checkpoint and an export whose writers write nothing; the state of the random generator is the one tensor they make."""
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None, bos_token_id=None, eos_token_id=0, pad_token_id=None)
    run = checkpoints.RunState(Progress(step=1), 1, {}, {}, "")
    accelerator = state.accelerator

    def note(*_: Any, **__: Any) -> None:
        if accelerator.device.type == "cpu":
            tracker.scratch(RANDOM_STATE_BYTES)

    with (tempfile.TemporaryDirectory() as folder, mock.patch("accelerate.accelerator.save_accelerator_state", note),
          mock.patch("memtrain.model.weights_file.bytes_of", lambda tensor: b""), mock.patch("os.fsync"),
          mock.patch("memtrain.training.checkpoint.require_space"),
          mock.patch("memtrain.model.huggingface.config_dict", return_value={})):  # transformers takes a second to import
        path = Path(folder)
        checkpoints.save_checkpoint(state, run, tokenizer, path / "checkpoints", keep_last=1)
        export(accelerator.get_state_dict(state.model), shape, tokenizer, path / "export")


def _shapes(values: dict[str, Any], device: str = "meta") -> dict[str, Any]:
    """These values with other tensors of the same shapes and dtypes, which on "meta" take no bytes."""
    return {name: torch.empty_like(value, device=device) if isinstance(value, Tensor) else value
            for name, value in values.items()}


def _play_load(tracker: Tracker, state: TrainState) -> None:
    """A run that goes on: the model is there, and no optimizer state. The weights are read into the model; the state is read
    into host memory, from where the optimizer takes it."""
    saved = tracker.optimizer.state_dict()
    shapes = {number: _shapes(values) for number, values in saved["state"].items()}
    groups = saved["param_groups"]
    del saved
    tracker.optimizer.state.clear()

    def load(*_: Any, **__: Any) -> dict[str, Any]:
        read = {number: _shapes(values, "cpu") for number, values in shapes.items()}
        tracker.optimizer.load_state_dict({"param_groups": groups, "state": read})
        tracker.name_optimizer_state()
        if tracker.device_type == "cpu":
            tracker.scratch(RANDOM_STATE_BYTES)
        return {}

    with tempfile.TemporaryDirectory() as folder, mock.patch("accelerate.accelerator.load_accelerator_state", load):
        run = checkpoints.RunState(Progress(step=1), 1, {}, {}, "")
        checkpoints.load_checkpoint(state, Path(folder), run, lambda line: None)


# ---- what makes a play short and leaves no trace ---------------------------------------------------------------------

def _shorten(stack: ExitStack, tracker: Tracker) -> None:
    """For the time of a play: what is done many times alike is done once, what needs a tensor's address is left out."""
    rules = {name: _once_for_each_shape(tracker, rule) for name, rule in low_memory.RULES.items()}
    stack.enter_context(mock.patch.dict(low_memory.RULES, rules))
    stack.enter_context(mock.patch.object(low_memory, "range", _ends, create=True))
    stack.enter_context(mock.patch.object(by_rows, "range", _ends, create=True))
    for module in (loss, int8, layers):
        stack.enter_context(mock.patch.object(module, "range", _ends_with_work(tracker), create=True))
    # the model is built where it trains; a fake parameter cannot be exchanged
    stack.enter_context(mock.patch.object(torch.nn.Module, "to", lambda module, *args, **kwargs: module))
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")


def _ends(start: int, stop: int, step: int) -> list[int]:
    """As `range`, for slices of a parameter, without those in the middle: the second has the peak of all that follow (it is
    worked on while the first one's tensors are still named), and the last may be short."""
    everything = range(start, stop, step)
    return [*everything[:2], *everything[2:][-1:]]


def _ends_with_work(tracker: Tracker) -> Callable[[int, int, int], Iterator[int]]:
    """As `_ends`, for a loop whose second turn is then counted as often as it would have come."""
    def ends(start: int, stop: int, step: int) -> Iterator[int]:
        for turn, value in enumerate(few := _ends(start, stop, step)):
            window, before = tracker.windows[-1], tracker.windows[-1].work.times(1)
            yield value
            if turn == 1:
                skipped = len(range(start, stop, step)) - len(few)
                window.work += (window.work + before.times(-1)).times(skipped)

    return ends


def _once_for_each_shape(tracker: Tracker, rule: Callable[..., None]) -> Callable[..., None]:
    """An update rule that is played for the first parameter of a shape; for others its scratch and work are noted, and its
    state is made."""
    known: dict[Any, tuple[int, Work, dict[str, Any]]] = {}

    def update(weight: Tensor, grad: Tensor, state: dict[str, Any], step: Any, bits: int, seed: int, first: int,
               **scale: Tensor) -> None:
        key = (tuple(weight.shape), tuple(grad.shape), weight.dtype, bits, step.first_moment, step.number == 1 and first == 0)
        if key not in known:
            slices = max(1, -(-grad.numel() // numbers_at_a_time(weight.device)))  # no_rows has none
            with tracker.own_rise() as found:
                rule(weight, grad, state, step, bits, seed, first, **scale)
            work = found.work.times(slices / min(slices, 3))
            tracker.windows[-1].work += found.work.times(slices / min(slices, 3) - 1)
            known[key] = (found.bytes, work, _shapes(state))
            return
        rise, work, template = known[key]
        tracker.scratch(rise)
        tracker.windows[-1].work += work
        for name, value in template.items():
            if isinstance(value, Tensor) and name not in state:
                state[name] = torch.zeros_like(value, device=weight.device)

    return update


@contextmanager
def _own_state() -> Iterator[None]:
    """Accelerate's shared state and all random states are put back afterwards."""
    shared = [(owner, dict(owner._shared_state)) for owner in (AcceleratorState, GradientState)]
    python_state = random.getstate()
    import numpy

    numpy_state = numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    for owner, _ in shared:
        owner._shared_state.clear()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for owner, values in shared:
            owner._shared_state.clear()
            owner._shared_state.update(values)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
