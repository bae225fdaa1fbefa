"""The products of packed_layer_products.py, carried out statement by statement on the registers of warps, and on their
shared memory: no interpreter knows PTX."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from pagemill.model.kernels.packed import pack
from pagemill.model.kernels.triton.packed_layer_products import places, products
from tests.unit.model.kernels.packed_cases import exact, made

Registers = NDArray[Any]
"""Of one name, of the 32 threads of a warp."""
LANES = np.arange(32)
GROUP, PLACE = LANES // 4, LANES % 4
STAGES = 4
_TWO = {
    "and.b32": lambda a, b: a & b, "xor.b32": lambda a, b: a ^ b, "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b, "rem.u32": lambda a, b: a % b, "div.u32": lambda a, b: a // b,
    "min.u32": np.minimum, "add.u32": lambda a, b: a + b, "add.u64": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b, "mul.wide.u32": lambda a, b: a.astype(np.int64) * b.astype(np.int64),
    "or.pred": lambda a, b: a | b,
}  # fmt: skip
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "ge": np.greater_equal, "gt": np.greater}


def _half(pairs: Registers, half: int) -> Registers:
    return (pairs >> np.uint32(16 * half) << np.uint32(16)).view(np.float32)


@dataclass
class Warp:
    """Runs a block of PTX, as far as this one goes."""

    number: int
    registers: dict[str, Registers]
    inputs: NDArray[np.uint32]
    squares: NDArray[np.uint32]
    shared: NDArray[np.uint32]
    late: int = 0
    """So many looks at inputs find some of them missing."""
    labels: dict[str, int] = field(default_factory=dict)

    def run(self, text: str) -> None:
        statements: list[str] = []
        for part in re.split(r"[;\n]", text.strip()[1:-1]):
            found = part.strip()
            if re.fullmatch(r"\w+:", found):
                self.labels[found[:-1]] = len(statements)
            elif found and not found.startswith(".reg"):
                statements.append(found)
        place = 0
        while place < len(statements):
            place = self._step(statements[place], place + 1)

    def _step(self, statement: str, after: int) -> int:
        active = np.ones(32, bool)
        if statement[0] == "@":
            guard, statement = statement.split(None, 1)
            active = ~self.registers[guard[2:]] if guard[1] == "!" else self.registers[guard[1:]]
        name, _, rest = statement.partition(" ")
        if name == "bra":
            assert active.all() or not active.any()
            return self.labels[rest] if active.all() else after
        assert name != "trap" or not active.any()
        if name.startswith(("ld.", "st.")):
            self._move(name, rest, active)
        elif name.startswith("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"):
            self._multiply(*([part.strip() for part in found.split(",")] for found in re.findall(r"{([^}]*)}", rest)))
        elif name.startswith("mbarrier.try_wait"):
            self.registers["done"] = np.ones(32, bool)
        elif not name.startswith(("trap", "mbarrier", "bar.")):
            target, *names = (part.strip() for part in rest.split(","))
            self._write(target, self._computed(name, names), active)
        return after

    def _value(self, name: str) -> Registers:
        known = {"%tid.x": LANES + 32 * self.number, "global_smem": LANES * 0}
        if name in self.registers:
            return self.registers[name]
        if name in known:
            return known[name].astype(np.uint32)
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(32, number & 0xFFFFFFFF, np.uint32)

    def _write(self, target: str, value: Registers, active: NDArray[np.bool_]) -> None:
        if target in self.registers and not active.all():
            value = np.where(active, value, self.registers[target])
        self.registers[target] = value

    def _computed(self, name: str, names: list[str]) -> Registers:
        values = [self._value(one) for one in names]
        if name in _TWO:
            return _TWO[name](*values)
        if name.startswith(("mov", "cvt")):
            return values[0].astype(np.int64) if name.startswith("cvt") else values[0].copy()
        if name.startswith("vote.sync.any"):
            return np.full(32, values[0].any())
        if name.startswith("setp"):
            _, compare, *more, kind = name.split(".")
            pair = [value.view(np.float32) if kind == "f32" else value for value in values[:2]]
            result: Registers = _COMPARE[compare](*pair)
            return result & values[2] if more == ["and"] else result
        if name == "lop3.b32" and names[3] == "0x80":
            return values[0] & values[1] & values[2]
        if name == "mad.lo.u32":
            return values[0] * values[1] + values[2]
        if name == "mul.rn.bf16x2":
            low, high = ((_half(values[0], half) * _half(values[1], half)).view(np.uint32) for half in range(2))
            return low >> np.uint32(16) | high & np.uint32(0xFFFF0000)
        floats = [value.view(np.float32) for value in values]
        if name in {"add.f32", "mul.f32"}:
            return (floats[0] + floats[1] if name == "add.f32" else floats[0] * floats[1]).view(np.uint32)
        if name == "fma.rn.f32":
            return (floats[0] * floats[1] + floats[2]).view(np.uint32)
        raise NotImplementedError(name)

    def _move(self, name: str, rest: str, active: NDArray[np.bool_]) -> None:
        base, offset = re.findall(r"\[(\w+)\+(\d+)\]", rest)[0]
        names = [part.strip() for part in re.sub(r"\[.*?\]|[{}]", "", rest).split(",") if part.strip()]
        begin = np.where(active, (self.registers[base].astype(np.int64) + int(offset)) // 4, 0)
        memory = self.shared if ".shared" in name else self.squares if base == "ph" else self.inputs
        missing = base == "px" and offset == "0" and self.late > 0
        self.late -= missing
        for index, one in enumerate(names):
            if name.startswith("st."):
                memory[begin[active] + index] = self.registers[one][active]
            else:
                self._write(one, memory[begin + index] * np.uint32(not missing), active)

    def _multiply(self, targets: list[str], left: list[str], right: list[str], sums: list[str]) -> None:
        """The layouts of the PTX manual."""
        first, second, result = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for index, name in enumerate(left):
            for half in range(2):
                first[GROUP + index % 2 * 8, index // 2 * 8 + 2 * PLACE + half] = _half(self._value(name), half)
        for index, name in enumerate(right):
            for half in range(2):
                second[index * 8 + 2 * PLACE + half, GROUP] = _half(self._value(name), half)
        for index, name in enumerate(sums):
            result[GROUP + index // 2 * 8, 2 * PLACE + index % 2] = self._value(name).view(np.float32)
        result += first @ second
        for index, name in enumerate(targets):
            found = result[GROUP + index // 2 * 8, 2 * PLACE + index % 2]
            self.registers[name] = found.astype(np.float32).view(np.uint32)


def _words(x: torch.Tensor) -> NDArray[np.uint32]:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1).view(np.uint32)


def _given(x: torch.Tensor) -> torch.Tensor:
    """As a program writes what others multiply."""
    wide = x.float() * torch.where(torch.arange(x.shape[1]) // 32 % 2 == 1, 2.0**60, 2.0**64)
    return torch.where(wide.abs() < 2, 2.0, wide).bfloat16()


class Tiles:
    """In a ring, as the copy engine writes them: lines of 128 bytes, and of 64, swizzled."""

    def __init__(self, rows: int, warps: int, first: int, count: int) -> None:
        self.places = [1024 * place for place in places(STAGES, rows, warps)]
        self.shared = np.ones(self.places[4] // 4, np.float32).view(np.uint32)
        values, scales, _ = made(64, 4096, 128, 4, False)
        self.weights = []
        for number in range(count):
            turned = torch.roll(values, number, 0)
            self._place((first + number) % STAGES, pack(turned, scales, None, 128, 4))
            self.weights.append(exact(turned, scales, None, 128)[16:32])

    def _place(self, stage: int, weight: Any) -> None:
        words = weight.words.view(torch.int32).numpy().view(np.uint32)[0, :, 16:32].reshape(32, 8, 8, 4)
        scales = weight.scales.numpy().astype(np.float32)[:, 16:32].reshape(32, 4, 4).view(np.uint32)
        for line in range(8):
            for chunk in range(8):
                begin = stage * 8192 + np.arange(32) * 256 + line * 32 + (chunk ^ line) * 4
                self.shared[begin[:, None] + np.arange(4)] = words[:, line, chunk]
        for chunk in range(4):
            begin = self.places[0] // 4 + stage * 512 + np.arange(32) * 16 + (chunk ^ np.arange(32) // 2 % 4) * 4
            self.shared[begin[:, None] + np.arange(4)] = scales[:, chunk]


@pytest.mark.parametrize(
    ("rows", "warps", "size", "quad", "count", "skipped", "flags"),
    [
        (1, 8, 4096, 0, 4, 6, 1 + 4), (1, 8, 12288, 2, 2, 0, 1 + 2), (1, 16, 6144, 1, 2, 0, 1),
        (2, 8, 8192, 1, 2, 0, 2), (3, 8, 6144, 1, 2, 0, 1 + 2), (8, 8, 4096, 0, 3, 0, 1 + 4),
    ],
)  # fmt: skip
def test_products_of_tiles(rows: int, warps: int, size: int, quad: int, count: int, skipped: int, flags: int):
    held = 1 << (rows - 1).bit_length()
    first = 3
    tiles = Tiles(held, warps, first, count)
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0, 5] = 0
    squares = (np.random.default_rng(0).random((8, 256)) + 1).astype(np.float32)
    text = products(held, warps, STAGES, True)
    given = (quad * 8192, rows - 1, 9, 0, 2 * size, size // 128 - 32 * quad, count, first, skipped, flags)
    for warp in range(warps):
        operands = {f"${index + 1}": np.full(32, value, np.uint32) for index, value in enumerate(given)}
        operands |= {name: operands[name].astype(np.int64) for name in ("$1", "$4")}
        memory = _words(_given(x) if flags & 1 else x), squares.reshape(-1).view(np.uint32), tiles.shared
        Warp(warp, operands, *memory, late=3 if flags & 1 else 0).run(text)
    known = torch.zeros(held, 4096, dtype=torch.float64)
    part = x[:, quad * 4096 : quad * 4096 + 4096].double()
    known[:, : part.shape[1]] = part[np.minimum(np.arange(held), rows - 1)]
    for number, weight in enumerate(tiles.weights):
        slot = number + (skipped if number >= count // 2 else 0)
        begin = tiles.places[1] // 4 + slot * warps * 16 * held
        found = tiles.shared[begin : begin + warps * 16 * held].view(np.float32).reshape(warps, 16, held).sum(0)
        before = warps if flags & 2 else 0
        np.testing.assert_allclose(found - before, (weight.double() @ known.T).numpy(), rtol=1e-4, atol=3e-6)
    kept = tiles.shared[tiles.places[3] // 4 :].view(np.float32).reshape(held, 256)[:rows]
    np.testing.assert_array_equal(kept, squares[:rows] if flags & 4 else 1)


def test_inputs_that_never_come():
    tiles = Tiles(1, 8, 0, 1)
    operands = {
        f"${index + 1}": np.full(32, value, np.uint32) for index, value in enumerate((0, 0, 9, 0, 0, 32, 1, 0, 0, 1))
    }
    operands |= {name: operands[name].astype(np.int64) for name in ("$1", "$4")}
    nothing = np.zeros(2048, np.uint32)
    with pytest.raises(AssertionError):
        Warp(0, operands, nothing, nothing, tiles.shared).run(products(1, 8, STAGES, True))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-30, 1e38])
def test_every_value_shows_that_it_is_there(value: float):
    words = _words(_given(torch.full((1, 64), value).bfloat16()))
    assert ((words & 0x40004000) == 0x40004000).all()
