"""Updates of rows in one pass, and rounding to int8 by chance."""

from __future__ import annotations

import pytest
import torch

from memtrain.optim import by_rows
from memtrain.optim import rule as rule_module
from memtrain.optim.by_rows import BY_ROWS, stochastic_round_rows_
from memtrain.optim.factory import rows_updater
from memtrain.optim.low_bit import noise_halves
from memtrain.optim.low_memory import LowMemoryOptimizer

ROWS, COLUMNS = 24, 33  # an odd width: rows begin within a pair of random halves


def rounded(values, seed=0, scale=None, start=0, number=1):
    target = torch.empty(values.shape, dtype=torch.int8)
    scale = torch.ones(values.shape[0]) if scale is None else scale
    stochastic_round_rows_(target, scale, values.clone(), seed, number, start)
    return target, scale


def test_rounding_is_right_on_average():
    values = torch.linspace(-100, 100, 801).repeat(2, 1)
    draws = torch.stack([rounded(values, seed)[0] for seed in range(2000)]).double()
    fraction = values.double() - values.double().floor()
    deviation = (fraction * (1 - fraction) / 2000).sqrt()
    assert ((draws.mean(0) - values).abs() <= 5 * deviation + 1e-12).all()
    assert abs((draws.mean() - values.mean()).item()) < 0.005


def test_whole_numbers_stay_where_they_are():
    """Also under the largest of all random numbers, and next to 127."""
    values = torch.arange(-127.0, 128).repeat(50, 1)
    for number in range(1, 2**16, 3277):
        target, scale = rounded(values, seed=number, number=number)
        assert torch.equal(target.float(), values) and (scale == 1).all()


@pytest.mark.parametrize("push", [0.003, 0.1, -0.37, 0.5, 0.8])
def test_a_steady_change_arrives(push):
    """After 5,000 updates each number is still where it should be to 5 steps; independent draws are up to 100 away."""
    codes, scale, passed = torch.zeros(2, 101, dtype=torch.int8), torch.ones(2), 0
    codes[:, 0] = 100  # keeps the range
    for number in range(1, 5001):
        values = codes.float()
        values[:, 1:] += push
        stochastic_round_rows_(codes, scale, values, 5, number, 0)
        assert (codes[:, 1:].float() + (passed - push * number)).abs().max() <= 5 and (scale == 1).all()
        if codes[:, 1:].abs().max() > 60:  # back to the middle of the range, by whole steps
            shift = 60 if push > 0 else -60
            codes[:, 1:] -= shift
            passed += shift


def test_phases_differ_from_place_to_place():
    values = torch.full((4, 500), 0.5)
    values[:, 0] = 100
    ups = torch.stack([rounded(values, number=number)[0][:, 1:].flatten() for number in range(1, 9)])
    assert ups.unique(dim=1).shape[1] == 16 and 0.45 < ups.double().mean() < 0.55


@pytest.mark.parametrize(("largest", "renewed"), [(127.0, False), (127.5, True), (300.0, True), (91.0, False), (89.0, True),
                                                  (1e-3, True), (0.0, False)])
def test_a_scale_changes_only_at_the_ends_of_the_range(largest, renewed):
    values = torch.linspace(-1, 1, 101).mul(largest).repeat(3, 1)
    scale = torch.tensor([0.5, 1.0, 2.0])
    target, after = rounded(values, scale=scale.clone())
    assert (after != scale).all() if renewed else torch.equal(after, scale)
    assert ((target * after[:, None] - values * scale[:, None]).abs() <= after[:, None]).all()
    assert not renewed or (target.abs().amax(1) >= 119).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_scale(wrong):
    values = torch.ones(3, 8)
    values[1, 2] = wrong
    assert rounded(values)[1].isfinite().tolist() == [True, False, True]


def test_noise_depends_on_the_place_alone():
    whole = noise_halves(0, 1001, 7, torch.device("cpu"))
    assert torch.equal(whole[333:900], noise_halves(333, 900, 7, torch.device("cpu")))
    assert abs(whole.double().mean()) < 2000 and whole.unique().numel() > 950
    assert (whole[1:] == whole[:-1]).sum() < 3


def matrix(dtype):
    torch.manual_seed(0)
    values = torch.randn(ROWS, COLUMNS)
    if dtype != torch.int8:
        return torch.nn.Parameter(values.to(dtype)), None
    scale = values.abs().amax(1) / 127
    weight = torch.nn.Parameter((values / scale[:, None]).round().to(torch.int8), requires_grad=False)
    return weight, scale


def gradient(step):
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(step)).bfloat16()


