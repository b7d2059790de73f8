"""What tests ask of two real processes, one after the other in one pair, because each start costs seconds.

    RANK=... WORLD_SIZE=2 ... python two_processes.py TASKS.json RESULTS.json

TASKS.json: a list of [script, arguments], ["copy", run, copy, step] or ["mean of losses", metrics.jsonl].
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from jobs import THREADS, run_main, stopped_after


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


def do(task: list[Any]) -> Any:
    import torch

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
