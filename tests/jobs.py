"""Run the scripts as a user does: within this process (fast), or as one or two real processes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
# The same everywhere, because sums of floats depend on it. One, because two wait for each other on busy cores.
THREADS = 1
TIMING = ("tokens_per_second", "peak_bytes")
SHAPE = {"model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


@dataclass
class Outcome:
    """How a script ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def problems(self) -> list[str]:
        """Lines of stderr."""
        return self.err.strip().splitlines()


def reset_accelerate() -> None:
    """Forget the singletons in which Accelerate keeps what the first Accelerator of a process was told."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def load_script(name: str) -> Any:
    """scripts/`name`.py as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_main(name: str, arguments: Sequence[object], watched: bool = False) -> Outcome:
    """`python scripts/name.py arguments`, in this process. An exception that the script lets through, comes through.

    watched: with the prediction of a run's memory and its picture, which cost a child process and seconds.
    """
    from memtrain.command import run_script

    words = [str(word) for word in arguments]
    out, err = io.StringIO(), io.StringIO()
    script = load_script(name)
    reset_accelerate()
    try:
        with (mock.patch.object(sys, "argv", [f"{name}.py", *words]), mock.patch.dict(os.environ),
              contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
              contextlib.nullcontext() if watched else unwatched()):
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
            try:
                run_script(script.main)
                code = None
            except SystemExit as end:
                code = end.code
    finally:
        reset_accelerate()
    return Outcome(int(code or 0), out.getvalue(), err.getvalue())


def unwatched() -> contextlib.AbstractContextManager[Any]:
    from memtrain.memory import watch

    return mock.patch.multiple(watch.MemoryWatch, _predict=lambda self: None, _draw=lambda self: None)


@dataclass
class Job:
    """A training job of a tiny model on a tiny corpus; `arguments(...)` are those of pretrain.py."""

    folder: Path
    cache: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        names = ("model.json", "corpus.jsonl", "tiny.yaml")
        self.model, self.corpus, self.recipe = (self.folder / name for name in names)
        self.model.write_text(json.dumps(SHAPE))
        write_corpus(self.corpus)
        self.recipe.write_text("max_steps: 20\n")

    def arguments(self, output: Path | None, **changes: Any) -> list[str]:
        options = {"model": self.model, "dataset": self.corpus, "cache_dir": self.cache, "seq_len": 32,
                   "learning_rate": 0.01, "global_batch_size": 8, "log_every": 1, "eval_fraction": 0.1, **changes}
        if output is not None:
            options["output_dir"] = output
        words = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return [str(self.recipe), *words]

    def run(self, output: Path, watched: bool = False, **changes: Any) -> Outcome:
        return run_main("pretrain", self.arguments(output, **changes), watched)

    def trained(self, output: Path, **changes: Any) -> Path:
        """`output` after a run that must end well."""
        outcome = self.run(output, **changes)
        assert outcome.code == 0, outcome
        return output


def write_corpus(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """About 9 rows of 32 tokens for every 10 documents at 512 tokens of vocabulary, as .jsonl."""
    draw = random.Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "loop", "train", "model", "row", "token", "byte", "of", "the", "and",
             "in"]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(documents):
            text = " ".join(draw.choice(words) + str(draw.randrange(30)) for _ in range(draw.randrange(3, 16)))
            file.write(json.dumps({"text": text}) + "\n")
    return path


# ---- what a run left -------------------------------------------------------------------------------------------------

def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock and on the process. A constant that is not JSON is an error."""
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    return [{name: value for name, value in row.items() if name not in TIMING} for row in found]


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoint_contents(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint that training goes on from."""
    import torch
    from safetensors.torch import load_file

    contents: dict[str, Any] = {"model": load_file(path / "model.safetensors")}
    for file in sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("random_states_*.pkl")]):
        contents[file.name] = torch.load(file, weights_only=False)
    state = json.loads((path / "run_state.json").read_text())
    contents["progress"] = {name: state["progress"][name] for name in ("step", "position", "tokens")}
    return contents


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Where two nests of dicts, lists, tensors, arrays and numbers are not equal, bit for bit."""
    import numpy as np
    import torch

    if type(one) is not type(other):
        return [f"{name}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{name}: {sorted(map(str, one.keys() ^ other.keys()))} on one side only"]
        return [line for key in one for line in differences(one[key], other[key], f"{name}/{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{name}: {len(one)} and {len(other)} items"]
        pairs = zip(one, other, strict=True)
        return [line for i, pair in enumerate(pairs) for line in differences(*pair, f"{name}/{i}")]
    if isinstance(one, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [f"{name}: tensors differ"]
    if isinstance(one, np.ndarray):
        return [] if np.array_equal(one, other) else [f"{name}: arrays differ"]
    return [] if one == other else [f"{name}: {one} and {other}"]


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Two runs left the same checkpoint of update `step` and the same metrics, bit for bit."""
    pair = [checkpoint_contents(checkpoint(run, step)) for run in (one, other)]
    assert pair[0]["model"] and pair[0]["optimizer.bin"]["state"], "nothing to compare"
    found = differences(*pair) + differences(rows(one), rows(other), "metrics")
    assert not found, "\n".join(found)


def stopped_after(run: Path, copy: Path, step: int) -> Path:
    """`copy` of a finished run (which kept all checkpoints), as a kill after checkpoint `step` would leave it."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "export")
    for path in (copy / "checkpoints").iterdir():
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)
    return copy


# ---- real processes --------------------------------------------------------------------------------------------------

def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": str(THREADS),
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **extra}


def start(name: str, arguments: Sequence[object], log: Path, **extra: str) -> subprocess.Popen[bytes]:
    """scripts/`name`.py as a process in a session of its own, its output in `log`."""
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, arguments)]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment(**extra), cwd=ROOT,
                                start_new_session=True)


def ranks(world_size: int) -> list[dict[str, str]]:
    """What torchrun tells each process. (torchrun itself would hide the exit codes.)"""
    if world_size == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port)}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(world_size)]


def start_all(name: str, arguments: Sequence[object], log: Path, world_size: int) -> list[subprocess.Popen[bytes]]:
    return [start(name, arguments, log.with_name(f"{log.name}.{rank}"), **extra)
            for rank, extra in enumerate(ranks(world_size))]


def wait_for(condition: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]], seconds: float = 120) -> None:
    """Until `condition()`, which must come true while the processes run."""
    end = time.monotonic() + seconds
    while not condition():
        assert all(process.poll() is None for process in processes), "ended too early"
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def end_all(processes: Sequence[subprocess.Popen[bytes]], seconds: float = 120) -> list[int]:
    """Exit codes; whatever still runs after that time is killed."""
    end = time.monotonic() + seconds
    try:
        return [process.wait(max(0.1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
