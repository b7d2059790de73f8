"""What a run is: every option once, with its default, range and text.

Nothing here imports torch, so `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from memtrain.command import BadInput


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
                            choices=("adamw", "adamw_8bit", "adamw_4bit", "adafactor", "lion_8bit", "adamw_factored"))
    learning_rate: float = option(1e-3, "highest learning rate", minimum=0, may_change=True)
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
    enforce_budget: bool = option(False, "make memory_budget a hard limit, to rehearse a smaller card", may_change=True)
    allow: list[str] = option([], "what a plan may change although it changes the result: rounding (bfloat16 weights), "
                              "optimizer (one with less state)", choices=("rounding", "optimizer"), may_change=True)
    gradient_checkpointing: str = option("none", "activations computed again in the backward: the cheap ones (selective), "
                                         "also the wide products (selective_deep), or all (full)",
                                         choices=("none", "selective", "selective_deep", "full"), may_change=True)
    checkpointed_layers: int | str = option("all", "layers it applies to, counted from the first, or all",
                                            words=("all",), minimum=0, may_change=True)
    recomputed_rows: int | str = option("all", "rows of a micro-batch that a layer computes (again) at a time, or all",
                                        words=("all",), minimum=1, may_change=True)
    offload_activations: bool = option(False, "keep what the early layers save for the backward in host memory",
                                       may_change=True)
    loss_chunk_tokens: int | str = option("auto", "tokens whose logits exist at a time, or auto", words=("auto",), minimum=1,
                                          may_change=True)
    optimizer_in_backward: bool = option(False, "update each parameter as soon as its gradient is there, and free it")
    head_in_blocks: bool = option(False, "with optimizer_in_backward: form the head's gradient in the backward, some rows at a "
                                  "time, update and free these; one more product of the head")
    param_dtype: str = option("float32", "dtype of weights and gradients; bfloat16 is rounded stochastically, and so is "
                              "int8 (matrices, with a scale per row; norms are bfloat16)",
                              choices=("float32", "bfloat16", "float16", "int8"))
    mixed_precision: str | None = option(None, "no, bf16, fp16 or fp8; default: the launch config's",
                                         choices=("no", "bf16", "fp16", "fp8"))
    # run
    output_dir: str = option("runs/tiny", "folder of the run", may_change=True)
    resume: str = option("auto", "auto (the newest complete checkpoint, if any), none, or a checkpoint folder",
                         may_change=True)
    save_every: int | None = option(None, "updates between checkpoints; default: only at the end", minimum=1,
                                    may_change=True)
    save_async: bool = option(False, "write checkpoints behind the training, which waits only for a copy in host memory",
                              may_change=True)
    keep_last: int = option(2, "newest checkpoints kept", minimum=1, may_change=True)
    keep_best: bool = option(False, "also keep the checkpoint of the lowest evaluation loss", may_change=True)
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
# may change when a run goes on, and change its result: said
SAID_WHEN_CHANGED = ("learning_rate", *EXCLUSIVE)


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
