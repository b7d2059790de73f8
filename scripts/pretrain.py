"""Train a Llama from scratch, or on from a Hugging Face folder.

    accelerate launch [--config_file accelerate_configs/X.yaml] scripts/pretrain.py [RECIPE.yaml] [--key value ...]

RECIPE.yaml is a file or the name of one in memtrain/recipes; without it, tiny. The same command again goes on where the run
stopped.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrain.command import run_script
from memtrain.config import help_text, load_config, save_config
from memtrain.options import RunConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

    from memtrain.model.presets import LlamaConfig


def main(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(help_text(__doc__ or ""))
        return 0
    config = load_config(arguments)

    # imported here and below, so that --help and a mistyped option answer at once
    from memtrain.training.out_of_memory import recipe, with_restarts

    if config.memory_budget is not None:
        from memtrain.memory.planner import fit_run

        config = fit_run(config, int(os.environ.get("WORLD_SIZE", "1")), print)
    asked = recipe(config)
    return with_restarts(lambda: pretrain(config, asked, arguments), print)


def pretrain(config: RunConfig, asked: dict[str, Any], arguments: list[str]) -> int:
    """The run that `config` is, from its newest checkpoint or the seed. asked: the recipe before memory ran out, if it did."""
    from memtrain.memory.host import check_host_memory
    from memtrain.training.check import check_run
    from memtrain.training.run_lock import run_lock
    from memtrain.training.step import make_accelerator

    # what can be wrong is found before anything is touched
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    shape = check_run(config, num_processes)
    check_host_memory(config, shape, num_processes)
    accelerator = make_accelerator(config)
    config.mixed_precision = accelerator.mixed_precision
    with run_lock(Path(config.output_dir).expanduser(), accelerator, print):
        return train(config, shape, accelerator, asked, arguments)


def train(config: RunConfig, shape: LlamaConfig, accelerator: Accelerator, asked: dict[str, Any], arguments: list[str]) -> int:
    """The run, from its data to its export, in a folder that it has for itself; returns the exit code."""
    from tqdm import tqdm

    from memtrain.data.prepare import prepare
    from memtrain.memory.cap import enforced_budget
    from memtrain.memory.device import give_back_freed_memory
    from memtrain.memory.watch import MemoryWatch
    from memtrain.model.presets import weights_tokenizer
    from memtrain.training import checkpoint as checkpoints
    from memtrain.training.agreement import Agreement
    from memtrain.training.checkpoint_files import stop_when_refused
    from memtrain.training.disk import check_disk
    from memtrain.training.finish import finish
    from memtrain.training.metrics import TrainLog
    from memtrain.training.out_of_memory import Retry, end_together
    from memtrain.training.saver import Saver
    from memtrain.training.signals import StopSignal, command_to_go_on
    from memtrain.training.step import build, on_main_first, samples_in_run, total_steps, training_updates

    say = accelerator.print
    data = on_main_first(accelerator, lambda: prepare(config, shape.vocab_size, weights_tokenizer(config.model)))
    give_back_freed_memory()  # a tokenizer's training leaves 84 MB of it
    steps = total_steps(config, data.row_count, accelerator.num_processes)
    output = Path(config.output_dir).expanduser()
    checkpoint, run = checkpoints.choose_checkpoint(config, shape, data.fingerprint, accelerator)
    if run is None:
        run = checkpoints.new_run_state(config, shape, data, accelerator.num_processes)
    elif fitted := checkpoints.keep_fitted(config, asked, run, accelerator.num_processes):
        say(f"{checkpoint}: as memory ran out before it, going on with {fitted}")
    progress = run.progress
    samples = samples_in_run(config, data.row_count)
    ended = progress.step >= steps or (samples is not None and progress.position >= samples)
    if ended and (output / "export" / "config.json").exists():
        say(f"{output}: nothing left to do, all {progress.step} updates are made; the model is in {output / 'export'}")
        return 0

    log = TrainLog(output / "metrics.jsonl", accelerator)
    if config.report_to is not None:
        accelerator.init_trackers("memtrain", {name: str(value) for name, value in asdict(config).items()})
    say(f"{config.model}: {shape.parameter_count / 1e6:.1f}M parameters; {data.report.documents:,} documents; {steps} updates "
        f"of {config.global_batch_size} x {config.seq_len} tokens on {accelerator.num_processes} x {accelerator.device.type}, "
        f"mixed_precision={accelerator.mixed_precision}")
    with (end_together(accelerator, output), MemoryWatch(config, shape, accelerator, output, say) as memory,
          enforced_budget(config)):
        state = memory.build(lambda: build(config, shape, accelerator, steps, checkpoint is None))
        on_main_first(accelerator, lambda: check_disk(state, output, config.keep_last))
        if checkpoint is not None:
            with memory.phase("load", state):
                checkpoints.load_checkpoint(state, checkpoint, run, say)
            say(f"going on from {checkpoint}: update {progress.step} of {steps}")
            for note in checkpoints.resume_notes(run, config, accelerator.num_processes):
                say(note)
        if accelerator.is_main_process:
            with stop_when_refused(output, output / "checkpoints"):
                output.mkdir(parents=True, exist_ok=True)
                save_config(config, output / "config.yaml")
                log.keep_until(progress.step)
        run = checkpoints.new_run_state(config, shape, data, accelerator.num_processes, progress)
        run.asked = asked
        saved_step = progress.step if checkpoint is not None else None
        agreement = Agreement(accelerator)
        saver = Saver(state, run, data.tokenizer, output / "checkpoints", config, agreement)

        def due(every: int | None) -> bool:
            return every is not None and progress.step % every == 0

        def evaluate() -> None:
            log.flush(progress)
            metrics = retry.evaluate(lambda config: memory.evaluate(state, data, config))
            log.write_evaluation(progress.step, metrics)
            run.evaluated = None if metrics is None else (progress.step, metrics["eval_loss"])

        def save(behind: bool = False) -> int:
            log.sync(progress)  # raises on a non-finite number, so that no bad weights are saved
            with memory.phase("save", state):
                saver.save(behind)
            config.resume = "auto"  # from now on
            return progress.step

        def recipe_changed(line: str) -> None:
            say(f"\n{line}")
            run.config = asdict(config)
            with stop_when_refused(output / "config.yaml", output / "checkpoints"):
                save_config(config, output / "config.yaml")
            memory.recipe_changed()

        retry = Retry(state, config, shape, progress,
                      lambda: training_updates(config, data, progress.position, accelerator), recipe_changed, say)
        bar = tqdm(total=steps, initial=progress.step, unit="update", disable=not accelerator.is_main_process)
        log.start_clock()
        with StopSignal(agreement) as stop, saver, bar:
            for update in retry.updates() if not ended else ():
                learning_rate = state.learning_rate
                result = retry.step(memory.train_step, update)
                if result is None:  # out of memory: the same samples come again, in a smaller recipe
                    continue
                progress.position = update.end_position
                if not result.applied:  # an overflow under the scaler: samples were taken, no update was made
                    log.check_scale()
                    continue
                progress.step += 1
                progress.tokens += result.target_count
                log.add(progress, result, learning_rate)
                bar.update()
                if progress.step == steps:
                    break
                if due(config.log_every):
                    bar.set_postfix_str(log.flush(progress))
                if due(config.eval_every):
                    evaluate()
                if due(config.save_every):
                    saved_step = save(behind=True)
                saver.check()
                if stop.requested():
                    if saved_step != progress.step:
                        save()
                    saver.wait()
                    memory.finish(wait=False)
                    say(f"\nstopped at update {progress.step} of {steps} and saved; to go on:\n"
                        f"  {command_to_go_on(arguments, config.resume)}")
                    return stop.exit_code
            bar.set_postfix_str(log.flush(progress))
            if saved_step != progress.step:
                evaluate()
                save()
        finish(state, shape, data, output / "export", say)
    if accelerator.trackers:
        accelerator.end_training()
    return 0


if __name__ == "__main__":
    run_script(main)
