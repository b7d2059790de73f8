"""Everything that can be known to be wrong with a run before a byte of data is read, all of it together."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from memtrain.command import BadInput
from memtrain.config import changed_options, read_recipe
from memtrain.data.corpus import find_sources, source_problems
from memtrain.model.presets import LlamaConfig, model_config
from memtrain.options import RunConfig

LOCK_NAME = ".lock"
# what a run that was killed at its very start has left
FIRST_FILES = {LOCK_NAME, ".stopped", "config.yaml.tmp"}


def launch_precision(config: RunConfig) -> str:
    """`mixed_precision` of the options, else of `accelerate launch`."""
    return config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def check_run(config: RunConfig, num_processes: int) -> LlamaConfig:
    """The shape of the run's model. Raises one BadInput with a line for every problem found."""
    shape, problems = computation_problems(config, num_processes)
    problems += source_problems(config) + output_problems(config) + tracker_problems(config) + save_problems(config)
    problems += hub_problems(config)
    if problems or shape is None:
        raise BadInput("\n".join(problems))
    return shape


def computation_problems(config: RunConfig, num_processes: int) -> tuple[LlamaConfig | None, list[str]]:
    """(shape of the model, problems): of everything but data and folders."""
    problems = (batch_problems(config, num_processes) + precision_problems(config)
                + in_backward_problems(config, num_processes))
    try:
        shape = model_config(config)
        if config.head_in_blocks and shape.tie_word_embeddings:
            problems.append("head_in_blocks=true with tie_word_embeddings=true: the embedding adds to the same gradient later; "
                            "set one of them to false")
        return shape, problems
    except BadInput as error:
        return None, problems + str(error).splitlines()


def batch_problems(config: RunConfig, num_processes: int) -> list[str]:
    """Sizes of batches that do not divide."""
    rows = config.global_batch_size
    if rows % num_processes:
        return [f"global_batch_size={rows}: not a multiple of the {num_processes} processes; change one of them"]
    share = rows // num_processes
    if config.micro_batch_size != "auto" and share % int(config.micro_batch_size):
        fitting = [size for size in range(1, share + 1) if share % size == 0]
        nearest = min(fitting, key=lambda size: abs(size - int(config.micro_batch_size)))
        return [f"micro_batch_size={config.micro_batch_size}: does not divide the {share} rows an update has on each of "
                f"{num_processes} processes (global_batch_size={rows}); set micro_batch_size={nearest}"]
    return []


