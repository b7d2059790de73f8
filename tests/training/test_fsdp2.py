"""Weights and scaler under FSDP2, on the CPU, in a process of its own: FSDP needs a process group of the whole process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, end_all, environment, ranks

START = """
import json, os, sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

sys.path.insert(0, sys.argv[1])
from memtrain.config import make_config
from memtrain.data.order import Update
from memtrain.model.presets import LlamaConfig
from memtrain.training.step import build, train_step

torch.set_num_threads(1)
folder, precision = Path(sys.argv[2]), sys.argv[3]


def accelerator():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
                                            transformer_cls_names_to_wrap=["DecoderLayer"], cpu_offload=False)
    acc = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision, step_scheduler_with_optimizer=False)
    # a CPU gets DDP in place of FSDP without a word: say that it is FSDP
    acc.state.distributed_type = DistributedType.FSDP
    if precision != "no":
        plugin.set_mixed_precision(precision)
    acc.state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if precision == "fp16":
        acc.native_amp, acc.scaler = True, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    return acc


def make():
    shape = LlamaConfig(97, 32, 64, 2, 4, 2, 8)
    config = make_config({"max_steps": 9, "mixed_precision": precision, "global_batch_size": 2, "seq_len": 16})
    return build(config, shape, accelerator(), total_steps=9)


ids = torch.randint(0, 97, (2, 17), generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
"""
WORKER = START + """
state = make()
losses = [train_step(state, Update([batch], 32, 2, 2)).loss_sum.item() for _ in range(2)]
held = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
result = {"sharded": all(isinstance(parameter, DTensor) for parameter in held), "losses": losses,
          "dtypes": sorted({str(parameter.dtype) for parameter in held}
                           | {str(value.dtype) for values in state.optimizer.state.values()
                              for name, value in values.items() if name.startswith("exp_avg")})}
if state.accelerator.scaler is not None:
    before = state.accelerator.scaler.state_dict()
    state.accelerator.save_state(str(folder / "saved"), safe_serialization=True)
    train_step(state, Update([batch], 32, 2, 2))
    changed = state.accelerator.scaler.state_dict()
    state.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)  # as in a new process
    fresh = state.accelerator.scaler.state_dict()
    state.accelerator.load_state(str(folder / "saved"))
    result |= {"before": before, "changed": changed, "fresh": fresh, "after": state.accelerator.scaler.state_dict()}
(folder / "result.json").write_text(json.dumps(result))
torch.distributed.destroy_process_group()
"""


# D8: saved at updates 0, 1 and 3 by our own writer, loaded by a run built anew, which goes on bit for bit
CHECKPOINTS = START + """
from dataclasses import asdict
from types import SimpleNamespace

from memtrain.options import RunConfig
from memtrain.training.checkpoint import RunState, load_checkpoint, save_checkpoint
from memtrain.training.progress import Progress

count = 32 * int(os.environ["WORLD_SIZE"])
tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)


def contents(state):
    local = [parameter.to_local().clone() for parameter in state.model.parameters()]
    return [*local, torch.tensor(state.scheduler.get_last_lr()), torch.get_rng_state()]


def train(state):
    loss = train_step(state, Update([batch], count, 2, 2)).loss_sum
    torch.rand(1)  # as dropout would
    return loss


state, saved, after, found = make(), {}, {}, []
for step in range(5):
    if step in (0, 1, 3):
        run = RunState(Progress(step=step), int(os.environ["WORLD_SIZE"]), asdict(RunConfig()), {}, "")
        saved[step] = (save_checkpoint(state, run, tokenizer, folder / "checkpoints", 9), run, contents(state))
    loss = train(state)
    after[step] = [loss, *contents(state)]
sharded = all(isinstance(parameter, DTensor) for parameter in state.model.parameters())
for step, (path, run, before) in saved.items():
    state.accelerator.free_memory()
    from accelerate.state import AcceleratorState, GradientState
    state = make()
    load_checkpoint(state, path, run, print)
    equal = all(map(torch.equal, before, contents(state)))
    loss = train(state)
    found.append([step, equal, all(map(torch.equal, after[step], [loss, *contents(state)]))])
(folder / f"result.{os.environ['RANK']}").write_text(json.dumps({"sharded": sharded, "found": found}))
torch.distributed.destroy_process_group()
"""


def run_worker(folder: Path, precision: str) -> dict:
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", WORKER, str(root), str(folder), precision], env=environment,
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sharded_checkpoints_go_on_bit_for_bit(tmp_path, world_size):
    extras = ranks(2) if world_size == 2 else [{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                                                "MASTER_PORT": "0"}]
    command = [sys.executable, "-c", CHECKPOINTS, str(ROOT), str(tmp_path), "no"]
    logs = [(tmp_path / f"log.{rank}").open("wb") for rank in range(world_size)]
    processes = [subprocess.Popen(command, env=environment(**extra), stdout=log, stderr=subprocess.STDOUT)
                 for extra, log in zip(extras, logs, strict=True)]
    codes = end_all(processes, 120)
    said = "".join((tmp_path / f"log.{rank}").read_text() for rank in range(world_size))
    assert codes == [0] * world_size, said
    for rank in range(world_size):
        result = json.loads((tmp_path / f"result.{rank}").read_text())
        assert result["sharded"] and result["found"] == [[step, True, True] for step in (0, 1, 3)], result
    assert "random state" not in said


def test_optimizer_holds_float32_under_bf16(tmp_path):
    """B1 under FSDP2."""
    result = run_worker(tmp_path, "bf16")
    assert result["sharded"] and result["dtypes"] == ["torch.float32"], result
    assert result["losses"][1] < result["losses"][0], result


def test_scaler_comes_back(tmp_path):
    """B3 under FSDP2: scale and growth tracker equal after a load, and not by standing still."""
    result = run_worker(tmp_path, "fp16")
    assert result["sharded"] and result["after"] == result["before"], result
    assert result["before"] != result["changed"] and result["before"] != result["fresh"], result
