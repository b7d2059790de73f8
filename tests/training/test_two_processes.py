"""The same result on one and on two real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import (
    ROOT,
    Job,
    Outcome,
    assert_same_run,
    checkpoint,
    checkpoint_contents,
    differences,
    end_all,
    environment,
    ranks,
    rows,
    run_main,
    stopped_after,
)

CURVE = {"max_steps": 20, "save_every": 10, "keep_last": 9}
DROPOUT = {**CURVE, "attention_dropout": 0.1, "micro_batch_size": 2, "mixed_precision": "bf16"}
PADDED = {"packing": "padded", "eval_fraction": 0, "epochs": 1, "max_steps": None, "global_batch_size": 2}
BATCHES = (1, 2, 4, 5)


def documents(path: Path, count: int) -> Path:
    """So many different documents, each of less than a row."""
    path.write_text("".join(json.dumps({"text": "alpha " * (i + 1)}) + "\n" for i in range(count)))
    return path


class Pair:
    """Folder of what the two processes left, and their answers by name of the task."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job
        self.five, self.nine, self.one = (documents(folder / f"{count}.jsonl", count) for count in (5, 9, 1))
        self.single = job.trained(folder / "single", **CURVE)
        stopped_after(self.single, folder / "one then two", 10)

        def train(name, **changes):
            return ["pretrain", job.arguments(folder / name, **changes)]

        def stopped(name):
            return ["copy", str(folder / "dropout"), str(folder / name), 10]

        def file(name, path):
            return str(checkpoint(folder / name, 10) / path)

        tasks = {
            "two": train("two", **CURVE),
            "two, micro-batch 2": train("two, micro-batch 2", **CURVE, micro_batch_size=2),
            "dropout": train("dropout", **DROPOUT),
            "copy": ["copy", str(folder / "dropout"), str(folder / "resumed"), 10],
            "resumed": train("resumed", **DROPOUT),
            "one then two": train("one then two", **CURVE),
            "nine": train("nine", **PADDED, dataset=self.nine),
            "one": train("one", **PADDED, dataset=self.one),
            "three rows": train("three rows", global_batch_size=3),
            "non-finite": train("non-finite", learning_rate=1e30, max_grad_norm=None, save_every=1),
            "background": train("background", **DROPOUT, save_async=True),
            "another seed": ["pretrain", job.arguments(folder / "dropout", **{**DROPOUT, "max_steps": 21, "seed": 7})],
            "copy 2": ["copy", str(folder / "dropout"), str(folder / "damaged"), 10],
            "zeros": ["damage", file("damaged", "optimizer.bin"), "zero"],
            "damaged": train("damaged", **DROPOUT),
            "copy 3": stopped("no random state"),
            "no file": ["damage", file("no random state", "random_states_1.pkl"), "delete"],
            "no random state": train("no random state", **DROPOUT),
            **{f"disk full {kind}": ["limited", 160_000, train("full" + kind, **DROPOUT, log_every=99, save_async=kind)[1]]
               for kind in ("false", "true")},
            **{f"stopped {rank}": ["stopped", int(number), rank, str(folder / f"stopped {rank}"),
                                   train(f"stopped {rank}", **{**DROPOUT, "save_every": 1000}, save_async=bool(rank))[1]]
               for rank, number in ((0, signal.SIGINT), (1, signal.SIGTERM))},
            **{f"after {rank}": train(f"stopped {rank}", **DROPOUT) for rank in (0, 1)},
            "held": ["held", str(folder / "held"), train("held", **CURVE)[1]],
            "mean": ["mean of losses", str(folder / "mean.jsonl")],
            **{f"evaluate {size}": ["evaluate", self.evaluation(self.single, size, folder / f"two-{size}.json")]
               for size in BATCHES},
        }
        (folder / "tasks.json").write_text(json.dumps(list(tasks.values())))
        worker = Path(__file__).with_name("two_processes.py")
        logs = [(folder / f"log.{rank}").open("wb") for rank in range(2)]
        command = [sys.executable, str(worker), str(folder / "tasks.json"), str(folder / "results")]
        processes = [subprocess.Popen(command, env=environment(**extra), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
                     for extra, log in zip(ranks(2), logs, strict=True)]
        codes = end_all(processes, 180)
        for log in logs:
            log.close()
        assert codes == [0, 0], (folder / "log.0").read_text() + (folder / "log.1").read_text()
        answers = [json.loads((folder / f"results.{rank}").read_text()) for rank in range(2)]
        self.outcomes = {name: [Outcome(*answer) for answer in pair]
                         for name, *pair in zip(tasks, *answers, strict=True) if pair[0] is not None}

    def evaluation(self, model: Path, size: int, out: Path) -> list[str]:
        return [str(word) for word in (model, "--dataset", self.five, "--packing", "padded", "--micro_batch_size", size,
                                       "--cache_dir", self.job.cache, "--json", out)]


@pytest.fixture(scope="module")
def pair(job, tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("pair"), job)


def losses(run):
    return [row["loss"] for row in rows(run) if "loss" in row]


def rates(run):
    return [row["learning_rate"] for row in rows(run) if "loss" in row]


def assert_same_curve(one, other):
    assert len(losses(one)) > 1
    assert losses(other) == pytest.approx(losses(one), rel=1e-5)
    assert rates(other) == rates(one)  # A3
    assert [row["grad_norm"] for row in rows(other) if "loss" in row] == pytest.approx(
        [row["grad_norm"] for row in rows(one) if "loss" in row], rel=1e-3)
    for name in ("eval_loss", "eval_bits_per_byte"):
        assert [row[name] for row in rows(other) if name in row] == pytest.approx(
            [row[name] for row in rows(one) if name in row], rel=1e-5)


def test_micro_batches_do_not_change_the_curve(pair, job, tmp_path):
    assert losses(pair.single)[-1] < losses(pair.single)[0] - 0.5, "it must learn something"
    for size in (1, 2, 4):
        assert_same_curve(pair.single, job.trained(tmp_path / str(size), **CURVE, micro_batch_size=size))


@pytest.mark.parametrize("name", ["two", "two, micro-batch 2"])
def test_two_processes_do_not_change_the_curve(pair, name):
    outcomes = pair.outcomes[name]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "on 2 x cpu" in outcomes[0].out and not outcomes[1].out, "and one process speaks"
    assert_same_curve(pair.single, pair.folder / name)


def test_two_processes_go_on_bit_for_bit(pair):
    assert [outcome.code for outcome in pair.outcomes["resumed"]] == [0, 0], pair.outcomes["resumed"]
    assert "update 10 of 20" in pair.outcomes["resumed"][0].out
    assert_same_run(pair.folder / "dropout", pair.folder / "resumed", 20)
    path = checkpoint(pair.folder / "dropout", 20)
    states = [checkpoint_contents(path)[f"random_states_{rank}.pkl"] for rank in range(2)]
    assert differences(*states), "each process draws its own dropout"


def test_one_process_goes_on_from_two_and_back(pair, job, tmp_path):
    """D6."""
    run = stopped_after(pair.folder / "two", tmp_path / "run", 10)
    assert job.run(run, **CURVE).code == 0
    assert_same_curve(pair.single, run)
    assert [outcome.code for outcome in pair.outcomes["one then two"]] == [0, 0]
    assert_same_curve(pair.single, pair.folder / "one then two")


def test_a_process_without_a_random_state_says_so(pair):
    out = "".join(outcome.out for outcome in pair.outcomes["one then two"])
    assert "no random state for process 1" in out and "saved by 1 process" in out, out


def assert_same_files(one, other, step):
    left, right = checkpoint(one, step), checkpoint(other, step)
    names = [sorted(path.name for path in folder.iterdir()) for folder in (left, right)]
    assert names[0] == names[1] and "random_states_1.pkl" in names[0]
    for path in left.iterdir():
        if path.is_file() and path.name != "run_state.json":
            assert path.read_bytes() == (right / path.name).read_bytes(), path.name


def test_background_save_of_two_writes_the_same_files(pair):
    assert [outcome.code for outcome in pair.outcomes["background"]] == [0, 0], pair.outcomes["background"]
    for step in (10, 20):  # the last one is not written behind anything
        assert_same_files(pair.folder / "dropout", pair.folder / "background", step)
    assert rows(pair.folder / "dropout") == rows(pair.folder / "background")


def test_another_seed_is_refused_by_both(pair):
    """D2."""
    assert [outcome.code for outcome in pair.outcomes["another seed"]] == [2, 2]
    assert "seed=7" in pair.outcomes["another seed"][0].err and "seed=0" in pair.outcomes["another seed"][0].err


@pytest.mark.parametrize(("name", "reason"), [("damaged", "optimizer.bin is not the file that was saved"),
                                              ("no random state", "random_states_1.pkl is missing")])
def test_a_broken_checkpoint_is_passed_over_by_both(pair, name, reason):
    """D4, D7: none older is left, so both start anew, and it is said."""
    assert [outcome.code for outcome in pair.outcomes[name]] == [0, 0], pair.outcomes[name]
    assert reason in pair.outcomes[name][0].out and "going on" not in pair.outcomes[name][0].out
    assert_same_run(pair.folder / "dropout", pair.folder / name, 20)


@pytest.mark.parametrize("kind", ["false", "true"])
def test_a_full_disk_stops_both(pair, kind):
    """D5; blocking and behind the training."""
    outcomes = pair.outcomes[f"disk full {kind}"]
    assert [outcome.code for outcome in outcomes] == [3, 3], outcomes
    assert "could not be written" in outcomes[0].err and not any("Traceback" in outcome.err for outcome in outcomes)
    assert not list((pair.folder / f"full{kind}" / "checkpoints").iterdir())


@pytest.mark.parametrize(("rank", "code"), [(0, 130), (1, 143)])
def test_a_signal_to_one_stops_both_at_the_same_update(pair, rank, code):
    assert [outcome.code for outcome in pair.outcomes[f"stopped {rank}"]] == [code, code], pair.outcomes[f"stopped {rank}"]
    assert "to go on:" in pair.outcomes[f"stopped {rank}"][0].out
    assert [outcome.code for outcome in pair.outcomes[f"after {rank}"]] == [0, 0]
    assert_same_run(pair.folder / "dropout", pair.folder / f"stopped {rank}", 20)


def test_a_folder_in_use_is_refused_by_both(pair):
    assert [outcome.code for outcome in pair.outcomes["held"]] == [2, 2], pair.outcomes["held"]
    assert "is training there now" in pair.outcomes["held"][0].err


def test_nine_samples_on_two_processes(pair, job, tmp_path):
    """H1: five updates of two rows, the last of one, all nine used once."""
    assert [outcome.code for outcome in pair.outcomes["nine"]] == [0, 0], pair.outcomes["nine"]
    assert len(losses(pair.folder / "nine")) == 5
    single = job.trained(tmp_path / "nine", **PADDED, dataset=pair.nine)
    assert rows(single)[-1]["tokens"] == rows(pair.folder / "nine")[-1]["tokens"]
    assert_same_curve(single, pair.folder / "nine")


@pytest.mark.parametrize(("name", "words"), [("one", ["1 rows for 2 processes"]),
                                             ("three rows", ["global_batch_size=3", "2 processes"])])
def test_too_few_for_two_processes(pair, name, words):
    for outcome in pair.outcomes[name]:
        assert outcome.code == 2 and "Traceback" not in outcome.err
    assert all(word in pair.outcomes[name][0].err for word in words)
    assert not pair.outcomes[name][1].err, "one process speaks"
    assert not (pair.folder / name).exists(), "nothing is written"


def test_non_finite_stops_both(pair):
    assert [outcome.code for outcome in pair.outcomes["non-finite"]] == [3, 3], pair.outcomes["non-finite"]


def test_logged_loss_is_of_all_processes(pair):
    """H2."""
    assert [row["loss"] for row in rows_of(pair.folder / "mean.jsonl")] == [1.5]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_evaluation_is_the_same_for_any_batch_and_number_of_processes(pair, tmp_path):
    """H3: 5 rows."""
    found = []
    for size in BATCHES:
        one, two = tmp_path / f"{size}.json", pair.folder / f"two-{size}.json"
        assert run_main("evaluate", pair.evaluation(pair.single, size, one)).code == 0
        outcomes = pair.outcomes[f"evaluate {size}"]
        assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
        found += [json.loads(path.read_text()) for path in (one, two)]
    for name in found[0]:
        assert [one[name] for one in found] == pytest.approx([found[0][name]] * len(found), rel=1e-6), name


def test_export_of_two_processes_has_plain_names(pair):
    """E3."""
    from safetensors.torch import load_file

    one, two = (load_file(run / "export" / "model.safetensors") for run in (pair.single, pair.folder / "two"))
    assert one.keys() == two.keys() and "model.layers.0.self_attn.q_proj.weight" in one
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(pair.folder / "two" / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info


@pytest.mark.slow
def test_torchrun(job, tmp_path):
    """As a user starts two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
               str(ROOT / "scripts" / "pretrain.py"), *job.arguments(tmp_path / "run", **CURVE)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and "on 2 x cpu" in done.stdout, done.stderr
    assert_same_curve(job.trained(tmp_path / "single", **CURVE), tmp_path / "run")
