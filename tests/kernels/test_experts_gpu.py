"""Experts by the GPU's kernels, in the interpreter where there is no GPU."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from on_device import DEVICE, arange, full, ones, rand, randn
from paged_world import relative_error
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from holdfast.kernels import experts_gpu
from holdfast.kernels.attention_gpu import INTERPRETED
from holdfast.kernels.experts import Routing, experts_reference, route
from holdfast.kernels.experts_gpu import ExpertTimes, GpuExperts, choose_experts, route_gpu
from holdfast.kernels.quantized import E8M0, FP8, QuantizedWeight, Weight, concatenated, quantized

# The interpreter cuts numbers to bfloat16 instead of rounding them: twice the error, and all of one sign.
SINGLE, HALF = (1e-6, 1e-2) if INTERPRETED else (1e-5, 5e-3)
TOLERANCE = {torch.float32: SINGLE, torch.bfloat16: HALF, torch.float16: 1e-3}
EXPERTS, CHOSEN, WIDTH, INNER = 5, 2, 40, 24


def plain(experts: int, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (randn(experts, outputs, inputs) * inputs**-0.5).to(dtype)


FORMATS = {
    "fp8": ("e4m3", (128, 128), torch.float32),
    "channels": ("e4m3", (1, 1024), torch.float32),
    "mxfp4": ("e2m1", (1, 32), E8M0),
    "nvfp4": ("e2m1", (1, 16), FP8),
    "int4": ("uint4", (1, 32), torch.float16),
}


def stored(kind: str, *sizes: int) -> QuantizedWeight:
    made = [quantized(each.cpu(), *FORMATS[kind]).to(DEVICE) for each in plain(*sizes)]
    return concatenated(made, experts=True)


def tokens(count: int, width: int = WIDTH, dtype: torch.dtype = torch.float32, experts: int = EXPERTS):
    """x, and what each token chooses."""
    chosen = rand(count, experts).topk(min(CHOSEN, experts)).indices.int()
    return randn(count, width).to(dtype), chosen, rand(chosen.shape)


def exact(weight: Weight) -> torch.Tensor:
    return weight.to("cpu").dequantized(torch.float64).to(DEVICE) if isinstance(weight, QuantizedWeight) else weight


@pytest.mark.parametrize(
    ("activation", "dtype", "count", "experts"),
    [
        ("silu", torch.float32, 4, EXPERTS),
        ("gelu_tanh", torch.bfloat16, 22, EXPERTS),  # 16, 64 and 128 pairs of an expert at a time
        ("relu2", torch.float16, 100, 1),
        ("clamped", torch.float32, 2, EXPERTS),
        ("clamped", torch.float32, 0, EXPERTS),
    ],
)
def test_a_layer_is_its_reference(activation, dtype, count, experts):
    torch.manual_seed(0)
    halves = 1 if activation == "relu2" else 2
    made = [plain(experts, halves * INNER, WIDTH, dtype), plain(experts, WIDTH, INNER, dtype)]
    biases = [randn(each.shape[:2]).to(dtype) for each in made] if activation != "silu" else (None, None)
    wide, chosen, weights = tokens(count, WIDTH + 8, dtype, experts)
    x, plus = 4 * wide[:, :WIDTH], randn(count, WIDTH).to(dtype)
    y = GpuExperts(*made, activation, *biases)(x, chosen if biases[0] is None else chosen.long(), weights, plus)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    reference = experts_reference(x, chosen, weights, *made, activation, *biases) + plus
    assert not count or relative_error(y, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", list(FORMATS))
def test_quantised_weights_are_those_that_they_stand_for(kind):
    torch.manual_seed(0)
    made = [stored(kind, 2, 2 * 96, 160), stored(kind, 2, 160, 96)]
    layer = GpuExperts(*made, "silu")
    for dtype, count in ((torch.float32, 1), (torch.bfloat16, 10)):  # 16 and 64 pairs of an expert at a time
        x, chosen, weights = tokens(count, 160, dtype, experts=2)
        reference = experts_reference(x, chosen, weights, *map(exact, made), "silu")
        rounded = torch.bfloat16 if kind == "int4" else dtype  # the kernel does not read it
        assert relative_error(layer(x, chosen, weights), reference) < TOLERANCE[rounded]


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
def test_every_code_is_its_number(kind):
    """Unit vectors go through the first product as they are, and the second one shows its weights."""
    codes = torch.arange(128 * 128).view(1, 128, 128).to(torch.uint8)
    if kind == "fp8":  # one code and its negative stand for no number
        codes = torch.where(codes & 0x7F == 0x7F, 0, codes)
        weight = QuantizedWeight("e4m3", codes, torch.rand(1, 1, 1), (128, 128))
    elif kind == "mxfp4":
        scales = torch.arange(128 * 4).view(1, 128, 4) % 126 + 66  # all from 2^-61 to 2^64
        weight = QuantizedWeight("e2m1", codes[:, :, :64], scales.to(torch.uint8).view(E8M0), (1, 32))
    else:
        scales = (torch.arange(128 * 8).view(1, 128, 8) % 127).to(torch.uint8).view(FP8)
        weight = QuantizedWeight("e2m1", codes[:, :, :64], scales, (1, 16), None, torch.rand(1, 128, 1))
    units, one = torch.eye(128, device=DEVICE), ones(128, 1)
    y = GpuExperts(units[None], weight.to(DEVICE), "relu2")(units, one.int() - 1, one)
    assert torch.equal(y.cpu(), weight.dequantized(torch.float32)[0].T)


def run(assembly: str, word: int, outputs: int) -> list[int]:
    """What a GPU's instructions make of a register."""
    registers = {f"${outputs}": word}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for instruction in filter(None, map(str.strip, assembly.strip("{} ").split(";"))):
        name, _, operands = instruction.partition(" ")
        into, *given = operands.split(", ")
        if name == "and.b32":
            registers[into] = value(given[0]) & value(given[1])
        elif name == "shl.b32":
            registers[into] = value(given[0]) << value(given[1]) & 0xFFFFFFFF
        elif name == "shr.u32":
            registers[into] = value(given[0]) >> value(given[1])
        elif name == "lop3.b32":
            assert given[3] == "0xEA"  # (a and b) or c
            registers[into] = value(given[0]) & value(given[1]) | value(given[2])
        else:
            assert name == ".reg"
    return [registers[f"${i}"] for i in range(outputs)]


