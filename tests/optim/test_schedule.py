"""Learning rates against torch's own schedulers, and against tables by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from memtrain.optim.schedule import learning_rate_factor
from memtrain.options import RunConfig


def factors(total, **options):
    config = RunConfig(max_steps=total, **options)
    return [learning_rate_factor(step, total, config) for step in range(total)]


def torch_factors(total, warmup, tail, tail_start):
    """Warm-up by LinearLR, then 1, then `tail(optimizer)` from update `tail_start`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    parts, milestones = [], []
    if warmup:
        parts.append(LinearLR(optimizer, 1 / (warmup + 1), 1.0, total_iters=warmup))
        milestones.append(warmup)
    if tail_start > warmup:
        parts.append(ConstantLR(optimizer, 1.0, total_iters=1))
        milestones.append(tail_start)
    parts.append(tail(optimizer))
    scheduler = SequentialLR(optimizer, parts, milestones)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("total", "warmup", "ratio"), [(20, 4, 0.1), (20, 0, 0.0), (7, 3, 0.5), (100, 10, 0.1)])
def test_against_torch(total, warmup, ratio):
    span = total - 1 - warmup
    options = {"warmup_steps": warmup, "min_lr_ratio": ratio}
    tails = {
        "cosine": (lambda o: CosineAnnealingLR(o, T_max=span, eta_min=ratio), warmup),
        "linear": (lambda o: LinearLR(o, 1.0, ratio, total_iters=span), warmup),
        "constant": (lambda o: ConstantLR(o, 1.0, total_iters=1), warmup),
        "wsd": (lambda o: LinearLR(o, 1.0, ratio, total_iters=2), total - 3),
    }
    for name, (tail, start) in tails.items():
        found = factors(total, lr_schedule=name, decay_steps=2, **options)
        assert found == pytest.approx(torch_factors(total, warmup, tail, start), abs=1e-9), name


@pytest.mark.parametrize(("options", "wanted"), [
    ({"lr_schedule": "linear", "warmup_steps": 3, "min_lr_ratio": 0.0}, [0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0.0]),
    ({"lr_schedule": "constant", "warmup_steps": 1}, [0.5, 1, 1, 1, 1, 1, 1, 1]),
    ({"lr_schedule": "wsd", "warmup_steps": 1, "decay_steps": 4, "min_lr_ratio": 0.2},
     [0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
    # a decay longer than what is left after warm-up starts where warm-up ends
    ({"lr_schedule": "wsd", "warmup_steps": 5, "decay_steps": 7, "min_lr_ratio": 0.5},
     [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 0.75, 0.5]),
    ({"lr_schedule": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.0},
     [0.25, 0.5, 0.75, 1, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2, 0.0]),
    # nothing but warm-up
    ({"lr_schedule": "linear", "warmup_steps": 8}, [i / 9 for i in range(1, 9)]),
    # default warm-up: a tenth of the run, rounded
    ({"lr_schedule": "linear", "min_lr_ratio": 1.0}, [0.5, 1, 1, 1, 1, 1, 1, 1]),
])
def test_by_hand(options, wanted):
    assert factors(8, **options) == pytest.approx(wanted, abs=1e-12)


def test_defaults_are_shares_of_the_run():
    found = factors(100, lr_schedule="wsd", min_lr_ratio=0.0)
    assert [i for i, value in enumerate(found) if value == 1.0] == list(range(10, 80))
    assert found[9] < 1 and found[80] < 1 and found[99] == 0.0


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_runs_are_finite_and_above_zero(name, total):
    for step in range(total + 3):  # a scheduler asks for one update more than there are
        value = learning_rate_factor(step, total, RunConfig(max_steps=total, lr_schedule=name))
        assert math.isfinite(value) and 0 < value <= 1
