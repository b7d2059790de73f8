"""What a run does when it is told to stop."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from accelerate import Accelerator


class StopSignal:
    """Within this context SIGINT and SIGTERM ask for a stop after the update at hand; a second one ends at once."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.received: int | None = None

    def __enter__(self) -> StopSignal:
        self.previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise SystemExit(128 + number)
        self.received = number  # and no more: loader workers inherit this handler, and may not touch the device

    def requested(self, agree: bool) -> bool:
        """Whether to stop now. Several processes decide together, where all of them call this with `agree`."""
        if self.accelerator.num_processes == 1:
            return self.received is not None
        if agree and self.received is not None:
            self.accelerator.set_trigger()
        return agree and self.accelerator.check_trigger()

    @property
    def exit_code(self) -> int:
        return 128 + (self.received or signal.SIGTERM)
