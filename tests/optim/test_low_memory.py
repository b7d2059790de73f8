"""Small optimizer state, and bfloat16 weights that learn: against torch's optimizers and float64 written out."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from memtrain.command import BadInput
from memtrain.optim import rule as rule_module
from memtrain.optim.low_bit import NOISE_BITS, STATE_CODES, Code, mix_seed, noise_bits, stochastic_round_
from memtrain.optim.low_memory import LowMemoryOptimizer

CODES = [code for pair in STATE_CODES.values() for code in pair]
KINDS = [("adamw", 32), ("adamw", 8), ("adamw", 4), ("lion", 32), ("lion", 8), ("lion", 4), ("adafactor", 32)]
CPU = torch.device("cpu")


def make(parameters, rule="adamw", bits=32, **options):
    """An optimizer over `parameters`, tensors or groups."""
    parameters = list(parameters)
    groups = parameters if isinstance(parameters[0], dict) else [{"params": parameters}]
    return LowMemoryOptimizer(groups, rule=rule, state_bits=bits, **{"lr": 0.01, **options})


def make_parameters(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(parameters, step, decades=3):
    """Gradients with a mean of their own for each number, and noise: what training has. Their size spans decades by columns."""
    for index, parameter in enumerate(parameters):
        mean = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 + index))
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1000 * step + index))
        size = torch.logspace(-decades, 0, parameter.shape[-1])
        parameter.grad = (size * (0.5 * mean + noise)).to(parameter.dtype)


def train(optimizer, parameters, steps, first=1, decades=3):
    for step in range(first, first + steps):
        set_gradients(parameters, step, decades)
        optimizer.step()


SHAPES = [(5, 130), (64, 256), (7,), (3, 11)]  # with and without whole blocks, a vector, less than a block


# ---- rules -----------------------------------------------------------------------------------------------------------

def pairs(rule, bits, reference, steps=30, shapes=SHAPES, decades=3, **options):
    """Parameters after `steps` by ours and by `reference(parameters)`."""
    found, wanted = make_parameters(*shapes), make_parameters(*shapes)
    train(make(found, rule, bits, **options), found, steps, decades=decades)
    train(reference(wanted), wanted, steps, decades=decades)
    return list(zip(found, wanted, strict=True))


def assert_near(found, wanted, tolerance=1e-6):
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * max(1.0, wanted.abs().max().item()), f"{tuple(found.shape)}: {error:.1e}"


def test_adamw_equals_torchs():
    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3}
    for found, wanted in pairs("adamw", 32, lambda p: torch.optim.AdamW(p, **options), **options):
        assert_near(found, wanted)


@pytest.mark.parametrize("lr", [1e-3, 0.5])
def test_adafactor_equals_torchs(lr):
    """0.5: the step is then 1/sqrt(updates)."""
    options = {"lr": lr, "weight_decay": 0.1}
    for found, wanted in pairs("adafactor", 32, lambda p: torch.optim.Adafactor(p, **options), **options):
        assert_near(found, wanted, 2e-6)


class Lion64:
    """arXiv 2302.06675, algorithm 2, line by line, in float64."""

    def __init__(self, parameters, lr, betas, weight_decay):
        self.parameters, self.lr, self.betas, self.decay = parameters, lr, betas, weight_decay
        self.values = [p.detach().double() for p in parameters]
        self.means = [torch.zeros_like(value) for value in self.values]

    def step(self):
        beta1, beta2 = self.betas
        for p, value, mean in zip(self.parameters, self.values, self.means, strict=True):
            g = p.grad.double()
            update = (beta1 * mean + (1 - beta1) * g).sign()
            value -= self.lr * (update + self.decay * value)
            mean.copy_(beta2 * mean + (1 - beta2) * g)
            p.data.copy_(value)


def test_lion_equals_float64():
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.3}
    for found, wanted in pairs("lion", 32, lambda p: Lion64(p, **options), **options):
        assert_near(found, wanted)


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.05), (4, 0.3)])
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_small_state_follows_float32(rule, bits, tolerance):
    """The way of the weights over 50 updates: relative distance from that with float32 state. 4 bits cannot tell numbers that
    differ by more than two decades within a block; 8 bits can."""
    shapes = [(64, 256), (5, 130)]
    options = {"lr": 1e-3, "betas": (0.9, 0.95)}
    start = make_parameters(*shapes)
    both = pairs(rule, bits, lambda p: make(p, rule, 32, **options), 50, shapes, 3 if bits == 8 else 1, **options)
    for first, (found, wanted) in zip(start, both, strict=True):
        error = ((found - wanted).norm() / (wanted - first).norm()).item()
        assert 0 < error <= tolerance, error


def test_vectors_keep_float32_state():
    for bits in (8, 4):
        found, wanted = make_parameters((300,)), make_parameters((300,))
        train(make(found, "adamw", bits), found, 10)
        train(make(wanted, "adamw", 32), wanted, 10)
        assert torch.equal(found[0], wanted[0])


def test_a_second_moment_never_becomes_zero():
    """Numbers far below their block's largest are not divided by eps (arXiv 2309.01507, sec. 4.1)."""
    for bits in (8, 4):
        parameter = torch.nn.Parameter(torch.zeros(64, 256))
        optimizer = make([parameter], "adamw", bits, lr=1.0, eps=1e-30, weight_decay=0.0)
        small = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 1e-7
        for step in range(20):
            before = parameter.detach().clone()
            # the mean is kept up by gradients of one sign; now and then a gradient is nearly nothing
            parameter.grad = (small.abs() * 1e3 if step % 2 else small * 1e-6)
            parameter.grad[:, 0] = 1.0
            optimizer.step()
            moved = (parameter - before).abs().max()
            assert moved < 10, f"{bits} bits, update {step}: a step of {moved:.1e} learning rates"


