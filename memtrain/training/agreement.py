"""What the processes of a run decide together, without a wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from memtrain.command import BadInput

Result = TypeVar("Result")
LONGEST_WAIT = timedelta(hours=6)  # for a process that tokenises, or writes to a slow disk; one that died is noticed at once


class Agreement:
    """`highest(number)`: the highest of all processes, over a group of its own between CPUs. Every process creates it, and
    calls it equally often."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.group = torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT) \
            if accelerator.num_processes > 1 else None

    def highest(self, number: int) -> int:
        if self.group is None:
            return number
        found = torch.tensor(number)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(found)


def on_main_only(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """`work()` of the main process, for all (its result is sent). Its BadInput ends all of them alike."""
    answer: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            answer[0] = work()
        except BadInput as error:
            answer[1] = str(error)
    broadcast_object_list(answer)
    if answer[1] is not None:
        raise BadInput(answer[1])
    return answer[0]


def everywhere(accelerator: Accelerator, work: Callable[[], Any], errors: tuple[type[Exception], ...]) -> None:
    """`work()` on every process, of which none goes on before all are done; one's error is raised on all of them."""
    caught: Exception | None = None
    try:
        work()
    except errors as error:
        caught = error
    texts = gather_object([None if caught is None else str(caught) or type(caught).__name__])
    if caught is not None:
        raise caught
    if found := [text for text in texts if text is not None]:
        raise OSError(found[0])
