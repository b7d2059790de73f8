"""Questions of a run that are answered in a process of its own, which leaves no memory behind: JSON in, JSON out.

    python -m memtrain.memory.child < QUESTION.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrain.model.presets import LlamaConfig
    from memtrain.options import RunConfig

# what a launcher tells a process of a group: the child is none
GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ask(question: str, config: RunConfig, shape: LlamaConfig, num_processes: int, **more: Any) -> subprocess.Popen[str]:
    """Start a child with one of QUESTIONS; see `answer`."""
    environment = {name: value for name, value in os.environ.items() if name not in GROUP}
    child = subprocess.Popen([sys.executable, "-m", "memtrain.memory.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, env={**environment, "KINETO_LOG_LEVEL": "99"})
    assert child.stdin is not None
    json.dump({"question": question, "config": asdict(config), "shape": asdict(shape), "num_processes": num_processes,
               "more": more}, child.stdin)
    child.stdin.close()
    child.stdin = None
    return child


def answer(child: subprocess.Popen[str], timeout_seconds: float = 600) -> Any:
    """What the child found. Raises RuntimeError where it failed or took too long."""
    try:
        out, error = child.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise RuntimeError(f"no answer in {timeout_seconds:g} seconds") from None
    if child.returncode != 0:
        raise RuntimeError((error.strip().splitlines() or [f"ended with code {child.returncode}"])[-1][:300])
    return json.loads(out.splitlines()[-1])


def _predict(config: RunConfig, shape: LlamaConfig, num_processes: int) -> dict[str, Any]:
    from memtrain.memory.estimate import predict

    return asdict(predict(config, shape, num_processes))


def _what_fits(config: RunConfig, shape: LlamaConfig, num_processes: int, budget_bytes: int = 0, phase: str = ""
               ) -> dict[str, Any]:
    """{"now": prediction of the run, "changes": the smallest that fit the budget and take less in this phase, or null,
    "needed_bytes": with them, or else with all there are}."""
    from memtrain.memory.device import device_type
    from memtrain.memory.estimate import needed_bytes, predict
    from memtrain.memory.planner import accuracy_changes
    from memtrain.training.out_of_memory import smaller_recipe

    needed = 0

    def try_out(candidate: RunConfig) -> bool:
        nonlocal needed
        found = predict(candidate, shape, num_processes)
        needed = needed_bytes(found)
        return needed <= budget_bytes and found.phases.get(phase, needed) < now.phases.get(phase, needed_bytes(now))

    now = predict(config, shape, num_processes)
    ladder = [config]
    while (smaller := smaller_recipe(ladder[-1], shape, device_type(), num_processes)) is not None:
        ladder.append(replace(ladder[-1], **smaller))
    if len(ladder) > 1 and try_out(ladder[-1]):
        tried = ladder[1:]
    else:  # what changes the result, the mildest first; activations count in these phases only
        smallest = ladder[-1] if phase in ("forward", "backward", "evaluate") else config
        tried = [changed for level, changed in accuracy_changes(smallest, ("rounding", "optimizer")) if level > 0]
    chosen = next((candidate for candidate in tried if try_out(candidate)), config)
    changes = {name: value for name, value in asdict(chosen).items() if value != getattr(config, name)}
    return {"now": asdict(now), "changes": changes or None, "needed_bytes": needed}


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {"predict": _predict, "what fits": _what_fits}


def main(job: Mapping[str, Any]) -> Any:
    from memtrain.model.presets import LlamaConfig
    from memtrain.options import RunConfig

    return QUESTIONS[job["question"]](RunConfig(**job["config"]), LlamaConfig(**job["shape"]), job["num_processes"],
                                      **job["more"])


if __name__ == "__main__":
    from memtrain.memory.cap import lift

    lift()  # a cap is the run's, not ours
    os.nice(10)  # the run goes first
    print(json.dumps(main(json.load(sys.stdin))))