def test_a_4_bit_first_moment_follows_on_average():
    """A mean between two codes, come to in steps smaller than theirs: rounding to nearest would stand still."""
    code = STATE_CODES[4][0]
    parameter = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = make([parameter], "adamw", 4)
    for size in [0.2] * 40 + [0.17] * 60:
        parameter.grad = torch.full((64, 256), size)
        parameter.grad[:, ::code.block] = 1.0
        optimizer.step()
    state = optimizer.state[parameter]
    mean = code.decode(state["exp_avg"], state["exp_avg_scale"]).view(-1, code.block)[:, 1:].mean().item()
    assert mean == pytest.approx(0.17, rel=0.02)


def test_a_block_of_zeros_stays_zero():
    code = STATE_CODES[8][1]
    codes, scales = torch.full((256,), 7, dtype=torch.uint8), torch.ones(1)
    code.encode(torch.zeros(256), codes, scales, torch.full((256,), 2**24 - 1, dtype=torch.int32))
    assert not code.decode(codes, scales).any()


# ---- codes -------------------------------------------------------------------------------------------------------------

def all_codes(code):
    """Every code of the format, then 0, as stored; whole blocks."""
    numbers = torch.arange(2**code.bits, dtype=torch.uint8)
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % code.block))


def packed(code, numbers):
    return numbers if code.bits == 8 else numbers[0::2] | (numbers[1::2] << 4)


