"""What a run takes of the machine around its device: host memory and disk. Never mixed into the bytes of tensors."""

from __future__ import annotations

from dataclasses import replace

from memtrain.command import BadInput
from memtrain.memory.device import device_type, free_host_bytes
from memtrain.memory.estimate import Prediction, in_child, play
from memtrain.memory.ledger import Window
from memtrain.model.llama import NOT_OFFLOADED
from memtrain.model.presets import LlamaConfig
from memtrain.options import RunConfig

# what a forked worker does not share with its process: 12 MB (psutil's `uss` after 50 updates)
WORKER_BYTES = 12_000_000
PREFETCHED_UPDATES = 2  # of each worker: DataLoader's default
TOKEN_BYTES = 16  # input and target, int64


def host_needs(prediction: Prediction, config: RunConfig, shape: LlamaConfig, num_processes: int,
               device: str) -> dict[str, int]:
    """Bytes by name: on disk (`disk_...`, of all processes), and in host memory (`ram_...`, of each process)."""
    update = config.global_batch_size // num_processes * config.seq_len * TOKEN_BYTES
    checkpoint, export = prediction.host["disk_checkpoint"], prediction.host["disk_export"]
    on_gpu = device == "cuda"  # on a CPU, copies and activations are tensors of the device, and counted there
    return {"disk_checkpoint": checkpoint, "disk_export": export, "disk_run": (config.keep_last + 1) * checkpoint + export,
            "ram_save": export if on_gpu else 0,
            "ram_offload": offloaded_bytes(config, shape, num_processes) if config.offload_activations and on_gpu else 0,
            "ram_workers": config.num_workers * (WORKER_BYTES + PREFETCHED_UPDATES * update)}


def offloaded_bytes(config: RunConfig, shape: LlamaConfig, num_processes: int = 1) -> int:
    """Activations of a micro-batch that go to pinned host memory: what the early layers keep for the backward."""
    kept = play(replace(config, offload_activations=False), shape, num_processes, whole=False, first_update=False)
    layers = {f"layer {index}" for index in range(shape.num_hidden_layers - min(NOT_OFFLOADED, shape.num_hidden_layers))}
    rises: dict[str, int] = {}
    for window in kept.windows:
        if window.phase == "forward" and window.place in layers:
            rises.setdefault(window.place, _rise(window))
    return sum(rises.values())


def _rise(window: Window) -> int:
    return window.end_bytes - window.start_bytes


def check_host_memory(config: RunConfig, shape: LlamaConfig, num_processes: int = 1) -> None:
    """Raises BadInput where host memory does not hold the activations that a run on a GPU would offload."""
    if not config.offload_activations or device_type() != "cuda":
        return
    needed, free = num_processes * in_child(offloaded_bytes, config, shape, num_processes), free_host_bytes()
    if needed > free:
        raise BadInput(f"offload_activations=true: {needed:,} bytes of host memory are wanted, and {free:,} are free; lower "
                       "micro_batch_size, or set offload_activations=false")
