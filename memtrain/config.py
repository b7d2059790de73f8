"""What a run is: one flat set of options with the same names in YAML and on the command line.

Nothing here imports torch, so `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from memtrain.command import BadInput, Option, check_name, read_arguments

RECIPES = Path(__file__).parent / "recipes"


def option(default: Any, text: str, *, choices: Sequence[str] = (), minimum: float | None = None,
           below: float | None = None, words: Sequence[str] = (), may_change: bool = False) -> Any:
    """A field of `RunConfig`.

    `choices` are all values allowed; `words` the strings allowed beside a number; `minimum <= value < below`.
    `may_change`: a resumed run may set another value, because it changes how the run is computed and not what it is.
    """
    metadata = {"text": text, "choices": tuple(choices), "minimum": minimum, "below": below, "words": tuple(words),
                "may_change": may_change}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class RunConfig:
    # model
    model: str = option("tiny", "preset name, a config.json, or a Hugging Face folder or id to continue from")
    hidden_size: int | None = option(None, "width; default: the model's", minimum=1)
    intermediate_size: int | None = option(None, "width inside the MLP; default: the model's", minimum=1)
    num_hidden_layers: int | None = option(None, "decoder layers; default: the model's", minimum=1)
    num_attention_heads: int | None = option(None, "query heads; default: the model's", minimum=1)
    num_key_value_heads: int | None = option(None, "key/value heads; default: the model's", minimum=1)
    head_dim: int | None = option(None, "width of a head; default: the model's, or hidden_size / num_attention_heads",
                                  minimum=2)
    rope_theta: float | None = option(None, "base of the rotary embedding; default: the model's", minimum=1)
    tie_word_embeddings: bool | None = option(None, "share embedding and head; default: the model's")
    attention_dropout: float | None = option(None, "probability; default: the model's", minimum=0, below=1)
    # data
    dataset: list[str] = option(["python-stdlib"], "python-stdlib, files and globs (.txt .jsonl .parquet .py), or a hub id")
    dataset_config: str | None = option(None, "configuration name of a hub dataset")
    dataset_split: str = option("train", "split of a hub dataset")
    text_column: str = option("text", "column or key that holds the text")
    streaming: bool = option(False, "read a hub dataset as it arrives, without an order of our own")
    encoding_errors: str = option("strict", "bytes that are not UTF-8: stop and name the place, or replace and count them",
                                  choices=("strict", "replace"))
    tokenizer: str | None = option(None, "train, a folder or a hub id; default: the folder's of --model, else train")
    vocab_size: int | None = option(None, "tokens in the vocabulary, padded to a multiple of 64; default: the model's",
                                    minimum=1)
    seq_len: int = option(256, "tokens predicted in a row", minimum=1)
    packing: str = option("packed", "join documents and cut rows, or a document a row", choices=("packed", "padded"))
    document_mask: bool = option(False, "no attention across the documents of a packed row")
    eval_fraction: float = option(0.01, "share of the documents held out for evaluation; 0 for none", minimum=0, below=1)
    num_workers: int = option(0, "loader processes for each training process", minimum=0, may_change=True)
    cache_dir: str = option("~/.cache/memtrain", "folder for tokenised corpora", may_change=True)
    # training
    global_batch_size: int = option(8, "rows in an update, over all processes", minimum=1)
    micro_batch_size: int | str = option("auto", "rows in one forward of one process, or auto", words=("auto",), minimum=1,
                                         may_change=True)
    max_steps: int | None = option(None, "updates in the run (or set epochs)", minimum=1, may_change=True)
    epochs: int | None = option(None, "passes over the training rows (or set max_steps)", minimum=1, may_change=True)
    optimizer: str = option("adamw", "update rule and bits of its state",
                            choices=("adamw", "adamw_8bit", "adamw_4bit", "adafactor", "lion_8bit"))
    learning_rate: float = option(1e-3, "highest learning rate", minimum=0)
    lr_schedule: str = option("cosine", "shape after warm-up", choices=("cosine", "linear", "constant", "wsd"))
    warmup_steps: int | None = option(None, "updates of linear warm-up; default: a tenth of the run", minimum=0)
    decay_steps: int | None = option(None, "updates of the decay at the end of wsd; default: a fifth of the run", minimum=1)
    min_lr_ratio: float = option(0.1, "last learning rate / highest (cosine, linear, wsd)", minimum=0)
    weight_decay: float = option(0.1, "decoupled weight decay of the matrices", minimum=0)
    adam_beta1: float = option(0.9, "decay of the first moment", minimum=0, below=1)
    adam_beta2: float = option(0.95, "decay of the second moment", minimum=0, below=1)
    adam_eps: float = option(1e-8, "added to the root of the second moment", minimum=0)
    max_grad_norm: float | None = option(1.0, "gradient norm above which an update is scaled down; none for no clipping",
                                         minimum=0)
    seed: int = option(0, "seed of initialisation, data order and dropout", minimum=0, below=2**32)
    compile: bool = option(False, "torch.compile each decoder layer", may_change=True)
    # memory
    memory_budget: str | None = option(None, "most memory on the run's device: 12GB (10^9 bytes each) or 12GiB (2^30); a plan "
                                       "then chooses the options that change no result", may_change=True)
    allow: list[str] = option([], "what a plan may change although it changes the result: rounding (bfloat16 weights), "
                              "optimizer (one with less state)", choices=("rounding", "optimizer"), may_change=True)
    gradient_checkpointing: str = option("none", "activations computed again in the backward: the cheap ones (selective), "
                                         "also the wide products (selective_deep), or all (full)",
                                         choices=("none", "selective", "selective_deep", "full"), may_change=True)
    checkpointed_layers: int | str = option("all", "layers it applies to, counted from the first, or all",
                                            words=("all",), minimum=0, may_change=True)
    offload_activations: bool = option(False, "keep what the early layers save for the backward in host memory",
                                       may_change=True)
    loss_chunk_tokens: int | str = option("auto", "tokens whose logits exist at a time, or auto", words=("auto",), minimum=1,
                                          may_change=True)
    optimizer_in_backward: bool = option(False, "update each parameter as soon as its gradient is there, and free it")
    param_dtype: str = option("float32", "dtype of weights and gradients; bfloat16 is rounded stochastically",
                              choices=("float32", "bfloat16", "float16"))
    mixed_precision: str | None = option(None, "no, bf16, fp16 or fp8; default: the launch config's",
                                         choices=("no", "bf16", "fp16", "fp8"))
    # run
    output_dir: str = option("runs/tiny", "folder of the run", may_change=True)
    resume: str = option("auto", "auto (the newest complete checkpoint, if any), none, or a checkpoint folder",
                         may_change=True)
    save_every: int | None = option(None, "updates between checkpoints; default: only at the end", minimum=1,
                                    may_change=True)
    keep_last: int = option(2, "checkpoints kept", minimum=1, may_change=True)
    eval_every: int | None = option(None, "updates between evaluations; default: only at the end", minimum=1,
                                    may_change=True)
    log_every: int = option(10, "updates between writes of metrics (the only regular wait for the device)", minimum=1,
                            may_change=True)
    report_to: str | None = option(None, "tracker of Accelerate: tensorboard, wandb, ...", may_change=True)


EVALUATION_OPTIONS = ("dataset", "dataset_config", "dataset_split", "text_column", "encoding_errors", "seq_len", "packing",
                      "document_mask", "cache_dir", "micro_batch_size", "mixed_precision")
GROUPS = {"model": "model", "data": "dataset", "training": "global_batch_size", "memory": "memory_budget",
          "run": "output_dir"}
EXCLUSIVE = ("max_steps", "epochs")
_FIELDS = {f.name: f for f in fields(RunConfig)}
_TYPES = typing.get_type_hints(RunConfig)


def parse_value(name: str, value: Any) -> Any:
    """A value of YAML, or the text of the command line, in the type of option `name`. Raises BadInput."""
    meta = _FIELDS[name].metadata
    union = typing.get_origin(_TYPES[name]) in (typing.Union, types.UnionType)
    kinds = typing.get_args(_TYPES[name]) if union else (_TYPES[name],)
    if typing.get_origin(kinds[0]) is list:
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if meta["choices"]:  # a set of words: commas between them too, and none of them
            words = [word for item in values for word in str(item).split(",") if word and word.lower() != "none"]
            if wrong := [word for word in words if word not in meta["choices"]]:
                raise BadInput(f"{name}={wrong[0]}: want any of {', '.join(meta['choices'])}; change --{name}")
            return words
        if not values or not all(isinstance(v, str) and v for v in values):
            raise BadInput(f"{name}={value!r}: want one or more names; write --{name} NAME ...")
        return values
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null") and type(None) in kinds
                         and "none" not in meta["choices"]):
        if type(None) in kinds:
            return None
        raise BadInput(f"{name}={value}: want {_describe(name)}; leave the option out for the default")
    if bool in kinds:
        if isinstance(value, bool) or str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
    elif isinstance(value, bool):
        # YAML 1.1 reads a bare no, yes, on, off as a boolean: `mixed_precision: no` is the word no
        value = "yes" if value else "no"
    if int in kinds or float in kinds:
        if str(value) in meta["words"]:
            return str(value)
        try:
            number = int(value) if int in kinds and not isinstance(value, float) else float(value)
        except (TypeError, ValueError):
            number = None
        if int in kinds and isinstance(number, float):
            number = int(number) if number.is_integer() else None
        if number is not None and _in_range(number, meta):
            return number
    elif str in kinds and isinstance(value, (str, int, float)):
        value = str(value)
        if value and (not meta["choices"] or value in meta["choices"]):
            return value
        close = difflib.get_close_matches(value, meta["choices"], n=1)
        if close:
            raise BadInput(f"{name}={value}: want {_describe(name)}; did you mean {close[0]}?")
    raise BadInput(f"{name}={value}: want {_describe(name)}; change --{name}")


def _in_range(number: float, meta: Mapping[str, Any]) -> bool:
    # written so that nan fails, and infinity too
    low, high = meta["minimum"], meta["below"]
    return (low is None or number >= low) and number < (float("inf") if high is None else high)


def option_kinds(names: Iterable[str]) -> dict[str, Option]:
    """How the command line spells these options."""
    hints = {name: _TYPES[name] for name in names}
    return {name: Option(many=typing.get_origin(hint) is list, flag=bool in (typing.get_args(hint) or (hint,)))
            for name, hint in hints.items()}


def _describe(name: str) -> str:
    meta, hint = _FIELDS[name].metadata, _TYPES[name]
    kinds = typing.get_args(hint) or (hint,)
    if bool in kinds:
        return "true or false"
    if meta["choices"]:
        return "one of " + ", ".join(meta["choices"])
    if int in kinds or float in kinds:
        bounds = [f">= {meta['minimum']:g}"] if meta["minimum"] is not None else []
        bounds += [f"< {meta['below']:g}"] if meta["below"] is not None else []
        number = " ".join(["an integer" if int in kinds else "a number", " and ".join(bounds)]).strip()
        return " or ".join([number, *meta["words"]])
    return "text"


def read_recipe(path_or_name: str) -> dict[str, Any]:
    """Options of a YAML file, or of the recipe of that name. Raises BadInput."""
    import yaml

    path = Path(path_or_name)
    if not path.is_file() and (RECIPES / f"{path_or_name}.yaml").is_file():
        path = RECIPES / f"{path_or_name}.yaml"
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
        raise BadInput(f"recipe {path_or_name}: no such file; give a YAML file or one of {names}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"recipe {path}: cannot be read ({' '.join(str(error).split())}); give a YAML file") from None
    if not isinstance(loaded, dict):
        raise BadInput(f"recipe {path}: want lines of `option: value`, found {type(loaded).__name__}; see memtrain/recipes")
    return {str(key): value for key, value in loaded.items()}


def make_config(*sources: Mapping[str, Any], problems: Sequence[str] = ()) -> RunConfig:
    """The options of all sources, later ones first in rank. Raises one BadInput with a line for every problem."""
    found = list(problems)
    merged: dict[str, Any] = {}
    for source in sources:
        given = {name: value for name, value in source.items() if check_name(name, "", _FIELDS, found)}
        for name in EXCLUSIVE:  # --epochs on the command line replaces max_steps of the recipe, and the other way round
            if str(given.get(name)).lower() not in ("none", "null"):
                for other in EXCLUSIVE:
                    merged.pop(other, None)
        merged |= given
    parsed = {}
    for name, value in merged.items():
        try:
            parsed[name] = parse_value(name, value)
        except BadInput as error:
            found.append(str(error))
            if name in EXCLUSIVE:
                parsed[name] = sys.maxsize  # it was given: no complaint about its absence too
    config = RunConfig(**parsed)
    found += config_problems(config)
    if found:
        raise BadInput("\n".join(dict.fromkeys(found)))
    return config


VOCAB_MULTIPLE = 64  # matrix units read vocabularies in tiles; a ragged last tile costs speed and buys nothing


def padded_vocab_size(vocab_size: int) -> int:
    """`vocab_size` rounded up to a multiple of VOCAB_MULTIPLE."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