@pytest.mark.parametrize("numbers", ["e4m3", "e2m1"])
def test_the_assembly_finds_the_numbers_in_their_words(numbers):
    """The interpreter does without it. Two words are in a register."""
    codes = torch.randint(0, 256, (1, 4, 64), dtype=torch.uint8)
    if numbers == "e4m3":
        codes = torch.where(codes & 0x7F == 0x7F, 0, codes)
        words, assembly, each, unit, run_of = experts_gpu._paired(codes), experts_gpu._TWO_NUMBERS, 2, 2.0**120, 8
        weight = QuantizedWeight("e4m3", codes, torch.ones(1, 1, 1), (4, 64))
    else:
        words, assembly, each, unit, run_of = experts_gpu._packed(codes, 16), experts_gpu._FOUR_NUMBERS, 4, 2.0**126, 4
        weight = QuantizedWeight("e2m1", codes, torch.ones(1, 1, 1), (4, 128))
    pairs = words.view(torch.int32).flatten().tolist()
    found = torch.tensor([run(assembly.value, pair & 0xFFFFFFFF, each) for pair in pairs])  # [pairs, numbers of a word]
    halves = torch.stack((found & 0xFFFF, found >> 16), 1).int() << 16  # float32's bits, [pairs, words, numbers]
    values = halves.view(torch.float32).reshape(-1, run_of, each).mT * unit
    assert torch.equal(values.reshape(weight.shape), weight.dequantized(torch.float32))


@pytest.mark.parametrize("kind", ["plain", "fp8", "mxfp4"])
def test_a_tokens_bits_depend_on_itself_alone(kind):
    torch.manual_seed(0)
    sizes = ((EXPERTS, 2 * 32, 64), (EXPERTS, 64, 32))
    layer = GpuExperts(*(plain(*each) if kind == "plain" else stored(kind, *each) for each in sizes), "silu")
    x, chosen, weights = tokens(20, 64)
    chosen[:, 0] = 0  # 17 pairs of one expert are two blocks
    x[17:], chosen[17:] = torch.nan, -1  # what fills a graph up
    plus = torch.randn_like(x)
    y = layer(x, chosen, weights, plus)
    assert torch.equal(y[17:], plus[17:])
    for part in (torch.randperm(20), slice(4, 5)):
        assert torch.equal(layer(x[part], chosen[part], weights[part], plus[part]), y[part])


def sized(value: object) -> object:
    if isinstance(value, list | tuple):
        return [sized(each) for each in value]
    return value.shape if isinstance(value, torch.Tensor) else value


