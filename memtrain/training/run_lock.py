"""One run at a time in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from memtrain.command import BadInput
from memtrain.training.agreement import on_main_only
from memtrain.training.check import LOCK_NAME


@contextmanager
def run_lock(output: Path, accelerator: Accelerator, say: Callable[[str], Any]) -> Iterator[None]:
    """Hold `output` for this run; every process enters it. Raises BadInput where another living run holds it.

    The system lets go of the lock when the process dies, however it dies, so the lock of a dead process never holds, whoever
    has its number now. (`lockf`: unlike `flock`, not inherited by loader workers, which may live a few seconds longer.)
    """
    new_folders = [folder for folder in (output, *output.parents) if not folder.exists()]
    descriptor = -1

    def take() -> None:
        nonlocal descriptor
        output.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(output / LOCK_NAME, say)

    try:
        on_main_only(accelerator, take)
        yield
    finally:
        if descriptor >= 0:
            (output / LOCK_NAME).unlink(missing_ok=True)  # while it is held: the next one makes its own
            os.close(descriptor)
            for folder in new_folders:
                with contextlib.suppress(OSError):  # a run refused later leaves nothing; one that wrote, leaves what it wrote
                    folder.rmdir()


def _locked(path: Path, say: Callable[[str], Any]) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BadInput(f"output_dir={path.parent}: cannot be written ({error.strerror}); choose another folder") from None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise BadInput(f"output_dir={path.parent}: {holder or 'another process'} is training there now; wait for it, stop "
                           "it, or choose another output_dir") from None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                break
        os.close(descriptor)  # its holder has just ended and removed it
    if holder := os.read(descriptor, 200).decode(errors="replace").strip():
        say(f"{path.parent}: {holder} ended without a word; its lock is taken over")
    os.ftruncate(descriptor, 0)
    with contextlib.suppress(OSError):  # the name is a courtesy; a full disk is reported by what needs the room
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor
