"""Folders of checkpoints: what is believed, what is removed, and what is never touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memtrain.training import checkpoint_files as files


def make(folder: Path, step: int, number: int = 0, evaluated: tuple[int, float] | None = None, run: str = "ours",
         name: str | None = None) -> Path:
    """A checkpoint as small as can be; `number` is in its weights, whose file has the same size for each."""
    partial = folder / f".partial-step-{step:08d}"
    partial.mkdir(parents=True)
    save_file({"weight": torch.full((50,), float(number))}, partial / "model.safetensors")
    torch.save({"state": number}, partial / "optimizer.bin")
    torch.save({"torch_manual_seed": step}, partial / "random_states_0.pkl")
    files.seal(partial, {"progress": {"step": step}, "run": run, "evaluated": evaluated})
    final = folder / (name or files.checkpoint_name(step))
    files.publish(partial, final)
    return final


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def edit(path: Path, change) -> None:
    state = json.loads((path / "run_state.json").read_text())
    change(state)
    (path / "run_state.json").write_text(json.dumps(state))


DAMAGE = {
    "emptied": (lambda new, old: (new / "optimizer.bin").write_bytes(b""), "optimizer.bin has 0 bytes instead of"),
    "cut": (lambda new, old: (new / "optimizer.bin").write_bytes(b"x" * 100), "optimizer.bin has 100 bytes instead of"),
    "deleted": (lambda new, old: (new / "random_states_0.pkl").unlink(), "random_states_0.pkl is missing"),
    "a folder in its place": (lambda new, old: ((new / "optimizer.bin").unlink(), (new / "optimizer.bin").mkdir()),
                              "optimizer.bin is missing"),
    "zeros, model": (lambda new, old: zeros(new / "model.safetensors"), "model.safetensors is no safetensors file"),
    "zeros, optimizer": (lambda new, old: zeros(new / "optimizer.bin"), "optimizer.bin is not the file that was saved"),
    "exchanged with an older one": (lambda new, old: swap(new / "model.safetensors", old / "model.safetensors"),
                                    "model.safetensors is not the file that was saved"),
    "the state of another": (lambda new, old: shutil.copy(old / "run_state.json", new / "run_state.json"), "(checksum)"),
    "not JSON": (lambda new, old: (new / "run_state.json").write_text("{"), "no readable run_state.json"),
    "JSON of something else": (lambda new, old: (new / "run_state.json").write_text("[1]"), "no readable run_state.json"),
    "no files": (lambda new, old: edit(new, lambda state: state.pop("files")), "no readable run_state.json"),
    "no progress": (lambda new, old: edit(new, lambda state: state.pop("progress")), "no readable run_state.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named(tmp_path, damage):
    old, new = make(tmp_path, 1, number=1), make(tmp_path, 2, number=2)
    assert (old / "model.safetensors").stat().st_size == (new / "model.safetensors").stat().st_size
    do, reason = DAMAGE[damage]
    before = files.checkpoint_problem(new, contents=True)
    do(new, old)
    said: list[str] = []
    files.newest_complete(tmp_path, said.append)
    assert before is None and said[0].startswith(f"{new}: ignored, ") and reason in said[0], said


def test_newest_by_number(tmp_path):
    make(tmp_path, 99_999_999), make(tmp_path, 100_000_000), make(tmp_path, 9)
    assert [files.step_of(path) for path in files.complete_checkpoints(tmp_path)] == [9, 99_999_999, 100_000_000]
    assert files.newest_complete(tmp_path, print).name == "step-100000000"


def test_one_of_another_kind_is_passed_over(tmp_path):
    old, new = make(tmp_path, 1), make(tmp_path, 2, run="another")
    said: list[str] = []
    found = files.newest_complete(tmp_path, said.append, lambda path: "written by another run" if path == new else None)
    assert found == old and said == [f"{new}: ignored, written by another run"]
    assert files.newest_complete(tmp_path / "none", said.append) is None


def test_pruning_goes_by_number_and_leaves_what_is_not_ours(tmp_path):
    for step in (1, 2, 3, 10, 100_000_000):
        make(tmp_path, step)
    make(tmp_path, 4, run="another")
    make(tmp_path, 5, name="step-00000005-before-the-change")
    make(tmp_path, 6, name="step-6")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000002" / "optimizer.bin").unlink()  # not whole: to be looked at, not to be removed
    files.prune(tmp_path, 2, False, lambda state: state["run"] == "ours")
    assert names(tmp_path) == ["notes.txt", "step-00000002", "step-00000004", "step-00000005-before-the-change",
                               "step-00000010", "step-100000000", "step-6"]


def test_the_best_is_kept(tmp_path):
    losses = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.6, 5: 2.7}
    for step, loss in losses.items():
        make(tmp_path, step, evaluated=(step, loss))
    make(tmp_path, 6, evaluated=(5, 0.1))  # evaluated before, not at this update
    files.prune(tmp_path, 1, True, lambda state: True)
    assert names(tmp_path) == ["step-00000002", "step-00000006"]
    files.prune(tmp_path, 1, False, lambda state: True)
    assert names(tmp_path) == ["step-00000006"]


def test_a_kill_while_removing_leaves_nothing_that_looks_like_a_checkpoint(tmp_path, monkeypatch):
    make(tmp_path / "checkpoints", 1), make(tmp_path / "checkpoints", 2)

    def killed(path, **_):
        if Path(path).exists():
            (Path(path) / "optimizer.bin").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(files.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        files.prune(tmp_path / "checkpoints", 1, False, lambda state: True)
    monkeypatch.undo()
    assert len(files.step_folders(tmp_path / "checkpoints")) == 1
    said: list[str] = []
    files.clear_leftovers(tmp_path, said.append)
    assert names(tmp_path / "checkpoints") == ["step-00000002"] and not said, "and that one was to go anyway"


def test_leftovers_of_killed_writers_go_and_are_named(tmp_path):
    kept = make(tmp_path / "checkpoints", 1)
    left = [tmp_path / "checkpoints" / ".partial-step-00000002", tmp_path / ".export.partial-x1", tmp_path / ".export.old-x2"]
    for folder in left:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    left += [tmp_path / "config.yaml.tmp", tmp_path / "metrics.jsonl.tmp"]
    for path in left[3:]:
        path.write_text("half")
    for path in (tmp_path / "mine.txt", tmp_path / ".mine"):
        path.write_text("mine")
    said: list[str] = []
    files.clear_leftovers(tmp_path, said.append)
    assert sorted(said) == sorted(f"{path}: removed, its writing did not end" for path in left)
    assert names(tmp_path) == [".mine", "checkpoints", "mine.txt"] and files.checkpoint_problem(kept) is None


def test_newer_ones_are_set_aside(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    said: list[str] = []
    files.set_aside_newer(tmp_path, 2, said.append)
    assert names(tmp_path) == ["aside-step-00000003", "step-00000001", "step-00000002"] and "goes on from update 2" in said[0]
    make(tmp_path, 3, number=7)
    files.set_aside_newer(tmp_path, 2, said.append)
    assert names(tmp_path)[0] == "aside-step-00000003" and len(names(tmp_path)) == 3


def test_a_broken_one_of_the_same_name_is_replaced(tmp_path):
    make(tmp_path, 1, number=1)
    (tmp_path / "step-00000001" / "optimizer.bin").unlink()
    assert files.checkpoint_problem(make(tmp_path, 1, number=2)) is None
    assert names(tmp_path) == ["step-00000001"]


def test_nothing_is_published_that_is_not_whole(tmp_path, monkeypatch):
    def no_room(path):
        Path(path).write_bytes(b"")

    monkeypatch.setattr(files, "flush", lambda path: no_room(path) if path.name == "optimizer.bin" else None)
    monkeypatch.setattr(files, "checkpoint_problem", lambda path, contents=False: "optimizer.bin has 0 bytes")
    with pytest.raises(OSError, match="0 bytes"):
        make(tmp_path, 1)
    assert names(tmp_path) == [".partial-step-00000001"]
