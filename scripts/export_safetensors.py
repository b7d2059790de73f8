"""A checkpoint (or a run's folder: its newest) as a folder that transformers loads.

usage: python scripts/export_safetensors.py CHECKPOINT OUT [--dtype float32|bfloat16|float16] [--max_shard_size 5GB]

  --dtype            dtype of the weights (default float32; of an int8 run bfloat16)
  --max_shard_size   split model.safetensors above this size (default 5GB)
"""

from __future__ import annotations

from pathlib import Path

from memtrain.command import BadInput, one_of, run_script, script_arguments


def main(arguments: list[str]) -> int:
    (source, out), options = script_arguments(arguments, __doc__ or "", ["CHECKPOINT", "OUT"], max_shard_size=str,
                                              dtype=one_of("float32", "bfloat16", "float16"))
    from memtrain.model.huggingface import check_export_folder, check_shard_size, export
    from memtrain.training.checkpoint import WRITE_ERRORS, open_model

    check_shard_size(options.get("max_shard_size", "5GB"))
    check_export_folder(Path(out))
    opened = open_model(source)
    try:
        export(opened.model.state_dict(), opened.model.config, opened.tokenizer, Path(out), **options)
    except WRITE_ERRORS as error:
        raise BadInput(f"{out}: could not be written ({' '.join(str(error).split())[:200]}); free some space, or choose "
                       "another folder") from error
    print(f"{opened.path} exported to {out}")
    return 0


if __name__ == "__main__":
    run_script(main)
