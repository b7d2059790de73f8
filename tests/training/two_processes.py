"""What tests ask of two real processes, one after the other in one pair, because each start costs seconds.

    RANK=... WORLD_SIZE=2 ... python two_processes.py TASKS.json RESULTS.json

TASKS.json: a list of [script, arguments], ["copy", run, copy, step], ["damage", file, how], ["mean of losses", metrics.jsonl],
["limited", bytes, arguments] (no file may be larger), ["stopped", signal, rank, run, arguments] (that process gets the signal
after a few updates) or ["held", run, arguments] (another process trains in the folder of the run).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from jobs import THREADS, Outcome, line_count, run_main, stopped_after


def mean_of_losses(path: Path) -> None:
    """H2: an update with one target on each process, of losses 1 and 2."""
    import torch
    from accelerate import Accelerator

    from memtrain.training.metrics import TrainLog
    from memtrain.training.progress import Progress
    from memtrain.training.step import StepResult

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    log = TrainLog(path, accelerator)
    progress = Progress(step=1)
    loss_sum = torch.tensor(1.0 + accelerator.process_index)
    log.add(progress, StepResult(loss_sum, 2, torch.tensor(1.0), applied=True), 0.1)
    log.flush(progress)


def limited(limit_bytes: int, arguments: list[str]) -> Outcome:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        return run_main("pretrain", arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def stopped(number: int, rank: int, run: str, arguments: list[str]) -> Outcome:
    def send() -> None:
        while line_count(Path(run) / "metrics.jsonl") < 4:
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    if int(os.environ["RANK"]) == rank:
        threading.Thread(target=send, daemon=True).start()
    return run_main("pretrain", arguments)


def held(run: str, arguments: list[str]) -> Outcome:
    import torch

    from memtrain.training.run_lock import _locked

    read, write = os.pipe()
    pid = 0
    if os.environ["RANK"] == "0":
        Path(run).mkdir()
        pid = os.fork()
        if pid == 0:
            _locked(Path(run) / ".lock", print)
            os.write(write, b"x")
            signal.pause()
        os.read(read, 1)
    torch.distributed.barrier()
    outcome = run_main("pretrain", arguments)
    if pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return outcome


def damage(path: Path, how: str) -> None:
    path.unlink() if how == "delete" else path.write_bytes(bytes(path.stat().st_size))


def do(task: list[Any]) -> Any:
    import torch

    if task[0] == "damage":
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            damage(Path(task[1]), task[2])
        torch.distributed.barrier()
        return None
    if task[0] in ("limited", "stopped", "held"):
        work: Any = {"limited": limited, "stopped": stopped, "held": held}[task[0]]
        outcome = work(*task[1:])
        return [outcome.code, outcome.out, outcome.err]
    if task[0] == "copy":
        if torch.distributed.get_rank() == 0:
            stopped_after(Path(task[1]), Path(task[2]), task[3])
        torch.distributed.barrier()
        return None
    if task[0] == "mean of losses":
        return mean_of_losses(Path(task[1]))
    outcome = run_main(task[0], task[1])
    assert torch.distributed.get_world_size() == 2
    return [outcome.code, outcome.out, outcome.err]


if __name__ == "__main__":
    import torch

    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(THREADS)
    tasks = json.loads(Path(sys.argv[1]).read_text())
    results = [do(task) for task in tasks]
    Path(f"{sys.argv[2]}.{os.environ['RANK']}").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
