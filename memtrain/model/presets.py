"""Shapes of models: what a Llama is made of, known shapes by name, and the shape a run asks for. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from memtrain.command import BadInput
from memtrain.options import RunConfig, padded_vocab_size


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama; field names are those of transformers' `LlamaConfig`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    # None, {"rope_type": "linear", "factor": f}, or {"rope_type": "llama3", "factor": ..., "low_freq_factor": ...,
    # "high_freq_factor": ..., "original_max_position_embeddings": ...}
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02

    @property
    def parameter_count(self) -> int:
        """Trainable numbers; a tied head is counted once."""
        h, d = self.hidden_size, self.head_dim
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        attention = 2 * h * q + 2 * h * kv + (q + 2 * kv + h if self.attention_bias else 0)
        mlp = 3 * h * self.intermediate_size + (2 * self.intermediate_size + h if self.mlp_bias else 0)
        heads = 1 if self.tie_word_embeddings else 2
        return heads * self.vocab_size * h + self.num_hidden_layers * (attention + mlp + 2 * h) + h


def _shape(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int,
           **rest: Any) -> LlamaConfig:
    return LlamaConfig(vocab, hidden, intermediate, layers, heads, kv_heads, hidden // heads, **rest)


_LLAMA3_SCALING = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}

PRESETS = {
    "tiny": _shape(4096, 256, 688, 6, 8, 4, tie_word_embeddings=True),
    # 50,000 tokens, which a multiple of 64 makes 50,048
    "small": _shape(50000, 768, 3072, 12, 12, 3),
    "160m": _shape(32000, 768, 3072, 12, 12, 12),
    "350m": _shape(32000, 1024, 2816, 24, 16, 16),
    # Llama 3.2 1B and 3B, Llama 2 7B, Llama 3.1 8B: config.json of the published weights
    "1b": _shape(128256, 2048, 8192, 16, 32, 8, max_position_embeddings=131072, rope_theta=500000.0,
                 rope_scaling={**_LLAMA3_SCALING, "factor": 32.0}, tie_word_embeddings=True),
    "3b": _shape(128256, 3072, 8192, 28, 24, 8, max_position_embeddings=131072, rope_theta=500000.0,
                 rope_scaling={**_LLAMA3_SCALING, "factor": 32.0}, tie_word_embeddings=True),
    "7b": _shape(32000, 4096, 11008, 32, 32, 32, max_position_embeddings=4096),
    "8b": _shape(128256, 4096, 14336, 32, 32, 8, max_position_embeddings=131072, rope_theta=500000.0,
                 rope_scaling={**_LLAMA3_SCALING, "factor": 8.0}),
}


def from_huggingface(values: dict[str, Any], source: str) -> LlamaConfig:
    """Shape from the contents of a transformers `config.json`, of version 5 (`rope_parameters`) or older (`rope_theta`,
    `rope_scaling`). Raises BadInput for another architecture or a rotary embedding that is not built here."""
    found = []
    if values.get("model_type", "llama") != "llama":
        raise BadInput(f"{source}: model_type is {values['model_type']}; want llama; choose a Llama model")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        found.append(f"{source}: hidden_act is {values['hidden_act']}; want silu; choose a Llama model")
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    optional = [name for name in ("num_key_value_heads", "head_dim") if values.get(name) is not None]
    if wrong := [name for name in (*required, *optional) if not isinstance(values.get(name), int) or values[name] < 1]:
        raise BadInput(f"{source}: {', '.join(wrong)} missing or no integer above 0; want a Llama's config.json")
    shape: dict[str, Any] = {f.name: values[f.name] for f in fields(LlamaConfig) if values.get(f.name) is not None}
    # transformers' own defaults, for what a config.json may leave out
    shape.setdefault("rms_norm_eps", 1e-6)
    shape.setdefault("num_key_value_heads", shape["num_attention_heads"])
    shape.setdefault("head_dim", max(1, shape["hidden_size"] // max(1, shape["num_attention_heads"])))
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    shape["rope_theta"] = float(rope.pop("rope_theta", None) or values.get("rope_theta") or 10000.0)
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", kind) or "default"
    keys = {"default": (), "linear": ("factor",), "llama3": ("factor", *_LLAMA3_SCALING)}
    if kind not in keys:
        found.append(f"{source}: rotary scaling {kind}; want one of {', '.join(keys)}; choose another model")
    else:
        wanted = [key for key in keys[kind] if key != "rope_type"]
        if missing := [key for key in wanted if not isinstance(rope.get(key), (int, float))]:
            found.append(f"{source}: rotary scaling {kind} without a number for {', '.join(missing)}; want all of "
                         f"{', '.join(wanted)}")
        shape["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **{k: rope.get(k) for k in wanted}}
    if found:
        raise BadInput("\n".join(found))
    return LlamaConfig(**shape)


def read_config_json(path: Path) -> LlamaConfig:
    """Shape from a transformers `config.json`. Raises BadInput."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(f"{path}: cannot be read ({error}); want a config.json of a Llama model") from None
    if not isinstance(values, dict):
        raise BadInput(f"{path}: holds no JSON object; want a config.json of a Llama model")
    return from_huggingface(values, str(path))