def table(code):
    """float64 values of the magnitudes, from the format's definition: 1 + x is a float of these bits."""
    values = []
    for number in range(code.largest_code + 1):
        exponent, mantissa = divmod(number, 2**code.mantissa_bits)
        values.append(2.0**exponent * (1 + mantissa / 2**code.mantissa_bits) - 1)
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-12, 3.7])
def test_every_code_round_trips(code, scale):
    stored = packed(code, all_codes(code))
    scales = torch.full((len(all_codes(code)) // code.block,), scale)
    values = code.decode(stored, scales)
    magnitudes = table(code) * scale
    signed = torch.cat((magnitudes, -magnitudes)) if code.signed else magnitudes
    assert torch.allclose(values[:2**code.bits].double(), signed, rtol=1e-6, atol=0)
    again, again_scales = torch.zeros_like(stored), torch.zeros_like(scales)
    values[::code.block] = magnitudes[-1].float()  # each block has the largest, so the scale comes back
    code.encode(values, again, again_scales)
    found = code.decode(again, again_scales)
    assert torch.allclose(again_scales, scales, rtol=1e-6)
    nonzero = values != 0
    assert torch.allclose(found[nonzero], values[nonzero], rtol=1e-5)
    wanted = 0.0 if code.signed else float(magnitudes[1])
    assert found[~nonzero].tolist() == pytest.approx([wanted] * int((~nonzero).sum()), rel=1e-5)


def examples(code, blocks=8, seed=0):
    """Values over many decades, [blocks * block], the largest of each block first."""
    generator = torch.Generator().manual_seed(seed)
    values = 10 ** (-7 * torch.rand(blocks, code.block, generator=generator))
    values[:, 0] = 1.5
    if code.signed:
        values *= torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
    return values.view(-1)


def encoded(code, values, noise=None):
    codes = torch.zeros(values.numel() * code.bits // 8, dtype=torch.uint8)
    scales = torch.zeros(values.numel() // code.block)
    code.encode(values, codes, scales, noise)
    return code.decode(codes, scales)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_without_noise_the_nearest_code_is_taken(code):
    values = examples(code)
    grid = table(code)[0 if code.signed else 1:] * 1.5 / code.largest
    distances = (values.abs().double()[:, None] - grid).abs()
    found = encoded(code, values)
    assert torch.equal(found.sign()[found != 0], values.sign()[found != 0])
    error = (found.abs().double() - values.abs().double()).abs()
    assert (error <= distances.min(dim=1).values + 1e-6 * (values.abs() + 1.5 / code.largest)).all()


@pytest.mark.parametrize("code", CODES, ids=str)
def test_with_noise_the_mean_is_right(code):
    """Of 4000 draws, for values above the smallest code; always one of the two codes around the value."""
    draws, count = 4000, code.block
    value = examples(code, 1)
    grid = table(code) * 1.5 / code.largest
    total = torch.zeros(count, dtype=torch.float64)
    for draw in range(draws):
        found = encoded(code, value, noise_bits(0, count, mix_seed(draw), CPU)).double()
        total += found
        if draw < 20:
            above = torch.searchsorted(grid, value.abs().double() * (1 - 1e-6)).clamp(1, len(grid) - 1)
            low, high = grid[above - 1], grid[above]
            assert (found.abs() <= high * (1 + 1e-5)).all() and (found.abs() >= low * (1 - 1e-5)).all()
    fair = value.abs() >= (0.0 if code.signed else float(grid[1]))
    assert fair.sum() > 30
    step = (high - low)[fair]
    error = (total / draws - value.double())[fair].abs()
    assert (error <= 5 * 0.5 * step / math.sqrt(draws) + 1e-6 * value.abs()[fair]).all(), (error / step).max()


def test_code_is_as_wide_as_it_says():
    assert [code.bits for code in CODES] == [8, 8, 4, 4]
    assert Code(4, 3, True, 256).largest == table(Code(4, 3, True, 256))[-1]


# ---- noise -------------------------------------------------------------------------------------------------------------

def test_noise_does_not_depend_on_slices():
    whole = noise_bits(0, 1000, 5, CPU)
    parts = torch.cat([noise_bits(start, min(start + 130, 1000), 5, CPU) for start in range(0, 1000, 130)])
    assert torch.equal(whole, parts)


def test_noise_is_uniform_and_seeds_are_unrelated():
    count = 2**18
    seeds = [0, 1, 2, 2**31, 2**61, mix_seed(1, 2, 3), mix_seed(1, 2, 4)]
    drawn = torch.stack([noise_bits(0, count, seed, CPU) for seed in seeds])
    assert drawn.dtype == torch.int32 and drawn.min() >= 0 and drawn.max() < 2**NOISE_BITS
    for noise in drawn:
        bins = torch.bincount(noise >> (NOISE_BITS - 8), minlength=256).double()
        chi_square = ((bins - count / 256).square() / (count / 256)).sum().item()
        assert 150 < chi_square < 380, "255 degrees of freedom: 6 standard deviations"
        for bit in range(NOISE_BITS):
            assert abs(((noise >> bit) & 1).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(count), f"bit {bit}"
    centred = drawn.double() / 2**NOISE_BITS - 0.5
    correlation = centred @ centred.T / count * 12
    assert (correlation - torch.eye(len(seeds))).abs().max() < 6 / math.sqrt(count)
    for shift in (1, 2, 256):  # and neighbours
        assert (centred[:, shift:] * centred[:, :-shift]).mean(dim=1).abs().max() * 12 < 6 / math.sqrt(count)


def test_no_seed_replays_a_stretch_of_another():
    a, b = (noise_bits(0, 4096, seed, CPU) for seed in (mix_seed(0, 1, 1), mix_seed(0, 1, 2)))
    pairs_of = [set(zip(noise.tolist(), noise[1:].tolist(), strict=False)) for noise in (a, b)]
    assert not pairs_of[0] & pairs_of[1]


def test_mixed_seeds_differ():
    seeds = {mix_seed(a, b, c) for a in range(12) for b in range(12) for c in range(12)}
    assert len(seeds) == 12**3
    assert min(seeds) >= 0 and max(seeds) < 2**62


# ---- stochastic rounding -------------------------------------------------------------------------------------------------

def rounded(values, seed=0, start=0):
    target = torch.empty(values.numel(), dtype=torch.bfloat16)
    stochastic_round_(target, values, seed, start)
    return target


def test_rounding_is_exact_for_what_bfloat16_has():
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-126, 3.0e38, math.inf, -math.inf]).to(torch.bfloat16)
    for seed in range(50):
        found = rounded(values.float(), mix_seed(seed))
        assert torch.equal(found, values) and torch.equal(found.signbit(), values.signbit())


def test_rounding_keeps_nan():
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, -0x400000], dtype=torch.int32)
    for seed in range(50):
        assert rounded(bits.view(torch.float32), mix_seed(seed)).isnan().all()


def test_rounding_goes_to_a_neighbour_and_is_right_on_average():
    draws = 4000
    values = torch.randn(200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 3, 200)
    low = (values.view(torch.int32) & -65536).view(torch.float32).double()  # towards 0
    ulp = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32).double() - low
    total = torch.zeros(200, dtype=torch.float64)
    for seed in range(draws):
        found = rounded(values, mix_seed(seed)).double()
        total += found
        assert ((found == low) | (found == low + ulp)).all(), "never more than one unit in the last place"
    error = (total / draws - values.double()).abs() / ulp.abs()
    assert error.max() < 5 * 0.5 / math.sqrt(draws), error.max()