@pytest.mark.parametrize(("rule", "first_moment"), [("adafactor_rows", False), ("adamw_factored", False),
                                                    ("adamw_factored", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_any_number_of_rows_at_a_time(rule, first_moment, dtype, monkeypatch):
    """Whole, by blocks, by slices within blocks, and after a state dict: the same bits, but for the order of column sums."""
    found = []
    for block, numbers in ((ROWS, 2**18), (5, 2**18), (8, 3 * COLUMNS), (1, 2**18)):
        monkeypatch.setattr(rule_module, "SLICE", numbers)
        weight, scale = matrix(dtype)

        def make(weight=weight):
            return LowMemoryOptimizer([{"params": [weight], "weight_decay": 0.1, "first_moment": first_moment}], rule=rule,
                                      state_bits=32, lr=0.05, seed=3)

        optimizer = make()
        for step in range(3):
            update = rows_updater(optimizer, weight, scale)
            for first in range(0, ROWS, block):
                update(first, gradient(step)[first:first + block])
            if block == 5:
                saved = optimizer.state_dict()
                optimizer = make()
                optimizer.load_state_dict(saved)
        found.append((weight.detach(), scale, optimizer.state[weight]))
    assert not torch.equal(found[0][0], matrix(dtype)[0])
    for weight, scale, state in found[1:]:
        if dtype == torch.float32:
            torch.testing.assert_close(weight, found[0][0], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(weight, found[0][0]) and (scale is None or torch.equal(scale, found[0][1]))
        for name, value in found[0][2].items():
            torch.testing.assert_close(torch.as_tensor(state[name]), torch.as_tensor(value), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", BY_ROWS)
def test_int8_follows_float32_on_average(rule):
    """The mean of many seeds is the float32 update of the same numbers."""
    moved = []
    for seed in range(200):
        weight, scale = matrix(torch.int8)
        before = weight * scale[:, None]
        optimizer = LowMemoryOptimizer([{"params": [weight]}], rule=rule, state_bits=32, lr=0.01, seed=seed)
        rows_updater(optimizer, weight, scale)(0, gradient(0))
        moved.append(weight * scale[:, None] - before)
    twin = torch.nn.Parameter(before.clone())
    optimizer = LowMemoryOptimizer([{"params": [twin]}], rule=rule, state_bits=32, lr=0.01, seed=0)
    rows_updater(optimizer, twin)(0, gradient(0))
    step = twin.detach() - before
    error = torch.stack(moved).mean(0) - step
    assert (error.abs() <= 5 * scale[:, None] / 200**0.5 + 1e-6 * step.abs()).all()


def test_adafactor_rows_against_its_definition():
    """Two updates written out in float64: row moments of this gradient, column moments of the one before."""
    weight, _ = matrix(torch.float32)
    wanted = weight.detach().double()
    optimizer = LowMemoryOptimizer([{"params": [weight]}], rule="adafactor_rows", state_bits=32, lr=0.05)
    row = column = None
    for step in (1, 2):
        g = gradient(step).double()
        rows_updater(optimizer, weight)(0, gradient(step))
        square, keep = g.square(), step**-0.8
        row = square.mean(1) if row is None else row + keep * (square.mean(1) - row)
        direction = g / row.sqrt()[:, None]
        if column is not None:
            direction = direction / (column / column.mean()).sqrt()
        column = square.mean(0)
        size = wanted.square().mean(1).sqrt().clamp(min=1e-3)
        wanted = wanted - 0.05 * size[:, None] * direction
    torch.testing.assert_close(weight.detach().double(), wanted, rtol=1e-5, atol=1e-6)


def factored_in_float64(steps):
    """Gradients over the root of a factored second moment, written out."""
    row = column = None
    for step in range(1, steps + 1):
        g = gradient(step).double()
        square, keep = g.square(), step**-0.8
        row = square.mean(1) if row is None else row + keep * (square.mean(1) - row)
        direction = g / row.sqrt()[:, None]
        if column is not None:
            direction = direction / (column / column.mean()).sqrt()
        column = square.mean(0) if column is None else column + keep * (square.mean(0) - column)
        yield direction


def test_adamw_factored_against_its_definition():
    weight, _ = matrix(torch.float32)
    wanted = weight.detach().double()
    optimizer = LowMemoryOptimizer([{"params": [weight]}], rule="adamw_factored", state_bits=32, lr=0.05, weight_decay=0.1)
    for step, direction in enumerate(factored_in_float64(4), start=1):
        rows_updater(optimizer, weight)(0, gradient(step))
        wanted = wanted * (1 - 0.05 * 0.1) - 0.05 * direction
    torch.testing.assert_close(weight.detach().double(), wanted, rtol=1e-5, atol=1e-6)


def test_first_moment_in_int8():
    """Each update is that of a mean kept in float64, to a step of the mean's rows; on average over seeds it is the same."""
    errors = []
    for seed in range(100):
        weight, _ = matrix(torch.float32)
        wanted, mean = weight.detach().double(), torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
        optimizer = LowMemoryOptimizer([{"params": [weight], "first_moment": True}], rule="adamw_factored", state_bits=32,
                                       lr=0.01, seed=seed)
        for step, direction in enumerate(factored_in_float64(4), start=1):
            rows_updater(optimizer, weight)(0, gradient(step))
            mean = 0.9 * mean + 0.1 * direction
            wanted = wanted - 0.01 * mean / (1 - 0.9**step)
        errors.append((weight.detach().double() - wanted) / 0.01)
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == torch.int8 and state["exp_avg"].shape == weight.shape
    errors = torch.stack(errors)
    assert errors.abs().max() < 0.2 and errors.abs().max() > 0.01, "rounding shows"
    assert errors.mean(0).abs().max() < 0.025 and errors.mean().abs() < 1e-3


def test_a_row_that_is_rarely_needed():
    """Its first gradient after a thousand updates makes no step longer than LONGEST, and a mean that faded comes back."""
    weight, _ = matrix(torch.float32)
    optimizer = LowMemoryOptimizer([{"params": [weight], "first_moment": True}], rule="adamw_factored", state_bits=32, lr=0.01)
    update = rows_updater(optimizer, weight)
    update(0, gradient(0))
    for _ in range(1000):  # 0.9^1000 is no float32
        update(0, torch.zeros(ROWS, COLUMNS))
    assert optimizer.state[weight]["exp_avg_scale"].max() < 2e-30
    before = weight.detach().clone()
    update(0, gradient(1))
    step = (before - weight.detach()) / 0.01
    torch.testing.assert_close(step.square().mean(1).sqrt(), torch.full((ROWS,), 0.1 * by_rows.LONGEST), rtol=0.02, atol=0)
    assert (torch.cosine_similarity(step, gradient(1).float()) > 0.9).all()


def test_weight_decay_of_int8_is_exact():
    weight, scale = matrix(torch.int8)
    before, codes = scale.clone(), weight.detach().clone()
    optimizer = LowMemoryOptimizer([{"params": [weight], "weight_decay": 0.5}], rule="adamw_factored", state_bits=32, lr=0.01)
    rows_updater(optimizer, weight, scale)(0, torch.zeros(ROWS, COLUMNS))
    assert torch.equal(weight, codes) and torch.equal(scale, before * (1 - 0.01 * 0.5))


@pytest.mark.parametrize("rule", BY_ROWS)
def test_a_row_that_never_gets_a_gradient(rule):
    """Decay takes it to nothing, and no further; a row of zeros stays one."""
    weight, scale = matrix(torch.int8)
    with torch.no_grad():
        weight[3] = 0
    scale[3] = by_rows.TINY  # as a row of zeros is read
    optimizer = LowMemoryOptimizer([{"params": [weight], "weight_decay": 0.5}], rule=rule, state_bits=32, lr=0.2)
    for step in range(1000):
        grad = gradient(step)
        grad[3:5] = 0
        rows_updater(optimizer, weight, scale)(0, grad)
    assert scale.isfinite().all() and (weight[3] == 0).all() and scale[4] < 1e-29
    rows_updater(optimizer, weight, scale)(0, gradient(0))
    assert scale.isfinite().all() and (weight[3:5] != 0).any(dim=1).all()


@pytest.mark.parametrize("rule", BY_ROWS)
def test_a_column_that_was_never_needed(rule):
    """Its first gradient makes a step of the order of others; nor does a gradient of zeros at the start lift all."""
    def steps(gradients):
        weight, _ = matrix(torch.float32)
        optimizer = LowMemoryOptimizer([{"params": [weight]}], rule=rule, state_bits=32, lr=0.01)
        for grad in gradients:
            before = weight.detach().clone()
            rows_updater(optimizer, weight)(0, grad)
        return (weight.detach() - before).abs()

    sparse = [gradient(step) for step in range(31)]
    for grad in sparse[:30]:
        grad[:, 5] = 0
    late = steps(sparse)
    assert late[:, 5].mean() < 10 * 0.01 * 6 and late[:, :5].mean() > 0.01 * 0.02
    zeros = steps([torch.zeros(ROWS, COLUMNS), gradient(1)])
    assert zeros.mean() < 2 * steps([gradient(0), gradient(1)]).mean()


def test_state_is_small():
    weight, scale = matrix(torch.int8)
    for rule, most in (("adafactor_rows", ROWS + 2 * COLUMNS), ("adamw_factored", ROWS + 2 * COLUMNS)):
        optimizer = LowMemoryOptimizer([{"params": [weight]}], rule=rule, state_bits=32, lr=0.01)
        rows_updater(optimizer, weight, scale)(0, gradient(0))
        numbers = sum(value.numel() for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor))
        assert numbers == most, rule
