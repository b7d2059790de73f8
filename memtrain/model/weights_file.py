"""Safetensors files written and read a block of rows at a time: the library's writer wants all tensors of a file in memory, in
the dtype of the file, and its reader maps whole files, whose pages then count as a second copy of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memtrain.model.int8 import quantise_, row_blocks, widened

SCALE = "_scale"  # a weight's name with this is that of its scales
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ALIGNMENT = 8  # of the data behind the header, in bytes


def write_shards(weights: Mapping[str, Tensor], folder: Path, dtype: str, max_shard_size: str) -> None:
    """model.safetensors, or shards and their index, of these weights in `dtype`; int8 weights are widened by their scales."""
    from huggingface_hub import split_torch_state_dict_into_shards

    names = [name for name in weights if name.removesuffix(SCALE) == name or name.removesuffix(SCALE) not in weights]
    shapes = {name: torch.empty(weights[name].shape, dtype=getattr(torch, dtype), device="meta") for name in names}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)
    for file, held in split.filename_to_tensors.items():
        write_tensors(folder / file, {name: weights[name] for name in held},
                      {name: weights[name + SCALE] for name in held if name + SCALE in weights}, dtype)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n",
                                                             encoding="utf-8")


@torch.no_grad()
def write_tensors(path: Path, tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor], dtype: str) -> None:
    """A safetensors file of these tensors in `dtype`. scales: of those that are int8."""
    kind: torch.dtype = getattr(torch, dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * kind.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            rows, scale = tensor.detach().reshape(-1, tensor.shape[-1]), scales.get(name)
            for block in row_blocks(rows):
                file.write(bytes_of(widened(rows[block], None if scale is None else scale[block], kind)))


def bytes_of(tensor: Tensor) -> Any:
    """A buffer over the numbers of a tensor (of a copy, where they do not lie together in host memory)."""
    return tensor.to("cpu").contiguous().view(-1).view(torch.uint8).numpy()


@torch.no_grad()
def read_into(path: Path, name: str, weight: Tensor, scale: Tensor | None) -> None:
    """Tensor `name` of a safetensors file into `weight`; where that is int8 and the file's are floats, quantised by rows into
    weight and scale. The file is opened for this tensor alone, so that its pages are let go after it."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        rows = file.get_slice(name)
        if weight.dim() < 2:
            weight.copy_(rows[:])
            return
        for block in row_blocks(weight):
            values = rows[block.start:block.stop]
            if scale is None or values.dtype == torch.int8:
                weight[block].copy_(values)
            else:
                quantise_(weight[block], scale[block], values)
