"""Loss, perplexity and bits per byte of a checkpoint, a run's folder or an exported folder.

usage: python scripts/evaluate.py PATH [--dataset NAME ...] [--json FILE] [--key value ...]

Without --dataset: the documents that the model's run held out. With it: every document of that dataset. The data options of
pretrain.py (seq_len, packing, text_column, ...), micro_batch_size and mixed_precision may be given too; those of the run are
the default. Also runs on several processes, with the same figures.

  --json FILE   write the figures as strict JSON
"""

from __future__ import annotations

from pathlib import Path

from memtrain.command import BadInput, Option, check_writable, read_arguments, run_script, write_json
from memtrain.config import make_config, option_kinds
from memtrain.options import EVALUATION_OPTIONS

DEFAULTS = {"max_steps": 1, "micro_batch_size": 8}


def main(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print((__doc__ or "").strip())
        return 0
    words, given, problems = read_arguments(arguments, {**option_kinds(EVALUATION_OPTIONS), "json": Option()})
    if len(words) != 1:
        problems.append(f"{len(words)} paths: want one: a checkpoint, a run's folder, or a Llama folder of transformers; see "
                        "--help")
    json_path = Path(given.pop("json")) if "json" in given else None
    make_config(DEFAULTS, given, problems=problems)
    if json_path is not None:
        check_writable(json_path)

    from memtrain.training.checkpoint import open_model
    from memtrain.training.finish import evaluate_text
    from memtrain.training.step import make_accelerator

    opened = open_model(words[0])
    if opened.options is None and "dataset" not in given:
        raise BadInput(f"{words[0]}: nothing says which text was held out for it; set --dataset")
    config = make_config(DEFAULTS, opened.options or {}, {"micro_batch_size": DEFAULTS["micro_batch_size"]}, given)
    accelerator = make_accelerator(config)
    metrics = evaluate_text(opened, config, accelerator, held_out="dataset" not in given)
    accelerator.print("\n".join(f"{name:<22}{value:.6g}" for name, value in metrics.items()))
    if json_path is not None and accelerator.is_main_process:
        write_json(json_path, metrics)
    return 0


if __name__ == "__main__":
    run_script(main)