def test_rounding_does_not_depend_on_slices():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    parts = torch.cat([rounded(values[start:start + 300], 9, start) for start in range(0, 1000, 300)])
    assert torch.equal(rounded(values, 9), parts)


@pytest.mark.parametrize(("rule", "bits"), [("adamw", 32), ("adamw", 8), ("adamw", 4)])
def test_bfloat16_weights_move_as_float32_ones(rule, bits):
    """Case B5. 50 updates of learning rate 1e-4 on weights of size 1, whose bfloat16 neighbours are 80 times as far."""
    def moved(optimizer_of, dtype):
        parameter = torch.nn.Parameter(torch.linspace(1.0, 1.9, 64 * 256).view(64, 256).to(torch.bfloat16).to(dtype))
        start, optimizer = parameter.detach().double(), optimizer_of([parameter])
        for step in range(50):
            noise = torch.randn(64, 256, generator=torch.Generator().manual_seed(step))
            parameter.grad = (1.0 + 0.1 * noise).to(dtype)
            optimizer.step()
        return parameter.detach().double() - start

    wanted = moved(lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.0), torch.float32).mean().item()
    assert wanted == pytest.approx(-50e-4, rel=0.02)
    found = moved(lambda p: make(p, rule, bits, lr=1e-4), torch.bfloat16)
    assert found.mean().item() == pytest.approx(wanted, rel=0.03)
    assert not moved(lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.0), torch.bfloat16).any(), "plain AdamW"


