"""Memory, speed, FLOPs and loss beside a plain transformers loop, measured in one run on this machine.

usage: python scripts/benchmark.py [step | ladder | head | optimizer | save | plan | int8 | quality] [--shape tiny|small|58m]
                                   [--repeats N] [--updates N] [--seeds N] [--json FILE] [--plot FILE.png]

  step     our training step and transformers' at equal settings, interleaved: ratios of time and of peak tensor bytes
  ladder   each saver added in turn to the same model (the table of the README); every recipe in a process of its own
  head     the loss head alone: ours, the plain path, and torch's linear_cross_entropy
  optimizer  ours beside those of torch, torchao and bitsandbytes (if installed): state, speed, exact resume
  save     how long training waits for a checkpoint, written at once and behind it (--save_async)
  plan     seconds and process bytes of one prediction and of one plan, for 8 billion parameters and 4096 tokens
  int8     a step with int8 weights beside one with bfloat16 weights that nothing updates
  quality  loss of a 2.6M model on the default corpus with int8 weights, and with float32 AdamW (hours at the defaults)

  --shape    tiny (5.4M), small (179M), 58m (58.1M); default: tiny for step, small for save, else 58m
  --repeats  rounds of timing, of which the median is shown (default 5)
  --updates, --seeds  quality only: length of a run (default 1000), runs at the best learning rate of three (default 3)
  --plot     ladder only: a picture of the peaks (needs matplotlib)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memtrain.command import BadInput, at_least, check_writable, one_of, run_script, script_arguments, write_json


def main(arguments: list[str]) -> int:
    words = arguments if arguments and not arguments[0].startswith("--") else ["step", *arguments]
    (kind,), options = script_arguments(words, __doc__ or "", ["step, ladder, head, optimizer, save, plan, int8 or quality"],
                                        shape=one_of("tiny", "small", "58m"), repeats=at_least(int, 1),
                                        updates=at_least(int, 1), seeds=at_least(int, 1), json=Path, plot=Path)
    if kind not in ("step", "ladder", "head", "optimizer", "save", "plan", "int8", "quality"):
        raise BadInput(f"{kind}: want step, ladder, head, optimizer, save, plan, int8 or quality; see --help")
    for name in ("json", "plot"):
        if name in options:
            check_writable(options[name])
    if "plot" in options and kind != "ladder":
        raise BadInput("--plot: only the ladder is drawn; leave it out")

    content: dict[str, Any] = {}
    repeats = options.get("repeats", 5)
    if kind == "plan":
        from memtrain.memory.cost import BIG, planning_cost

        content["shape"], rows = BIG["model"], planning_cost()
        text = "\n".join(f"{row['work']}, {row['recipes']} recipe(s): {row['seconds']:.1f} s, "
                         f"{row['process_bytes'] / 1e6:,.0f} MB of its process" for row in rows)
    elif kind == "int8":
        from memtrain.memory.int8_benchmark import format_int8, run_int8

        rows = run_int8(repeats)
        text = format_int8(rows)
    elif kind == "quality":
        from memtrain.memory.quality_benchmark import format_quality, run_quality

        rows = run_quality(options.get("updates", 1000), options.get("seeds", 3))
        text = format_quality(rows)
    elif kind == "optimizer":
        from memtrain.memory.optimizer_benchmark import format_optimizers, run_optimizers

        rows = run_optimizers(repeats)
        text = format_optimizers(rows)
    else:
        from memtrain.memory import benchmark
        from memtrain.memory.save_benchmark import format_save, run_save

        shape = content["shape"] = options.get("shape", {"step": "tiny", "save": "small"}.get(kind, "58m"))
        run = {"step": benchmark.run_pairs, "ladder": benchmark.run_ladder, "head": benchmark.run_head, "save": run_save}[kind]
        rows = run(shape, repeats)
        text = format_save(rows) if kind == "save" else benchmark.format_rows(kind, rows)
    print(text)
    if "json" in options:
        write_json(options["json"], {**content, "rows": rows})
    if "plot" in options:
        benchmark.plot_ladder(shape, rows, options["plot"])
    return 0


if __name__ == "__main__":
    run_script(main)