class Operators(TorchDispatchMode):
    """Writes down torch's operators with the sizes of what they make. What waits for a device is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if any(part in name for part in ("local_scalar", "item", "nonzero", "unique", "masked_select", "bincount")):
            raise RuntimeError(f"{name} waits for the device")
        out = function(*args, **(kwargs or {}))
        self.seen.append((name, sized(out)))
        return out


class Launches:
    """A kernel whose grids and arguments are written down. What the interpreter does is not."""

    def __init__(self, kernel, seen: list[object]) -> None:
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self._seen.append((grid, *map(sized, arguments), *constants.values()))
            with _disable_current_modes():
                self._kernel[grid](*arguments, **constants)

        return launch


def test_graphs_can_capture_a_layer(monkeypatch):
    """Whatever is chosen, the same operators and launches have the same sizes, and none waits for the device."""
    torch.manual_seed(0)
    layer = GpuExperts(plain(EXPERTS, 48, 16, torch.bfloat16), plain(EXPERTS, 16, 24, torch.bfloat16), "silu")
    x, routing = randn(6, 16).bfloat16(), Routing(EXPERTS, CHOSEN, "softmax", True)
    operators = Operators()
    with operators, pytest.raises(RuntimeError, match="waits"):
        torch.ones(1).item()
    for name in ("_route", "_sort", "_multiply", "_sum"):
        monkeypatch.setattr(experts_gpu, name, Launches(getattr(experts_gpu, name), operators.seen))
    for layer.grouped_from in (7, 0):
        seen = []
        for logits in (randn(6, EXPERTS), arange(5.0).repeat(6, 1)):
            operators.seen.clear()
            with operators:
                layer(x, *route_gpu(logits, routing))
            seen.append(operators.seen.copy())
        assert seen[0] == seen[1]
        assert len(seen[0]) > 4


ROUTINGS = (
    Routing(12, 3, "softmax", True),
    Routing(12, 3, "softmax", False, scale=2.5),
    Routing(12, 5, "sigmoid", True, softcap=2.0),
    Routing(12, 3, "sigmoid", True, groups=4, kept_groups=2),
)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing_is_torchs(routing):
    torch.manual_seed(0)
    logits = 3 * randn(4, 12)
    for correction in (None, randn(12)):
        (chosen, weights), (theirs, exact_weights) = (way(logits, routing, correction) for way in (route_gpu, route))
        assert torch.equal(chosen, theirs)
        torch.testing.assert_close(weights, exact_weights, rtol=1e-5, atol=1e-7)


def test_whatever_the_logits_are_experts_that_exist_are_chosen():
    logits = full((3, 12), torch.nan)
    logits[1], logits[2] = 1.0, -torch.inf
    chosen, _ = route_gpu(logits, ROUTINGS[0])
    assert ((chosen >= 0) & (chosen < 12)).all()
    assert chosen[1].tolist() == [0, 1, 2]  # of equal ones the lower


def test_many_tokens_take_the_faster_way(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr("holdfast.kernels.experts_gpu._TIMED", (2, 4, 6))
    sizes = ((EXPERTS, 2 * 32, 64), (EXPERTS, 64, 32))
    dense = [GpuExperts(*(plain(*each, torch.bfloat16) for each in sizes), "silu") for _ in range(2)]
    single = GpuExperts(*(plain(*each) for each in sizes), "silu")
    times = iter([1.0, 0.5, 1.0, 1.0, 1.0, 0.5])  # by us and by torch, with each number of tokens
    timed = choose_experts([*dense, single], CHOSEN, lambda call: next(times))
    assert timed == [ExpertTimes(2, 1.0, 0.5), ExpertTimes(4, 1.0, 1.0), ExpertTimes(6, 1.0, 0.5)]
    assert [each.grouped_from for each in dense] == [6, 6]
    assert single.grouped_from == sys.maxsize


def test_torchs_grouped_product_computes_the_same():
    torch.manual_seed(0)
    made = [plain(2, 2 * 32, 160, torch.bfloat16), plain(2, 160, 32, torch.bfloat16)]
    layer = GpuExperts(*made, "clamped", *(randn(each.shape[:2]).bfloat16() for each in made))
    x, chosen, weights = tokens(6, 160, torch.bfloat16, experts=2)
    chosen[2, 1], chosen[3] = -1, -1
    ours = layer(x, chosen, weights)
    layer.grouped_from = 6
    assert relative_error(layer(x, chosen, weights), ours) < 1e-2  # each is rounded


def test_torchs_grouped_product_takes_weights_in_bfloat16_alone():
    sizes = ((EXPERTS, 64, 32), (EXPERTS, 32, 32))
    for make in (plain, partial(plain, dtype=torch.float16), partial(stored, "fp8")):
        assert not GpuExperts(*(make(*each) for each in sizes), "silu").groupable


def test_what_does_not_fit_is_refused():
    gate_up, down = plain(2, 64, 32), plain(2, 32, 32)
    layer, choice = GpuExperts(gate_up, down, "silu"), (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2))
    for x in (torch.zeros(3, 31), torch.zeros(2, 32)):
        with pytest.raises(ValueError, match="chosen"):
            layer(x, *choice)
    with pytest.raises(ValueError, match="not added"):
        layer(torch.zeros(3, 32), *choice, torch.zeros(3, 31))
    with pytest.raises(ValueError, match="in front of"):
        GpuExperts(gate_up, down, "relu2")
    with pytest.raises(ValueError, match="strides"):
        GpuExperts(gate_up.mT.contiguous().mT, down, "silu")
    with pytest.raises(ValueError, match="CPU"):
        GpuExperts(gate_up, down, "silu", int8=True)
    large = replace(stored("mxfp4", 2, 32, 32), scales=torch.full((2, 32, 1), 200, dtype=torch.uint8).view(E8M0))
    with pytest.raises(ValueError, match="beyond"):
        GpuExperts(stored("mxfp4", 2, 64, 32), large, "silu")
