"""Text from a checkpoint, a run's folder or an exported folder.

usage: python scripts/generate.py PATH --prompt TEXT [--max_new_tokens N] [--temperature T] [--top_k K] [--seed S]

  --prompt           text to go on from (default: none, the start of a document)
  --max_new_tokens   tokens to add (default 100)
  --temperature      0 takes the likeliest token; higher is more varied (default 0.8)
  --top_k            draw among the K likeliest tokens only (default: all)
  --seed             the same seed gives the same text (default 0)
"""

from __future__ import annotations

from memtrain.command import at_least, run_script, script_arguments


def main(arguments: list[str]) -> int:
    (path,), options = script_arguments(arguments, __doc__ or "", ["PATH"], prompt=str, max_new_tokens=at_least(int, 1),
                                        temperature=at_least(float, 0), top_k=at_least(int, 1),
                                        seed=at_least(int, 0, below=2**63))
    import torch

    from memtrain.model.generate import generate
    from memtrain.training.checkpoint import open_model

    opened = open_model(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompt_ids = opened.prompt_ids(options.get("prompt", ""))
    new_ids = generate(opened.model.to(device), prompt_ids, options.get("max_new_tokens", 100),
                       temperature=options.get("temperature", 0.8), top_k=options.get("top_k"), seed=options.get("seed", 0),
                       end_id=opened.tokenizer.eos_token_id)
    print(opened.tokenizer.decode(prompt_ids + new_ids, skip_special_tokens=True))
    return 0


if __name__ == "__main__":
    run_script(main)
