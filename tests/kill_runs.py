"""Kill a training run at random moments, over and over until it ends; it must end as the run that nothing stopped.

    python tests/kill_runs.py [--kills 20] [--processes 1] [--signal KILL|TERM|INT] [--save_async] [--damage] [--file_limit]
                              [--workers 0] [--updates 30] [--seed 0]

A parent that has imported everything (and computed nothing) forks the processes of a real run, with a checkpoint after every
update. After the last of its kills the run is let through, and compared with an unbroken one: every file of the last
checkpoint, metrics, export, and the rows taken at each position. Runs follow one another until so many kills are made.

--damage      now and then a file of the newest checkpoint is cut, emptied, zeroed, exchanged or deleted before the next start
--file_limit  now and then a start may not write large files (RLIMIT_FSIZE), as on a full disk: it must leave with exit code 3
Exit code 1, with what differs, when anything is not as it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true",
               "TRANSFORMERS_VERBOSITY": "error", "PYTHONHASHSEED": "0"}
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from jobs import Job, checkpoint, differences, load_script, ranks, rows, unwatched  # noqa: E402 (after the environment is set)

LONGEST_SECONDS = 120.0


def child(script: Any, arguments: list[str], rank: dict[str, str], folder: Path, limit_bytes: int | None) -> None:
    """One process of a run, to its end. Never returns."""
    from memtrain.command import run_script
    from memtrain.data import order

    code = 1
    try:
        log = os.open(folder / f"log.{rank.get('RANK', 0)}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        samples = os.open(folder / "samples", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        original = order.row_index

        def row_index(position: int, row_count: int, seed: int) -> int:
            row = original(position, row_count, seed)
            if rank.get("RANK", "0") == "0":
                os.write(samples, f"{position} {row}\n".encode())
            return row

        order.row_index = row_index
        os.environ |= rank
        sys.argv = ["pretrain.py", *arguments]
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
        try:
            with unwatched():  # a prediction would outlive each kill by seconds
                run_script(script.main)
        except SystemExit as end:
            code = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        if not (folder.parent / "modules").exists():
            (folder.parent / "modules").write_text("\n".join(sys.modules))
        os._exit(code)


class Harness:
    """Runs of one job, and how often what happened to them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.draw = random.Random(options.seed)
        self.script = load_script("pretrain")
        self.job = Job(folder / "job", folder / "cache")
        self.counts = dict.fromkeys(("kills", "while_saving", "before_training", "damaged", "disk_full", "starts", "runs"), 0)
        self.problems: list[str] = []

    def arguments(self, run: Path) -> list[str]:
        words = self.job.arguments(run / "run", max_steps=self.options.updates, save_every=1, keep_last=3, eval_every=7,
                                   micro_batch_size=2, attention_dropout=0.1, num_workers=self.options.workers)
        return [*words, "--save_async"] if self.options.save_async else words

    def start(self, run: Path, limit_bytes: int | None = None) -> list[int]:
        run.mkdir(exist_ok=True)
        self.counts["starts"] += 1
        pids = []
        for rank in ranks(self.options.processes):
            pid = os.fork()
            if pid == 0:
                child(self.script, self.arguments(run), rank, run, limit_bytes)
            pids.append(pid)
        return pids

    def wait(self, pids: list[int]) -> list[int]:
        """Exit codes, negative for a signal. Whoever outlives the first that ended for long is a problem."""
        codes: dict[int, int] = {}
        end = time.monotonic() + LONGEST_SECONDS
        while len(codes) < len(pids):
            for pid in set(pids) - set(codes):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                self.problems.append("a process hangs")
                for pid in set(pids) - set(codes):
                    os.kill(pid, signal.SIGKILL)
                end += LONGEST_SECONDS
            time.sleep(0.002)
        return [codes[pid] for pid in pids]

    def unbroken(self) -> Path:
        """The run that nothing stops, and how long starting and training take."""
        run = self.folder / "whole"
        for part in ("first", "whole"):  # the first fills the cache of tokens
            run = self.folder / part
            begin = time.monotonic()
            pids = self.start(run)
            first_row = run / "run" / "metrics.jsonl"
            while not first_row.exists() and time.monotonic() < begin + LONGEST_SECONDS:
                time.sleep(0.002)
            self.start_seconds = time.monotonic() - begin
            codes = self.wait(pids)
            self.train_seconds = time.monotonic() - begin - self.start_seconds
            assert codes == [0] * len(pids), (run / "log.0").read_text()
            if part == "first":  # what a run imports on its way, imported here once for all of them
                for name in (self.folder / "modules").read_text().split():
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
        return run

    def broken(self, number: int) -> Path:
        """A run that is stopped again and again, until it gets through."""
        from memtrain.training.checkpoint_files import checkpoint_problem, step_folders

        run = self.folder / f"broken-{number}"
        saved = run / "run" / "checkpoints"
        self.counts["runs"] += 1
        damaged = False
        while True:
            whole = [path for path in step_folders(saved) if checkpoint_problem(path, contents=True) is None]
            limit = None
            if self.options.file_limit and whole and self.draw.random() < 0.3:
                limit = self.draw.choice((20_000, 100_000, 160_000))
            pids = self.start(run, limit)
            kill = self.counts["kills"] < self.options.kills
            if kill and limit is None:
                time.sleep(self.draw.uniform(0, self.start_seconds + self.train_seconds * 0.35))
                self.kill(pids)
                saving = bool(list(saved.glob(".partial-*")))
            codes = self.wait(pids)
            if kill and limit is None and set(codes) != {0}:  # it was not at its end before
                self.counts["kills"] += 1
                self.counts["while_saving"] += saving
            log = "".join(path.read_text(errors="replace") for path in run.glob("log.*"))
            self.check(codes, log, whole, damaged, kill, limit)
            if codes == [0] * len(codes):
                return run
            damaged = self.options.damage and self.draw.random() < 0.5 and self.damage(saved)
            bad = [f"{path.name}: {checkpoint_problem(path)}" for path in step_folders(saved) if checkpoint_problem(path)]
            if bad and not self.options.damage:
                self.problems.append(f"not whole after a kill: {bad}")
            if len(self.problems) > 5:
                return run

    def kill(self, pids: list[int]) -> None:
        number = signal.Signals[f"SIG{self.options.signal}"]
        for pid in self.draw.sample(pids, len(pids)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            if len(pids) > 1:
                time.sleep(self.draw.choice((0.0, 0.0, 0.02)))

    def check(self, codes: list[int], log: str, whole: list[Path], damaged: bool, kill: bool, limit: int | None) -> None:
        """What one start may end with, and what it must have gone on from."""
        self.counts["before_training"] += kill and "going on from" not in log and bool(whole)
        number = signal.Signals[f"SIG{self.options.signal}"]
        allowed = {0, -number, 128 + number} if kill and limit is None else {3, 0} if limit is not None else {0}
        if limit is not None:
            self.counts["disk_full"] += 3 in codes
            if 3 in codes and "could not be written" not in log:
                self.problems.append(f"a full disk without its message: {log[-500:]}")
        # the partner of a process that died of the signal at once (of SIGTERM, before training listens for it) ends as it may
        partner = kill and len(codes) > 1 and (number == signal.SIGKILL or -number in codes)
        # a loader process whose training process is gone says that it cannot reach it
        loader = kill and self.options.workers and number == signal.SIGKILL
        if not partner and (not set(codes) <= allowed or ("Traceback" in log and not loader)):
            self.problems.append(f"exit codes {codes}, allowed {allowed}: {log[-3000:]}")
        if "going on from" in log and (not whole or f"going on from {whole[-1]}:" not in log):
            self.problems.append(f"a bad load: {log[-500:]}; whole were {[path.name for path in whole]}")
        if damaged and "going on from" in log and "ignored" not in log:
            self.problems.append(f"passed over without a word: {log[-500:]}")

    def damage(self, saved: Path) -> bool:
        """Do something to the newest checkpoint, if an older one is whole."""
        from memtrain.training.checkpoint_files import checkpoint_problem, step_folders

        whole = [path for path in step_folders(saved) if checkpoint_problem(path, contents=True) is None]
        if len(whole) < 3:
            return False
        self.counts["damaged"] += 1
        newest = whole[-1]
        file = self.draw.choice([path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size])
        how = self.draw.choice(("cut", "empty", "zero", "delete", "exchange", "empty folder"))
        if how == "cut":
            os.truncate(file, file.stat().st_size // 2)
        elif how == "empty":
            os.truncate(file, 0)
        elif how == "zero":
            file.write_bytes(bytes(file.stat().st_size))
        elif how == "delete":
            file.unlink()
        elif how == "exchange":
            name = self.draw.choice(("model.safetensors", "optimizer.bin", "random_states_0.pkl", "run_state.json"))
            shutil.copyfile(whole[-2] / name, newest / name)
        else:
            shutil.rmtree(newest)
            newest.mkdir()
        return True

    def compare(self, whole: Path, run: Path) -> None:
        """Every file of the last checkpoint, the export, the metrics, and the rows at each position."""
        step = self.options.updates
        left, right = checkpoint(whole / "run", step), checkpoint(run / "run", step)
        names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in (left, right)]
        found = differences(*names, "files")
        for name in names[0]:
            if not name.endswith("run_state.json") and (left / name).is_file() and (right / name).is_file():
                found += [] if (left / name).read_bytes() == (right / name).read_bytes() else [f"{name} differs"]
        states = [json.loads((folder / "run_state.json").read_text())["progress"] for folder in (left, right)]
        found += differences(*[{k: state[k] for k in ("step", "position", "tokens")} for state in states], "progress")
        found += differences(rows(whole / "run"), rows(run / "run"), "metrics")
        exports = [(folder / "run" / "export" / "model.safetensors").read_bytes() for folder in (whole, run)]
        found += [] if exports[0] == exports[1] else ["the export differs"]
        if self.options.workers == 0:
            taken = [set((folder / "samples").read_text().split("\n")) for folder in (whole, run)]
            found += [] if taken[0] == taken[1] else [f"other samples: {sorted(taken[0] ^ taken[1])[:5]}"]
        self.problems += [f"{run.name}: {line}" for line in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("kills", 20), ("processes", 1), ("workers", 0), ("updates", 30), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--signal", choices=("KILL", "TERM", "INT"), default="KILL")
    for name in ("save_async", "damage", "file_limit"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        harness = Harness(options, Path(name))
        whole = harness.unbroken()
        while harness.counts["kills"] < options.kills and len(harness.problems) <= 5:
            run = harness.broken(harness.counts["runs"])
            if not harness.problems:
                harness.compare(whole, run)
            shutil.rmtree(run)
    result = {**vars(options), **harness.counts, "problems": len(harness.problems), "seconds": round(time.monotonic() - begin)}
    print(json.dumps(result))
    for problem in harness.problems:
        print(problem, file=sys.stderr)
    return 1 if harness.problems else 0


if __name__ == "__main__":
    sys.exit(main())