def is_weights_source(model: str) -> bool:
    """Whether `model` names weights to continue from (a folder or hub id), and not only a shape."""
    return model not in PRESETS and not model.endswith(".json")


def weights_tokenizer(model: str) -> str | None:
    """`model` where it is a folder or hub id that brings its own tokenizer, else None."""
    if not is_weights_source(model):
        return None
    path = Path(model).expanduser()
    return model if not path.is_dir() or (path / "tokenizer_config.json").is_file() else None


def model_config(config: RunConfig) -> LlamaConfig:
    """The shape a run asks for: preset, config.json or folder, with the run's own options over it.

    The vocabulary is padded, unless weights fix it. Raises one BadInput with a line for every problem.
    """
    if config.model in PRESETS:
        base = PRESETS[config.model]
    else:
        path = Path(config.model).expanduser()
        is_folder = path.is_dir()
        if is_folder:
            path = path / "config.json"
        if is_folder or path.is_file():
            base = read_config_json(path)
        elif config.model.endswith(".json") or config.model.startswith((".", "/", "~")):
            raise BadInput(f"model={config.model}: no such file or folder; want one of {', '.join(PRESETS)}, a "
                           "config.json or a Hugging Face folder or id")
        else:
            base = _hub_config(config.model)
    options = {f.name: getattr(config, f.name, None) for f in fields(LlamaConfig)}
    given = {name: value for name, value in options.items() if value is not None}
    problems = []
    if is_weights_source(config.model):
        # dropout and tying change no shape; anything else would not fit the weights
        for name in sorted(set(given) - {"attention_dropout"}):
            if name == "vocab_size":
                problems.append(f"vocab_size={config.vocab_size} with model={config.model}: the weights fix it at "
                                f"{base.vocab_size}; leave vocab_size out")
            elif given[name] != getattr(base, name):
                problems.append(f"{name}={given[name]} with model={config.model}: the weights fix it at "
                                f"{getattr(base, name)}; leave {name} out")
        shape = replace(base, attention_dropout=given.get("attention_dropout", base.attention_dropout))
    else:
        if "head_dim" not in given and ({"hidden_size", "num_attention_heads"} & set(given)):
            heads = given.get("num_attention_heads", base.num_attention_heads)
            given["head_dim"] = given.get("hidden_size", base.hidden_size) // heads
        shape = replace(base, **given)
        shape = replace(shape, vocab_size=padded_vocab_size(shape.vocab_size),
                        max_position_embeddings=max(shape.max_position_embeddings, config.seq_len))
    problems += shape_problems(shape)
    if config.checkpointed_layers != "all" and int(config.checkpointed_layers) > shape.num_hidden_layers:
        problems.append(f"checkpointed_layers={config.checkpointed_layers}: the model has {shape.num_hidden_layers} "
                        "layers; lower it, or all")
    if problems:
        raise BadInput("\n".join(problems))
    return shape


def shape_problems(shape: LlamaConfig) -> list[str]:
    """Sizes that do not go together, a line each."""
    found = []
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if shape.hidden_size % heads:  # transformers refuses it, whatever head_dim is: the export could not be loaded
        found.append(f"hidden_size={shape.hidden_size}: not a multiple of num_attention_heads={heads}; change one of "
                     "them")
    if heads % kv_heads:
        found.append(f"num_attention_heads={heads}: not a multiple of num_key_value_heads={kv_heads}; change one of "
                     "them")
    if shape.head_dim % 2 or shape.head_dim < 2:
        found.append(f"head_dim={shape.head_dim} (hidden_size={shape.hidden_size} / num_attention_heads={heads} unless "
                     "set): rotary embedding turns pairs; want an even number")
    return found


def _hub_config(model_id: str) -> LlamaConfig:
    from huggingface_hub import hf_hub_download

    try:
        return read_config_json(Path(hf_hub_download(model_id, "config.json")))
    except BadInput:
        raise
    except Exception as error:  # the hub client raises many kinds: no network, no such id, no permission, a bad name
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise BadInput(f"model={model_id}: neither a preset ({', '.join(PRESETS)}) nor a folder, and the hub gave none "
                       f"({reason[:120]}); check the name") from None