# ---- slices and layouts ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("rule", "bits"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_any_size_give_the_same_bits(rule, bits, dtype, monkeypatch):
    found = []
    for size in (2**18, 256, 768):
        monkeypatch.setattr(rule_module, "SLICE", size)
        parameters = make_parameters(*SHAPES, dtype=dtype)
        train(make(parameters, rule, bits), parameters, 5)
        found.append(parameters)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            if rule == "adafactor":  # its sums over a matrix are added up by slices
                assert (one - other).abs().max() <= (1e-5 if dtype == torch.float32 else 0.04)
            else:
                assert torch.equal(one, other)


@pytest.mark.parametrize(("rule", "bits"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout(rule, bits, dtype):
    plain, weights, gradients = (make_parameters((24, 40), dtype=dtype) for _ in range(3))
    odd = torch.nn.Parameter(weights[0].detach().t().contiguous().t())
    assert not odd.is_contiguous()
    optimizers = [make([p], rule, bits) for p in (plain[0], odd, gradients[0])]
    for step in range(1, 6):
        for p in (plain[0], odd, gradients[0]):
            set_gradients([p], step)
        gradients[0].grad = gradients[0].grad.t().contiguous().t()
        assert not gradients[0].grad.is_contiguous()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(plain[0], odd) and torch.equal(plain[0], gradients[0])
    assert not torch.equal(plain[0], make_parameters((24, 40), dtype=dtype)[0])


@pytest.mark.parametrize(("rule", "bits"), KINDS)
def test_parameters_without_gradient_stay_as_they_are(rule, bits):
    moving, frozen, idle = make_parameters((4, 8), (4, 8), (4, 8))
    frozen.requires_grad_(False)
    optimizer = make([moving, frozen, idle], rule, bits)
    before = [p.detach().clone() for p in (moving, frozen, idle)]
    set_gradients([moving], 1)
    optimizer.step()
    assert [torch.equal(p, q) for p, q in zip((moving, frozen, idle), before, strict=True)] == [False, True, True]
    assert list(optimizer.state) == [moving]


def test_each_parameter_counts_its_own_updates():
    """One that joins late starts its bias correction then."""
    late, alone = make_parameters((4, 8)), make_parameters((4, 8))
    other = make_parameters((4, 8), seed=9)
    optimizer, reference = make([*other, *late]), make(alone)
    for step in range(1, 6):
        set_gradients(other, step)
        if step > 2:
            set_gradients(late, step)
            set_gradients(alone, step)
            reference.step()
        optimizer.step()
    assert torch.equal(late[0], alone[0])


def test_a_closure_is_called_with_gradients_on():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make([parameter])

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert parameter.max() < 1.0


def test_groups_have_their_own_rate_and_decay():
    one, two = make_parameters((4, 8), (4, 8))
    two.data.copy_(one)
    optimizer = make([{"params": [one], "weight_decay": 0.5}, {"params": [two], "lr": 0.0, "weight_decay": 0.5}])
    before = two.detach().clone()
    set_gradients([one, two], 1)
    optimizer.step()
    assert torch.equal(two, before) and not torch.equal(one, before)


# ---- seeds, files, scaler ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bits", [32, 8])
def test_the_seed_decides_the_rounding(bits):
    """Two processes with the same gradients and seed stay equal; another seed rounds otherwise."""
    found = []
    for seed in (3, 3, 4):
        parameters = make_parameters(*SHAPES, dtype=torch.bfloat16)
        torch.manual_seed(len(found))  # the global generator plays no part
        before = torch.get_rng_state()
        train(make(parameters, bits=bits, seed=seed), parameters, 5)
        assert torch.equal(before, torch.get_rng_state())
        found.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


def two_processes(folder):
    """Each process its own gradients, averaged by DistributedDataParallel."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 64, bias=False).to(torch.bfloat16)
    optimizer = make(model.parameters(), bits=8, lr=1e-3, seed=1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(5):
        # each process sees other rows
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + accelerator.process_index))
        accelerator.backward(model(x.to(torch.bfloat16)).float().square().sum())
        optimizer.step()
        optimizer.zero_grad()
    state = {"weight": model.module.weight.detach(), "state": optimizer.state_dict()["state"][0]}
    torch.save(state, f"{folder}/{accelerator.process_index}.pt")


def test_two_processes_stay_equal(tmp_path):
    from accelerate import debug_launcher
    from jobs import differences, reset_accelerate

    reset_accelerate()
    debug_launcher(two_processes, (str(tmp_path),), num_processes=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert not differences(one, two)
    torch.manual_seed(0)
    assert not torch.equal(one["weight"], torch.nn.Linear(32, 64, bias=False).to(torch.bfloat16).weight)


def assert_state_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize(("rule", "bits"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_it_goes_on_bit_for_bit(rule, bits, dtype, tmp_path):
    parameters = make_parameters(*SHAPES, dtype=dtype)
    optimizer = make(parameters, rule, bits, seed=5)
    train(optimizer, parameters, 3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    loaded = make(others, rule, bits, seed=5)
    loaded.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    dtypes = {name: value.dtype for name, value in optimizer.state[parameters[1]].items() if name != "step"}
    assert {torch.float32} <= set(dtypes.values()) <= {torch.float32, torch.uint8}
    assert (torch.uint8 in dtypes.values()) == (bits != 32)
    for one, other in zip(parameters, others, strict=True):
        assert_state_equal(optimizer.state[one], loaded.state[other])
    train(optimizer, parameters, 3, first=4)
    train(loaded, others, 3, first=4)
    for one, other in zip(parameters, others, strict=True):
        assert torch.equal(one, other)
        assert_state_equal(optimizer.state[one], loaded.state[other])


def test_loaded_state_is_taken_over():
    """As by torch's own optimizers: a copy would be a second state in memory while a run resumes."""
    for kind in (make, torch.optim.AdamW):
        parameters, others = make_parameters((4, 8)), make_parameters((4, 8))
        optimizer, loaded = kind(parameters), kind(others)
        train(optimizer, parameters, 1)
        saved = optimizer.state_dict()
        loaded.load_state_dict(saved)
        assert loaded.state[others[0]]["exp_avg"].data_ptr() == saved["state"][0]["exp_avg"].data_ptr()


@pytest.mark.parametrize("bits", [8, 4])
def test_through_accelerates_checkpoint(bits, tmp_path):
    from accelerate import Accelerator
    from jobs import reset_accelerate

    def start():
        reset_accelerate()
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 33).to(torch.bfloat16)
        model, optimizer = accelerator.prepare(model, make(model.parameters(), bits=bits, lr=1e-3))
        return accelerator, model, optimizer

    def go(model, optimizer, first):
        train(optimizer, list(model.parameters()), 3, first)

    accelerator, model, optimizer = start()
    go(model, optimizer, 1)
    accelerator.save_state(str(tmp_path / "saved"))
    go(model, optimizer, 4)
    other, other_model, other_optimizer = start()
    other.load_state(str(tmp_path / "saved"))
    go(other_model, other_optimizer, 4)
    for one, two in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(one, two)
        assert_state_equal(optimizer.optimizer.state[one], other_optimizer.optimizer.state[two])
    reset_accelerate()


def test_the_state_of_another_optimizer_is_refused():
    parameters = make_parameters((4, 8))
    saved = {kind: make(parameters, *kind) for kind in KINDS}
    for kind, optimizer in saved.items():
        train(optimizer, parameters, 1)
        for other in KINDS:
            loading = make(make_parameters((4, 8)), *other)
            if other == kind:
                loading.load_state_dict(optimizer.state_dict())
                continue
            with pytest.raises(BadInput, match=f"{kind[0]} with {kind[1]} bits: want {other[0]} with {other[1]} bits"):
                loading.load_state_dict(optimizer.state_dict())
    plain = torch.optim.AdamW(parameters)
    with pytest.raises(BadInput, match="another optimizer: want adamw with 8 bits"):
        make(parameters, "adamw", 8).load_state_dict(plain.state_dict())


def test_unknown_bits_are_refused():
    with pytest.raises(ValueError, match="state_bits=16: want 32, 8 or 4"):
        make(make_parameters((4, 8)), bits=16)


@pytest.mark.parametrize(("rule", "bits"), KINDS)
def test_an_overflow_under_a_scaler_moves_nothing(rule, bits):
    parameters = make_parameters(*SHAPES)
    optimizer, scaler = make(parameters, rule, bits), torch.amp.GradScaler("cpu", init_scale=8.0)
    for overflow in (False, True, False):
        before = [p.detach().clone() for p in parameters]
        state = copy.deepcopy(optimizer.state_dict()["state"])
        set_gradients(parameters, 1)
        scaler.scale(torch.ones(1))
        for p in parameters:
            p.grad.mul_(scaler.get_scale())
        if overflow:
            parameters[0].grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True)) == overflow
        if overflow:
            for name, entry in state.items():
                assert_state_equal(entry, optimizer.state_dict()["state"][name])
            assert scaler.get_scale() == 4.0