BYTE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
              "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 12GB (12e9) or 12GiB (12 x 2^30). Raises BadInput."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B)\s*", text, re.IGNORECASE)
    size = round(float(match[1]) * BYTE_UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise BadInput(f"{text}: want a size above 0 with its unit, such as 12GB, 800MB or 12GiB")
    return size


def config_problems(config: RunConfig) -> list[str]:
    """What contradicts what within the options, a line each."""
    found = []
    if (config.max_steps is None) == (config.epochs is None):
        given = "neither" if config.max_steps is None else "both"
        found.append(f"max_steps and epochs: {given} given; set exactly one of them")
    if config.streaming and config.epochs is not None:
        found.append(f"epochs={config.epochs} with streaming=true: a stream has no known length; set max_steps instead")
    if config.streaming and config.tokenizer in (None, "train") and not Path(config.model).expanduser().is_dir():
        found.append("streaming=true without a tokenizer: none can be trained on a stream; set tokenizer to a folder or hub id")
    if config.max_steps is not None and (config.warmup_steps or 0) > config.max_steps:
        found.append(f"warmup_steps={config.warmup_steps}: more than max_steps={config.max_steps}; lower warmup_steps")
    if config.document_mask and config.packing != "packed":
        found.append("document_mask=true with packing=padded: a padded row holds one document; leave document_mask out")
    if config.param_dtype != "float32" and config.mixed_precision not in (None, "no"):
        found.append(f"param_dtype={config.param_dtype} with mixed_precision={config.mixed_precision}: autocast needs float32 "
                     "weights; set mixed_precision=no or param_dtype=float32")
    if config.optimizer_in_backward and config.max_grad_norm is not None:
        found.append(f"optimizer_in_backward=true with max_grad_norm={config.max_grad_norm:g}: the norm of all gradients is "
                     "known only after the first are gone; set max_grad_norm=none, or optimizer_in_backward=false")
    if config.offload_activations and config.gradient_checkpointing.startswith("selective"):
        found.append(f"offload_activations=true with gradient_checkpointing={config.gradient_checkpointing}: what selective "
                     "keeps is out of reach of the offload; set gradient_checkpointing to full or none")
    if config.max_grad_norm == 0:
        found.append("max_grad_norm=0: every gradient would become zero; set it above 0, or none for no clipping")
    if config.memory_budget is not None:
        try:
            parse_bytes(config.memory_budget)
        except BadInput as error:
            found.append(f"memory_budget={error}; change --memory_budget")
    if config.learning_rate == 0:
        found.append("learning_rate=0: nothing would be learned; set it above 0")
    return found


def load_config(arguments: Sequence[str], default_recipe: str = "tiny") -> RunConfig:
    """`[RECIPE.yaml] [--key value ...]` -> RunConfig. Raises one BadInput with a line for every problem."""
    positionals, options, problems = read_arguments(arguments, option_kinds(_FIELDS))
    if len(positionals) > 1:
        problems.append(f"{' '.join(positionals[1:])}: want at most one recipe, before the options; write --key value")
    recipe: dict[str, Any] = {}
    try:
        recipe = read_recipe(positionals[0] if positionals else default_recipe)
    except BadInput as error:
        problems.append(str(error))
        options.setdefault("max_steps", 1)  # so that the missing recipe is the only complaint about it
    return make_config(recipe, options, problems=problems)


def save_config(config: RunConfig, path: Path) -> None:
    """Write the options as YAML, whole or not at all."""
    import yaml

    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(yaml.safe_dump(asdict(config), sort_keys=False), encoding="utf-8")
    os.replace(temporary, path)


def changed_options(before: Mapping[str, Any], after: RunConfig) -> list[str]:
    """Options that make `after` another run than the one that wrote `before` (a resolved config.yaml)."""
    return [name for name, f in _FIELDS.items()
            if not f.metadata["may_change"] and name in before and before[name] != getattr(after, name)]


def help_text(usage: str) -> str:
    """Every option with its default, grouped, for `--help`."""
    titles = {first: title for title, first in GROUPS.items()}
    lines = [usage]
    defaults = RunConfig()
    for name, f in _FIELDS.items():
        if name in titles:
            lines.append(f"\n{titles[name]}:")
        values = " | ".join(f.metadata["choices"]) or _describe(name)
        default = getattr(defaults, name)
        shown = " ".join(default) if isinstance(default, list) else default
        lines.append(f"  --{name:<24}{f.metadata['text']}  [{values}; default {shown}]")
    return "\n".join(lines)
