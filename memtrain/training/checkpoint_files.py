"""Folders of checkpoints on disk: complete or absent, looked through before they are believed, cleared of what kills left."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from memtrain.command import TrainingStopped
from memtrain.training.out_of_memory import is_out_of_memory

RUN_STATE = "run_state.json"
PARTIAL = ".partial-"
REMOVED = PARTIAL + "removed-"
ASIDE = "aside-"
# torch and safetensors report a full disk by errors of their own
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
_STEP = re.compile(r"step-([0-9]{8,})")
_BLOCK_BYTES = 1 << 22


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The update that a checkpoint's folder is named after."""
    found = _STEP.fullmatch(path.name)
    assert found is not None, path
    return int(found[1])


def step_folders(folder: Path) -> list[Path]:
    """Folders named as checkpoints, whole or not, by number. Whatever has another name is not ours."""
    found = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """CRC-32 of a file: against accidents (blocks of zeros, files exchanged), not against intent."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def seal(partial: Path, state: dict[str, Any]) -> None:
    """Flush every file, note its size and checksum in `state`, and write that last: its presence says that all is there."""
    state["files"], state["checksums"] = {}, {}
    for path in sorted(partial.rglob("*")):
        flush(path)
        if path.is_file():
            name = str(path.relative_to(partial))
            state["files"][name], state["checksums"][name] = path.stat().st_size, checksum(path)
    path = partial / RUN_STATE
    path.write_text(json.dumps(state, indent=1), encoding="utf-8")
    flush(path)
    flush(partial)
    if problem := checkpoint_problem(partial):
        raise OSError(problem)


def publish(partial: Path, final: Path) -> None:
    """Give a sealed folder its name, in place of a broken one that has it."""
    if final.exists():
        remove(final)
    os.replace(partial, final)
    flush(final.parent)


def remove(path: Path) -> None:
    """Delete a folder in two steps, so that a kill between its files leaves nothing that looks like a checkpoint."""
    removed = path.with_name(REMOVED + path.name)
    shutil.rmtree(removed, ignore_errors=True)
    os.replace(path, removed)
    shutil.rmtree(removed)


def checkpoint_problem(checkpoint: Path, contents: bool = False) -> str | None:
    """Why a folder is no complete checkpoint, or None. `contents`: read its files too, and compare their checksums."""
    try:
        state = json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))
        files, checksums = dict(state["files"]), dict(state.get("checksums", {}))
        int(state["progress"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"no readable {RUN_STATE}"
    for name, size in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, "numpy"):
                    pass
            except (OSError, SafetensorError) as error:
                return f"{name} is no safetensors file ({error})"
    for name in files if contents else ():
        if name in checksums and checksum(checkpoint / name) != checksums[name]:
            return f"{name} is not the file that was saved (checksum)"
    return None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints whose files are all there, by their number."""
    return [path for path in step_folders(folder) if checkpoint_problem(path) is None]


def newest_complete(folder: Path, say: Callable[[str], Any],
                    problem: Callable[[Path], str | None] = lambda path: None) -> Path | None:
    """The newest checkpoint that is whole to its last byte and without `problem`; `say` names each passed over, and why."""
    for path in reversed(step_folders(folder)):
        reason = checkpoint_problem(path, contents=True) or problem(path)
        if reason is None:
            return path
        say(f"{path}: ignored, {reason}")
    return None


def clear_leftovers(output: Path, say: Callable[[str], Any]) -> None:
    """Remove what killed writers left in a run's folder. Only the process that holds the run's lock may call this."""
    for path in sorted([*output.glob(".export.*-*"), *output.glob("*.tmp"), *(output / "checkpoints").glob(PARTIAL + "*")]):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        if not path.name.startswith(REMOVED):
            say(f"{path}: removed, its writing did not end")


def set_aside_newer(folder: Path, step: int, say: Callable[[str], Any]) -> None:
    """Rename whole checkpoints after update `step`, from which a run goes on: they are of another line than its own will be."""
    for path in complete_checkpoints(folder):
        if step_of(path) > step:
            aside = path.with_name(ASIDE + path.name)
            if aside.exists():
                shutil.rmtree(aside)
            os.replace(path, aside)
            say(f"{path}: set aside as {aside.name}, this run goes on from update {step}")


def prune(folder: Path, keep_last: int, keep_best: bool, is_own: Callable[[dict[str, Any]], bool]) -> None:
    """Remove complete checkpoints but the newest `keep_last` (and, with `keep_best`, that of the lowest evaluation loss).
    Folders of another name, and of another run, stay."""
    states = {path: json.loads((path / RUN_STATE).read_text(encoding="utf-8")) for path in complete_checkpoints(folder)}
    own = [path for path in states if is_own(states[path])]
    kept = set(own[-keep_last:])
    evaluations = [(*(states[path].get("evaluated") or (None, 0.0)), path) for path in own]
    losses = [(loss, path) for step, loss, path in evaluations if step == step_of(path)]
    if keep_best and losses:
        kept.add(min(losses)[1])
    for path in own:
        if path not in kept:
            remove(path)


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
    complete = complete_checkpoints(folder)
    return f"the last good checkpoint is {complete[-1]}" if complete else "there is no good checkpoint yet"