# ---- bytes ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("rule", "bits", "wanted"), [
    ("adamw", 32, 8.0), ("adamw", 8, 2 + 8 / 256), ("adamw", 4, 1 + 8 / 128), ("lion", 32, 4.0), ("lion", 8, 1 + 4 / 256),
    ("lion", 4, 0.5 + 4 / 128), ("adafactor", 32, 4 * (1 / 512 + 1 / 256))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_bytes_per_parameter(rule, bits, wanted, dtype):
    parameters = make_parameters((256, 512), dtype=dtype)
    optimizer = make(parameters, rule, bits)
    train(optimizer, parameters, 2)
    total = sum(value.nbytes for value in optimizer.state[parameters[0]].values() if isinstance(value, torch.Tensor))
    assert total / parameters[0].numel() == wanted


@pytest.mark.parametrize(("rule", "bits"), [*KINDS, ("torch", 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_is_a_few_slices(rule, bits, dtype, peak_bytes, monkeypatch):
    """Above the state, once it exists: float32 slices, and not a parameter's worth; torch's fused AdamW needs none."""
    assert 12 * 4 * rule_module.SLICE < 2**24, "16 MiB: nothing beside a model of a size that matters"
    monkeypatch.setattr(rule_module, "SLICE", 2**12)
    parameters = make_parameters((512, 512), (300, 100), dtype=dtype)
    optimizer = torch.optim.AdamW(parameters, fused=True) if rule == "torch" else make(parameters, rule, bits)
    train(optimizer, parameters, 1)
    peak = peak_bytes(optimizer.step)
    slices = peak / (4 * 2**12)
    assert slices <= 12, f"{slices:.1f} slices"
    assert 2 * peak < parameters[0].nbytes
