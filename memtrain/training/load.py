"""Loading a checkpoint without a second copy of anything: a run that goes on needs no more than one that begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from memtrain.command import BadInput


def load_state(accelerator: Accelerator, folder: Path) -> None:
    """`accelerator.load_state`, but for weights in one safetensors file, which go straight into the model. Raises BadInput."""
    def read_models(models: list[Any], _: str) -> None:
        # what this takes out of the list, Accelerate does not load; sharded models are not in it
        if len(models) == 1 and (folder / "model.safetensors").exists():
            read_weights(accelerator.unwrap_model(models.pop()), folder / "model.safetensors")

    hook = accelerator.register_load_state_pre_hook(read_models)
    try:
        # of a mapped file no more is in host memory than what is on its way to the device; on a CPU, though, the mapping would
        # stay: the state itself, on a file that is soon deleted
        accelerator.load_state(str(folder), load_kwargs={"mmap": accelerator.device.type != "cpu"})
    finally:
        hook.remove()


@torch.no_grad()
def read_weights(model: torch.nn.Module, path: Path) -> None:
    """Fill `model` from a safetensors file of its own names, shapes and dtypes. safetensors' reader maps the whole file, whose
    pages then count as a second copy of the model. Raises BadInput."""
    tensors = model.state_dict()
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        places = {name.removeprefix("module."): entry["data_offsets"] for name, entry in header.items()}
        sizes = {name: stop - start for name, (start, stop) in places.items()}
        if sizes != {name: tensor.nbytes for name, tensor in tensors.items()}:
            raise BadInput(f"{path}: its tensors are not those of the model; choose another checkpoint")
        for name, (start, _) in places.items():
            tensor = tensors[name]
            host = tensor if tensor.device.type == "cpu" and tensor.is_contiguous() else torch.empty(
                tensor.shape, dtype=tensor.dtype)
            file.seek(8 + header_bytes + start)
            buffer: Any = host.view(-1).view(torch.uint8).numpy()
            if file.readinto(buffer) != tensor.nbytes:
                raise BadInput(f"{path}: ends within {name}; choose another checkpoint")
            if host is not tensor:
                tensor.copy_(host)
