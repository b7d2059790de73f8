"""What lived when: the log of a tracked stretch, its peaks and their parts."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

PARTS = ("parameters", "gradients", "optimizer", "activations", "loss", "temporaries")
PHASES = ("init", "forward", "backward", "optimizer", "evaluate", "save", "load")

@dataclass
class Work:
    """What a device has to do. moved_bytes: read and written by operations that are not views."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    operations: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.moved_bytes + other.moved_bytes, self.operations + other.operations)

    def times(self, factor: float) -> Work:
        return Work(self.flops * factor, self.moved_bytes * factor, self.operations * factor)


@dataclass
class Snapshot:
    """Peak of a stretch of time: total bytes, bytes by part, and the operation that set it."""

    peak_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    operation: str = ""


@dataclass
class Window:
    """A stretch of time in one phase and place (a layer, the loss, ...): live bytes at its start and end, the most between, and
    the work done. An update within the backward is part of the backward."""

    phase: str
    place: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    work: Work = field(default_factory=Work)


class Ledger:
    """Every allocation and end, in order, in 20 bytes each."""

    def __init__(self) -> None:
        # storage number, bytes (negative: freed), index into `moments`
        self.numbers, self.sizes, self.moment_of = array("q"), array("q"), array("i")
        self.moments: list[tuple[str, str, Any]] = []  # phase, place, operation
        self.part_of: dict[int, str] = {}  # storage number -> part, once known
        self._index: dict[tuple[str, str, Any], int] = {}

    def note(self, number: int, nbytes: int, moment: tuple[str, str, Any]) -> None:
        index = self._index.get(moment)
        if index is None:
            index = self._index[moment] = len(self.moments)
            self.moments.append(moment)
        self.numbers.append(number)
        self.sizes.append(nbytes)
        self.moment_of.append(index)

    def forget(self, alive: Iterable[int]) -> None:
        """Drop the storages that lived at no phase's peak so far and are not in `alive` (numbers): of what is left, peaks and
        their parts are the same. A long run's log stays short."""
        wanted = {index for _, index in self._peaks().values()}
        levels: dict[int, int] = {}
        kept = set(alive)
        for index, (number, nbytes) in enumerate(zip(self.numbers, self.sizes, strict=True)):
            levels[number] = levels.get(number, 0) + nbytes
            if levels[number] == 0:
                del levels[number]
            if index in wanted:
                kept |= levels.keys()
        places = [index for index, number in enumerate(self.numbers) if number in kept]
        self.numbers, self.sizes, self.moment_of = (
            array(log.typecode, [log[index] for index in places]) for log in (self.numbers, self.sizes, self.moment_of))
        self.part_of = {number: part for number, part in self.part_of.items() if number in kept}

    def _peaks(self) -> dict[str, tuple[int, int]]:
        """(level, index of the event) of each phase's peak, and of all under `""`; index -1 where there was none."""
        best = dict.fromkeys(("", *PHASES), (0, -1))
        level = 0
        for index, (nbytes, moment) in enumerate(zip(self.sizes, self.moment_of, strict=True)):
            level += nbytes
            if nbytes > 0:
                for name in ("", self.moments[moment][0]):
                    if level > best[name][0]:
                        best[name] = (level, index)
        return best

    def snapshots(self) -> dict[str, Snapshot]:
        """The peak of each phase that occurred, and of all under `""`."""
        best = self._peaks()
        wanted = {index for _, index in best.values() if index >= 0}
        parts = self._parts_at(wanted)
        found = {}
        for name, (level, index) in best.items():
            if index >= 0:
                phase, place, operation = self.moments[self.moment_of[index]]
                words = [phase, *([place] if place else []), str(operation)]
                found[name] = Snapshot(level, parts[index], ", ".join(words))
        return found

    def _parts_at(self, wanted: Iterable[int]) -> dict[int, dict[str, int]]:
        """Bytes by part after each of these events of the log."""
        wanted, found = set(wanted), {}
        parts = dict.fromkeys(PARTS, 0)
        loss = {index for index, moment in enumerate(self.moments) if moment[1] == "loss" and moment[0] != "backward"}
        own: dict[int, str] = {}
        for index, (number, nbytes, moment) in enumerate(zip(self.numbers, self.sizes, self.moment_of, strict=True)):
            part = own.get(number)
            if part is None:
                named = self.part_of.get(number)
                if moment in loss and named in (None, "activations"):
                    named = "loss"
                part = own[number] = named or "temporaries"
            parts[part] += nbytes
            if index in wanted:
                found[index] = dict(parts)
        return found

    def events(self) -> list[tuple[int, int]]:
        """(storage number, bytes; negative: freed) in order."""
        return list(zip(self.numbers, self.sizes, strict=True))
