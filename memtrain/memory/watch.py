"""A run's memory as it was predicted and as it was: memory.json and memory.png."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator

from memtrain.command import BadInput, TrainingStopped, write_whole
from memtrain.data.order import Update
from memtrain.data.prepare import Data
from memtrain.memory import child, report
from memtrain.memory.device import free_bytes
from memtrain.memory.estimate import Prediction, prediction_of, track
from memtrain.memory.ledger import PHASES, Work
from memtrain.memory.tracker import Tracker
from memtrain.model.presets import LlamaConfig
from memtrain.options import RunConfig, parse_bytes
from memtrain.training.checkpoint_files import last_good, stop_when_refused
from memtrain.training.finish import evaluate_data
from memtrain.training.metrics import peak_bytes
from memtrain.training.out_of_memory import detail_of, free_failed_try, is_out_of_memory, phase_of, recipe
from memtrain.training.step import StepResult, TrainState, train_step

EVALUATED_BATCHES = 2  # the second starts with what the first left; those after are alike


class MemoryWatch:
    """Within this context a run's bytes are measured where that costs little: the build, the second update (the first starts
    without optimizer state), the first batches of the first evaluation, the first save and load. The main process predicts
    them in a child, tells, and writes; at the end, out of memory becomes TrainingStopped with what ran out and what fits.
    """

    def __init__(self, config: RunConfig, shape: LlamaConfig, accelerator: Accelerator, folder: Path,
                 say: Callable[[str], Any]) -> None:
        self.config, self.shape, self.accelerator, self.folder, self.say = config, shape, accelerator, folder, say
        self.device = accelerator.device
        self.budget_bytes = None if config.memory_budget is None else parse_bytes(config.memory_budget)
        self.room_bytes = free_bytes() if self.budget_bytes is None else self.budget_bytes
        self.predicted: Prediction | None = None
        self.measured: dict[str, Prediction] = {}
        self.updates = 0
        self.told = False
        self.notes: dict[str, str] = {}
        self.child: subprocess.Popen[str] | None = None
        if config.compile:
            self.notes["measured"] = "null: a compiled step cannot be followed operation by operation"
        elif accelerator.mixed_precision == "fp8":
            self.notes["measured"] = "null: the tensors of an fp8 product have no storage of their own to follow"
        self.measurable = not self.notes
        self.follows = accelerator.is_main_process and self.measurable
        self.evaluated = False
        self.finished = False

    def __enter__(self) -> MemoryWatch:
        self._predict()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        self._end_child()
        if error is not None and is_out_of_memory(error):
            raise TrainingStopped(self._what_ran_out(error)) from None

    def finish(self, wait: bool = True) -> None:
        """Tell and write all there is, once. wait: for a prediction that is not there yet."""
        if not self.finished:
            self.finished = True
            self._take_prediction(wait)
            self._tell("at the end")
            self._draw()

    # ---- prediction --------------------------------------------------------------------------------------------------

    def _predict(self) -> None:
        """Start a prediction of the run as it is now."""
        if not self.accelerator.is_main_process:
            return
        self._end_child()
        self.predicted, self.told = None, False
        self.child = child.ask("predict", self.config, self.shape, self.accelerator.num_processes)
        if self.device.type == "cuda":  # the child's context would take from what the run is about to use
            self._take_prediction(wait=True)

    def _end_child(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None

    def _take_prediction(self, wait: bool = False) -> None:
        if self.child is None or not (wait or self.child.poll() is not None):
            return
        try:
            found = child.answer(self.child)
            self.predicted = Prediction(**{**found, "work": Work(**found["work"])})
        except RuntimeError as error:
            self.notes["predicted"] = f"null: {error}"
        self.child = None

    def recipe_changed(self) -> None:
        """`config` was made smaller: predict and measure again."""
        for name in ("update", "evaluate"):
            self.measured.pop(name, None)
        self.evaluated = False
        self._predict()

    # ---- measurement -------------------------------------------------------------------------------------------------

    def build(self, make: Callable[[], TrainState]) -> TrainState:
        """`make()`, measured."""
        if not self.follows:
            return make()
        with Tracker(self.device.type) as tracker:
            state = make()
            tracker.attach(state)
            tracker.detach()
        self._keep("init", tracker)
        return state

    @contextmanager
    def phase(self, name: str, state: TrainState) -> Iterator[None]:
        """What is done within is measured as `name`, the first time."""
        if not self.follows or name in self.measured:
            yield
            return
        with Tracker(self.device.type) as tracker:
            tracker.attach(state)
            try:
                with tracker.phase(name):
                    yield
            finally:
                tracker.detach()
        self._keep(name, tracker)

    def _keep(self, name: str, tracker: Tracker) -> None:
        snapshots = tracker.ledger.snapshots()
        if name in snapshots:  # else it took nothing
            self.measured[name] = prediction_of({"": snapshots[name], name: snapshots[name]})

    def evaluate(self, state: TrainState, data: Data, config: RunConfig) -> dict[str, float] | None:
        """`evaluate_data`; the first time its first batches are computed once more before it, measured."""
        if self.measurable and not self.evaluated:  # on every process: they go through it together
            with self.phase("evaluate", state):
                evaluate_data(state.model, state.accelerator, data, config, EVALUATED_BATCHES)
            self.evaluated = True
        return evaluate_data(state.model, state.accelerator, data, config)

    def train_step(self, state: TrainState, update: Update) -> StepResult:
        """`train_step(state, update)`; measured where it is the first with optimizer state."""
        if self.follows and self.updates > 0 and "update" not in self.measured and update.target_count > 0:
            result, self.measured["update"] = track(state, update)
        else:
            result = train_step(state, update)
        self.updates += result.applied
        if not self.told:
            self._take_prediction()
            if self.predicted is not None and self.updates > 1:
                self._tell(f"after {self.updates} updates")
        return result

    # ---- what is told ------------------------------------------------------------------------------------------------

    def whole(self) -> Prediction | None:
        """All that was measured, as one; None where no update was."""
        if "update" not in self.measured:
            return None
        highest = max(self.measured.values(), key=lambda found: found.peak_bytes)
        phases: dict[str, int] = {}
        phase_parts: dict[str, dict[str, int]] = {}
        for found in self.measured.values():
            phases |= found.phases
            phase_parts |= found.phase_parts
        order = [name for name in PHASES if name in phases]
        return Prediction(highest.peak_bytes, highest.parts, {name: phases[name] for name in order}, highest.operation,
                          {name: phase_parts[name] for name in order})

    def apart(self) -> dict[str, int]:
        """What the device says of itself, which is not only tensors."""
        if self.device.type != "cuda":
            return {"process": peak_bytes(self.device)}
        import torch

        return {"allocated": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.max_memory_reserved(self.device)}

    def _tell(self, when: str) -> None:
        if not self.accelerator.is_main_process:
            return
        self.told, measured = True, self.whole()
        too_few = {} if measured is not None or not self.measurable else {"measured": "null: fewer than two updates were made"}
        content = {"predicted": None if self.predicted is None else self.predicted.as_json(),
                   "measured": None if measured is None else {
                       "peak_bytes": measured.peak_bytes, "parts": measured.parts, "phases": measured.phases,
                       "phase_parts": measured.phase_parts, "operation": measured.operation},
                   "budget_bytes": self.budget_bytes, "apart": self.apart(), "recipe": recipe(self.config),
                   "notes": {**self.notes, **too_few}}
        path = self.folder / "memory.json"
        with stop_when_refused(path, self.folder / "checkpoints"):
            write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        words = [f"{name} {'not known' if found is None else report.size(found.peak_bytes)}"
                 for name, found in (("predicted", self.predicted), ("measured", measured))]
        if self.budget_bytes is not None:
            words.append(f"budget {report.size(self.budget_bytes)}")
        beside = ", ".join(f"{name} {report.size(nbytes)}" for name, nbytes in self.apart().items())
        self.say(f"\nmemory {when}: tensors at the peak " + ", ".join(words) + f"; beside them: {beside}")

    def _draw(self) -> None:
        both = {"predicted": self.predicted, "measured": self.whole()}
        drawn = {name: found for name, found in both.items() if found is not None}
        if not self.accelerator.is_main_process or not drawn:
            return
        try:
            with stop_when_refused(self.folder / "memory.png", self.folder / "checkpoints"):
                report.plot(drawn, self.folder / "memory.png", self.budget_bytes)
        except BadInput as error:
            self.say(str(error))

    def _what_ran_out(self, error: BaseException) -> str:
        """Phase, largest part, smallest change that fits, and the newest checkpoint."""
        phase, detail = phase_of(error), detail_of(error)
        free_failed_try()
        lines = [f"out of memory in phase {phase}: {detail}"]
        try:
            found = child.answer(child.ask("what fits", self.config, self.shape, self.accelerator.num_processes,
                                           budget_bytes=self.room_bytes, phase=phase))
            parts = found["now"]["phase_parts"].get(phase) or found["now"]["parts"]
            largest = max(parts, key=lambda part: parts[part])
            lines.append(f"the largest part is {largest}, {report.size(parts[largest])} of {report.size(sum(parts.values()))}")
            needed, room = report.size(found["needed_bytes"]), report.size(self.room_bytes)
            lines.append(f"the smallest change that takes less and fits {room} is {report.changed(found['changes'])} ({needed})"
                         if found["changes"] else f"no change is known that fits {room}: with all of them it takes {needed}")
        except (RuntimeError, OSError, MemoryError) as failed:
            lines.append(f"what would fit could not be found out ({failed}); lower micro_batch_size or seq_len, or see "
                         "scripts/plan_memory.py")
        return "; ".join([*lines, last_good(self.folder / "checkpoints")])
