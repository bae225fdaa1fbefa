"""The products of packed_layer_asm.py, carried out statement by statement on the registers of a warp: no interpreter
knows PTX."""

import re

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from pagemill.model.kernels.packed import pack
from pagemill.model.kernels.triton.packed_layer_asm import FIRST_SUM, PRODUCT
from tests.unit.model.kernels.packed_cases import exact, made

Registers = NDArray[np.uint32]
"""Of one name, of the 32 threads of a warp."""
LANES = np.arange(32)
GROUP, PLACE = LANES // 4, LANES % 4


class Warp:
    """Runs a block of PTX, as far as these two go."""

    def __init__(self, inputs: list[Registers], num_results: int) -> None:
        self._registers = {f"${num_results + index}": value for index, value in enumerate(inputs)}
        self._num_results = num_results

    def run(self, text: str) -> list[NDArray[np.float32]]:
        """What the first operands are in the end."""
        for statement in text.strip()[1:-1].split(";"):
            name, _, rest = statement.strip().partition(" ")
            if name and name != ".reg":
                self._do(name, rest)
        return [self._registers[f"${index}"].view(np.float32) for index in range(self._num_results)]

    def _value(self, name: str) -> Registers:
        if name in self._registers:
            return self._registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(32, number, np.uint32)

    def _do(self, name: str, rest: str) -> None:
        if name.startswith("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"):
            self._multiply(*([part.strip() for part in found.split(",")] for found in re.findall(r"{([^}]*)}", rest)))
            return
        target, *names = (part.strip() for part in rest.split(","))
        values = [self._value(part) for part in names]
        if name.startswith("mov."):
            self._registers[target] = values[0]
        elif name == "shr.u32":
            self._registers[target] = values[0] >> values[1]
        elif name == "lop3.b32" and names[3] == "0xea":
            self._registers[target] = values[0] & values[1] | values[2]
        elif name == "add.f32":
            self._registers[target] = (values[0].view(np.float32) + values[1].view(np.float32)).view(np.uint32)
        else:
            raise NotImplementedError(name)

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
            self._registers[name] = found.astype(np.float32).view(np.uint32)


def _half(pairs: Registers, half: int) -> NDArray[np.float32]:
    return (pairs >> np.uint32(16 * half) << np.uint32(16)).view(np.float32)


def registers(values: NDArray[np.uint32]) -> list[Registers]:
    """[16, 16] -> 8 of each thread: four of two rows, 8 apart."""
    parts = values.reshape(2, 8, 4, 4)
    return [np.ascontiguousarray(parts[half, :, :, index]).reshape(32) for half in range(2) for index in range(4)]


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_products_of_16_outputs_and_128_inputs(num_rows: int):
    values, scales, _ = made(64, 128, 128, 4, False)
    weight = pack(values, scales, None, 128, 4)
    words = weight.words.view(torch.int32).numpy().view(np.uint32)[0, 0, 16:32]
    x = torch.randn(num_rows, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    planes = x.view(torch.int32).numpy().view(np.uint32).reshape(num_rows, 4, 16)
    row = np.arange(16) % num_rows
    low, high = (registers(planes[row, plane + np.arange(16) // 8]) for plane in (0, 2))
    first = Warp([*low, *high], 8).run(FIRST_SUM.value)
    begins = [value.view(np.uint32) for value in first]
    found = Warp([*registers(words), *low, *high, *begins], 8).run(PRODUCT.value)
    sums = np.zeros((16, 16))
    for index, value in enumerate(found):
        sums[GROUP + index // 4 * 8, 4 * PLACE + index % 4] = value
    # Of a thread's four columns the first and the third are of one row, the others of another one.
    columns = sums.reshape(16, 4, 2, 2).sum(2).reshape(16, 8)
    result = columns.reshape(16, 8 // num_rows, num_rows).mean(1)
    expected = exact(values, torch.ones_like(scales), None, 128)[16:32].double() @ x.double().T
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-5, atol=1e-3)
