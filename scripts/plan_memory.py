"""What fits a memory budget, part by part, before anything is run. Needs no GPU.

    python scripts/plan_memory.py [RECIPE.yaml] [--memory_budget 12GB] [--key value ...] [--json FILE] [--plot FILE.png]

Takes the options of pretrain.py, and tries others that give the same result at the same global batch: micro-batches with
accumulation, gradient checkpointing, chunks of the loss, and on a GPU offload. --allow rounding,optimizer also tries what
changes the result. Prints the ranked recipes, the bill of the chosen one, its command and YAML. Where nothing fits: the
smallest recipe there is, what it lacks, and exit code 2.

  --maximize WHAT   instead: the largest micro_batch_size, seq_len, layers or model under the budget, recipe by recipe
  --rows N          recipes shown around the chosen one (default 20)
  --json FILE       the same as strict JSON: predicted, plan (ranked), command
  --plot FILE.png   bytes by part and phase
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from memtrain.command import BadInput, check_writable, run_script, write_json
from memtrain.config import load_config
from memtrain.options import parse_bytes

OWN_OPTIONS = ("json", "plot", "maximize", "rows")
ROWS = "20"
QUANTITIES = ("micro_batch_size", "seq_len", "layers", "model")


def take_own(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """(the arguments of pretrain.py, the options that only this script has). Raises BadInput."""
    rest, own = [], {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in OWN_OPTIONS:
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value or value.startswith("--"):
            raise BadInput(f"--{name}: no value; write --{name} VALUE")
        own[name] = value
    if own.get("maximize", QUANTITIES[0]) not in QUANTITIES:
        raise BadInput(f"--maximize {own['maximize']}: want one of {', '.join(QUANTITIES)}; change it")
    if not own.get("rows", ROWS).isdecimal() or int(own.get("rows", ROWS)) < 1:
        raise BadInput(f"--rows {own['rows']}: want a whole number above 0; change it")
    return rest, own


def main(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print((__doc__ or "").strip())
        return 0
    rest, own = take_own(arguments)
    config = load_config(rest)
    for name in ("json", "plot"):
        if name in own:
            check_writable(Path(own[name]))

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would announce itself on stderr
    from memtrain.memory.device import device_type, free_bytes, process_bytes, smallest_run, start_real_run
    from memtrain.memory.maximize import maximize
    from memtrain.memory.planner import plan, planned
    from memtrain.memory.report import bill, changed, command, plot, ranked, size, table, yaml_text

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    config, shape = planned(config, processes)
    budget = parse_bytes(config.memory_budget) if config.memory_budget is not None else free_bytes()
    if config.memory_budget is None:
        print(f"no --memory_budget: for the {size(budget)} that are free on this {device_type()} now")
    content: dict[str, Any]
    if "maximize" in own:
        found = maximize(own["maximize"], config, shape, budget, config.allow)
        of = "" if own["maximize"] in ("layers", "model") else f", {shape.parameter_count / 1e6:.1f}M parameters"
        print(f"the largest {own['maximize']} under {size(budget)}{of}:")
        print(table([["recipe", "largest", "peak"],
                     *([most.recipe, str(most.value or "none"), size(most.peak_bytes)] for most in found)], [0]))
        content = {"budget_bytes": budget, "maximize": own["maximize"],
                   "found": [{"recipe": most.recipe, "changes": most.changes, "value": most.value,
                              "peak_bytes": most.peak_bytes} for most in found]}
        if "json" in own:
            write_json(Path(own["json"]), content)
        return 0 if any(most.value for most in found) else 2
    child = start_real_run(smallest_run(config)) if os.path.exists("/proc/self/status") else None  # beside the planning
    result = plan(config, shape, budget, config.allow, processes, say=print)
    print(ranked(result, int(own.get("rows", ROWS))))
    prediction = result.prediction
    if result.device == "cpu" and child is not None:
        prediction.apart["process"] = process_bytes(child, prediction.peak_bytes)
    heading = "chosen" if result.fits else "the smallest there is"
    print(f"\n{heading}: {changed(result.chosen.changes)}\n{bill(prediction)}")
    print("\n".join(f"note: {note}" for note in result.notes))
    print(f"\n{command(result.config)}\n\n{yaml_text(result.config)}")
    if "json" in own:
        write_json(Path(own["json"]), {
            "predicted": prediction.as_json(), "plan": result.as_json(), "command": command(result.config),
            "budget_bytes": budget, "fits": result.fits, "lacking_bytes": result.lacking_bytes})
    if "plot" in own:
        plot({"predicted": prediction}, Path(own["plot"]), budget)
    if not result.fits:
        raise BadInput(f"memory_budget={size(budget)}: nothing fits; the smallest recipe takes "
                       f"{size(prediction.peak_bytes)} and lacks {size(result.lacking_bytes)}; raise the budget, lower seq_len "
                       "or the size of the model" + ("" if config.allow else ", or set --allow rounding,optimizer"))
    return 0


if __name__ == "__main__":
    run_script(main)