def is_sharded() -> bool:
    """Whether Accelerate shards parameters over the processes."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def hub_problems(config: RunConfig) -> list[str]:
    """Options of hub data sets, where none is read."""
    if any(source.kind == "hub" for source in find_sources(config)[0]) or source_problems(config):
        return []
    return [f"{name}={getattr(config, name)} with dataset={' '.join(config.dataset)}: only hub data sets have it; leave it out"
            for name in ("dataset_config", "dataset_split") if getattr(config, name) != getattr(RunConfig(), name)]


def save_problems(config: RunConfig) -> list[str]:
    """A background save that processes cannot make each for itself."""
    if config.save_async and is_sharded():
        return ["save_async=true with FSDP: all processes write their shards together, while they may not train; set "
                "save_async=false"]
    return []


def in_backward_problems(config: RunConfig, num_processes: int) -> list[str]:
    """What an update within the backward does not go together with (beside clipping, which `config_problems` refuses)."""
    if not config.optimizer_in_backward:
        return []
    int8 = config.param_dtype == "int8"
    remedy, found = "or param_dtype=bfloat16 and optimizer_in_backward=false" if int8 else "or optimizer_in_backward=false", []
    share = config.global_batch_size // num_processes
    # FSDP2 averages a gradient before its hook runs, DistributedDataParallel after
    if num_processes > 1 and int8:
        found.append(f"param_dtype=int8 on {num_processes} processes: a weight would be updated before gradients are averaged, "
                     "and is not sharded; start one process, or set param_dtype=bfloat16")
    elif num_processes > 1 and not is_sharded():
        found.append(f"optimizer_in_backward=true on {num_processes} processes with DistributedDataParallel: a parameter would "
                     f"be updated before its gradients are averaged; start one process, {remedy}")
    elif config.micro_batch_size not in ("auto", share):
        found.append(f"optimizer_in_backward=true needs one micro-batch per update, got "
                     f"{share // int(config.micro_batch_size)}; set micro_batch_size={share}, {remedy}")
    if num_processes > 1 and is_sharded() and config.head_in_blocks:
        found.append(f"head_in_blocks=true on {num_processes} processes: each holds a part of the rows only; set "
                     "head_in_blocks=false")
    if launch_precision(config) == "fp16":
        found.append("optimizer_in_backward=true with mixed_precision=fp16: the scaler looks at all gradients first; "
                     f"set mixed_precision=bf16, {remedy}")
    return found


def precision_problems(config: RunConfig) -> list[str]:
    """Precision that this machine cannot train in, or that would silently be another one."""
    precision, found = launch_precision(config), []
    if config.param_dtype == "float16":
        reason = ("its scaler cannot unscale float16 gradients" if precision == "fp16" else
                  "updates and AdamW's epsilon underflow in it")
        found.append(f"param_dtype=float16 with mixed_precision={precision}: {reason}; set param_dtype=float32, or bfloat16 "
                     "with mixed_precision=no")
    elif config.param_dtype != "float32" and precision != "no":
        found.append(f"param_dtype={config.param_dtype} with mixed_precision={precision}: autocast needs float32 weights; "
                     "set mixed_precision=no or param_dtype=float32")
    if precision in ("fp16", "fp8"):
        import torch

        device = "cpu" if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") else (
            "cuda" if torch.cuda.is_available() else "cpu")
        if precision == "fp16" and device == "cpu":
            found.append("mixed_precision=fp16: a CPU would train in float32 without a gradient scaler; use a GPU, or set "
                         "mixed_precision=bf16")
        if precision == "fp8":
            import importlib.util

            if device == "cpu" or torch.cuda.get_device_capability() < (8, 9):
                found.append("mixed_precision=fp8: needs a GPU that multiplies fp8 (compute capability 8.9 or higher); set "
                             "mixed_precision=bf16")
            elif importlib.util.find_spec("torchao") is None:
                found.append("mixed_precision=fp8: torchao is not installed; run pip install 'memtrain[fp8]'")
    return found


def tracker_problems(config: RunConfig) -> list[str]:
    """A tracker that is not known or not installed: Accelerate would go on without it."""
    if config.report_to is None:
        return []
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import LoggerType

    known = sorted(kind.value for kind in LoggerType if kind is not LoggerType.ALL)
    if config.report_to not in known:
        return [f"report_to={config.report_to}: want one of {', '.join(known)}; change it or leave it out"]
    if config.report_to not in {str(getattr(kind, "value", kind)) for kind in get_available_trackers()}:
        return [f"report_to={config.report_to}: its package is not installed; install it, or leave report_to out"]
    return []


def output_problems(config: RunConfig) -> list[str]:
    """An output folder that cannot be written, or that holds something which is no run."""
    path = Path(config.output_dir).expanduser()
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [f"output_dir={path}: {existing} is a file; choose a folder"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"output_dir={path}: no permission to write in {existing}; choose another folder"]
    if not path.exists() or {entry.name for entry in path.iterdir()} <= FIRST_FILES:
        return []
    try:
        before = read_recipe(str(path / "config.yaml")) if (path / "config.yaml").exists() else {}
    except BadInput as error:
        return [f"{error}; or choose another output_dir"]
    if "output_dir" not in before:
        return [f"output_dir={path}: holds files but no run (no config.yaml of one); choose another folder"]
    if not ((path / "checkpoints").exists() or (path / "metrics.jsonl").exists()):
        return []
    now = replace(config, mixed_precision=launch_precision(config))
    return [f"{name}={getattr(now, name)}: {path} holds a run with {name}={before[name]}; set that, or another output_dir"
            for name in changed_options(before, now)]
