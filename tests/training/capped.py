"""pretrain.py under a limit on its addresses that is set once the model is built: the allocator really fails.

    python capped.py ROOM_BYTES LOG ARGUMENTS...      (of several processes, in the one of rank 1 only)

LOG gets a line for each try of an update: rows of its micro-batches, a sum over its samples, bytes of all live tensors.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from jobs import THREADS, load_script, unwatched


def live_bytes() -> int:
    import torch

    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def main(room_bytes: int, log: Path, arguments: list[str]) -> int:
    import torch

    from memtrain.memory import cap, child
    from memtrain.memory.watch import MemoryWatch
    from memtrain.training import step as steps

    torch.set_num_threads(THREADS)
    build, train_step = steps.build, MemoryWatch.train_step

    def capped_build(*words: Any) -> Any:
        steps.build = build
        if os.environ.get("WORLD_SIZE", "1") == "1":
            cap._load_everything(words[0])  # what is loaded later would count as the model's
        state = build(*words)
        if os.environ.get("RANK", "1") == "1":
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (cap.address_space_bytes() + room_bytes, hard))
        return state

    def logged_step(self: Any, state: Any, update: Any) -> Any:
        with log.open("a") as file:
            samples = int(sum((batch["input_ids"] * batch["input_ids"]).sum() for batch in update.micro_batches))
            rows = len(update.micro_batches[0]["input_ids"])
            file.write(json.dumps({"rows": rows, "samples": samples, "live_bytes": live_bytes()}) + "\n")
        return train_step(self, state, update)

    def refuse(*words: Any, **more: Any) -> None:
        raise OSError("not asked here")

    child.ask = refuse  # type: ignore[assignment]
    steps.build, MemoryWatch.train_step = capped_build, logged_step  # type: ignore[method-assign]
    with unwatched():
        return load_script("pretrain").main(arguments)


if __name__ == "__main__":
    from memtrain.command import run_script

    run_script(lambda words: main(int(words[0]), Path(words[1]), words[2:]))
