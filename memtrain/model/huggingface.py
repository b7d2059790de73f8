"""Weights and shapes to and from the folders of transformers."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memtrain.command import BadInput
from memtrain.model.llama import LlamaForCausalLM
from memtrain.model.presets import LlamaConfig, read_config_json, shape_problems
from memtrain.model.weights_file import SCALE, read_into, write_shards

EXPORT_NAMES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
                "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt")
MOST_PROBLEMS = 5  # lines of one error


def weights_folder(model: str) -> Path:
    """The local folder of `model` (a folder, or a hub id that is fetched into the hub's cache). Raises BadInput."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model"]))
    except Exception as error:  # no network, no such id, no permission, a bad name: the client raises many kinds
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise BadInput(f"{model}: neither a folder, nor did the hub give one ({reason[:120]}); check the name"
                       ) from None


def load_weights(model: LlamaForCausalLM, source: str) -> None:
    """Fill `model` with the safetensors of a transformers Llama folder, cast to the model's dtype, tensor by tensor; int8
    layers take int8 with scales, or quantise what comes.

    Raises BadInput unless names and shapes agree entirely.
    """
    from safetensors import SafetensorError, safe_open

    folder = weights_folder(source)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise BadInput(f"{folder}: no model*.safetensors; want a Llama folder of transformers saved as safetensors")
    wanted = dict(model.named_parameters())
    ignored = {"lm_head.weight"} if model.lm_head is None else set()
    problems = []
    heads: list[tuple[Path, str]] = []
    seen: set[str] = set()
    for file in files:
        try:
            fitting = []
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    if name.endswith("rotary_emb.inv_freq"):  # recomputed from the config
                        continue
                    if name in ignored:
                        heads.append((file, name))
                        continue
                    if name not in wanted:
                        problems.append(f"{file}: tensor {name} has no place in this Llama; want the names of "
                                        "transformers")
                    elif tuple(tensors.get_slice(name).get_shape()) != tuple(wanted[name].shape):
                        problems.append(f"{file}: tensor {name} is {tuple(tensors.get_slice(name).get_shape())}; its "
                                        f"config.json says {tuple(wanted[name].shape)}")
                    else:
                        fitting.append(name)
                        seen.add(name)
                        if name + SCALE in wanted and tensors.get_slice(name).get_dtype() != "I8":
                            seen.add(name + SCALE)  # made beside it
            for name in fitting if not problems else ():
                read_into(file, name, wanted[name], wanted.get(name + SCALE))
        except (SafetensorError, OSError) as error:
            problems.append(f"{file}: cannot be read as safetensors ({error}); fetch or export it again")
    if not problems and (missing := sorted(set(wanted) - seen)):
        problems.append(f"{folder}: {len(missing)} tensors are missing, {missing[0]} the first; fetch or export it "
                        "again")
    if not problems:
        problems += [problem for file, name in heads for problem in _head_problems(file, name, model)]
    if len(problems) > MOST_PROBLEMS:  # a wrong width is wrong in every tensor
        problems[MOST_PROBLEMS:] = [f"{folder}: {len(problems) - MOST_PROBLEMS} more tensors do not fit; want a Llama "
                                    "folder as transformers saves it"]
    if problems:
        raise BadInput("\n".join(problems))


def _head_problems(file: Path, name: str, model: LlamaForCausalLM) -> list[str]:
    """A head stored beside the embedding that config.json ties it to must equal it: else transformers does not tie."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        head = tensors.get_tensor(name).to(model.head_weight)
    if head.shape == model.head_weight.shape and torch.equal(head, model.head_weight):
        return []
    return [f"{file}: tensor {name} is not the embedding, but config.json ties them; set tie_word_embeddings to false "
            "there"]


def config_dict(shape: LlamaConfig, dtype: str, bos_token_id: int | None, eos_token_id: int | None,
                pad_token_id: int | None) -> dict[str, Any]:
    """Contents of `config.json`, written by transformers' own class, with the rope keys of version 4 beside 5's."""
    from transformers import LlamaConfig as TransformersConfig

    rope = {"rope_theta": shape.rope_theta, **(shape.rope_scaling or {"rope_type": "default"})}
    config = TransformersConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim, rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings, rope_parameters=rope,
        tie_word_embeddings=shape.tie_word_embeddings, attention_bias=shape.attention_bias, mlp_bias=shape.mlp_bias,
        attention_dropout=shape.attention_dropout, initializer_range=shape.initializer_range,
        bos_token_id=bos_token_id, eos_token_id=eos_token_id, pad_token_id=pad_token_id)
    # Readers of version 4 (and converters built on them) take a missing rope_theta for 10000 without a word.
    return {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": dtype, "torch_dtype": dtype,
            "rope_theta": shape.rope_theta, "rope_scaling": shape.rope_scaling}


def check_shard_size(text: str) -> None:
    """Raises BadInput unless `text` is a size such as 5GB."""
    if not re.fullmatch(r"[1-9][0-9]*(KB|MB|GB|TB)", text):
        raise BadInput(f"max_shard_size={text}: want a whole number with KB, MB, GB or TB, such as 5GB")


def check_export_folder(folder: Path) -> None:
    """Raises BadInput if exporting into `folder` would replace anything but an earlier export."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: is a file; choose a folder for the export")
    foreign = [] if not folder.exists() else sorted(
        entry.name for entry in folder.iterdir()
        if entry.name not in EXPORT_NAMES and not (entry.name.startswith("model-") and entry.suffix == ".safetensors"))
    if foreign:
        raise BadInput(f"{folder}: holds {foreign[0]}, which is no part of an export; choose an empty or new folder")
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise BadInput(f"{folder}: no permission to write in {parent}; choose another folder")


def export(weights: Mapping[str, Tensor], shape: LlamaConfig, tokenizer: Any, folder: Path, dtype: str | None = None,
           max_shard_size: str = "5GB") -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` open: weights in `dtype` (None: their own; int8 ones are
    widened), sharded above `max_shard_size`, both configs, tokenizer. It appears complete or not at all, in place of an earlier
    export. No more than a few rows are cast at a time.

    Raises BadInput if `folder` holds anything else.
    """
    own = (weight.dtype for name, weight in weights.items() if weight.dtype != torch.int8 and not name.endswith(SCALE))
    dtype = dtype or str(next(own)).removeprefix("torch.")
    folder = folder.absolute()
    check_export_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        write_shards(weights, partial, dtype, max_shard_size)
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        _write_json(partial / "config.json", config_dict(shape, dtype, *ids))
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        _write_json(partial / "generation_config.json",
                    {name: value for name, value in zip(names, ids, strict=True) if value is not None})
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)  # mkdtemp makes it private, and safetensors its files
        for file in partial.glob("*.safetensors"):
            file.chmod(0o644)
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old-", dir=folder.parent))
        try:
            if folder.exists():
                os.replace(folder, old / folder.name)
            os.replace(partial, folder)
        except BaseException:
            if os.path.lexists(old / folder.name):
                os.replace(old / folder.name, folder)
            old.rmdir()
            raise
        shutil.rmtree(old)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_model(folder: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The model of a transformers Llama folder (or hub id), in evaluation mode. Raises BadInput."""
    path = weights_folder(folder)
    shape = read_config_json(path / "config.json")
    if problems := shape_problems(shape):
        raise BadInput("\n".join(f"{path}: {problem}" for problem in problems))
    model = LlamaForCausalLM(shape, initialise=False).to(dtype)
    load_weights(model, str(path))
    return model.eval()
