"""What a run does when it is told to stop, and the command that goes on with it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType, TracebackType

from memtrain.training.agreement import Agreement

# torchrun hands a SIGINT on to processes that got it from the terminal already: a person is not that quick
SECOND_INTERRUPT_SECONDS = 0.5
LAUNCHERS = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run")


class StopSignal:
    """Within this context SIGINT and SIGTERM ask for a stop after the update at hand; a second SIGINT leaves at once."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.received = 0
        self.since = 0.0

    def __enter__(self) -> StopSignal:
        self.previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self.since = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self.since > SECOND_INTERRUPT_SECONDS:
            os.write(2, b"\ninterrupted twice: left without saving\n")
            os._exit(128 + number)  # waits neither for other processes nor for a file being written

    def requested(self) -> bool:
        """Whether to stop now: every process of a run gets the same answer, and asks after each update."""
        agreed = self.agreement.highest(self.received)
        self.received = agreed or self.received  # a signal that came meanwhile is for the next time
        return agreed != 0

    @property
    def exit_code(self) -> int:
        return 128 + self.received


def command_to_go_on(arguments: Sequence[str], resume: str) -> str:
    """The command that started this run, or the same with `--resume auto` where it named where to start."""
    words = list(arguments)
    at = [i for i, word in enumerate(words) if word.split("=")[0] == "--resume"]
    if at:
        del words[at[0]:at[0] + (1 if "=" in words[at[0]] else 2)]
    if at or resume != "auto":
        words += ["--resume", "auto"]
    return shlex.join([*_start(arguments), *words])


def _start(arguments: Sequence[str]) -> list[str]:
    """The command line up to this script's own arguments: that of a launcher, where one started this process."""
    import psutil

    own = [sys.argv[0], *arguments]
    found = [os.path.basename(sys.executable) or "python", sys.argv[0]]
    for parent in psutil.Process().parents()[:3]:
        with contextlib.suppress(psutil.Error):
            words = parent.cmdline()
            if words[-len(own):] == own and any(os.path.basename(word) in LAUNCHERS for word in words[:3]):
                script = words[0] if words[1] == "-m" else words.pop(0) and words[0]
                found = [os.path.basename(script), *words[1:len(words) - len(arguments)]]
                break
    if os.environ.get("ACCELERATE_USE_CPU") and "accelerate" not in found[0]:
        found.insert(0, "ACCELERATE_USE_CPU=true")
    return found
