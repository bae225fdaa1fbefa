"""`FakeCublas`: cuBLASLt without a GPU. It does on the host what NVIDIA's documentation says, columns first; the
settings of an algorithm are nine numbers in its bytes."""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill.model.kernels import eight_bits, fp8
from pagemill.model.kernels.cublas_lt import CONFIG_TYPES, Algo, Kind
from pagemill.model.quantization import fp8_blocks

OFFERED = {
    "algorithm": 66, "tile": 20, "split": 1, "reduction": 0, "swizzle": 0, "custom": 3, "stages": 36, "inner": 0,
    "cluster": 7,
}  # fmt: skip
"""What the heuristic has to offer."""
TILES, STAGES = (20, 24), (36,)
REFUSED_CLUSTER, UNSUPPORTED_CLUSTER = 12, 9
REFUSED_TILE = 27
NOT_SUPPORTED, INVALID_VALUE = 15, 7
NUMPY: dict[int, Any] = {14: np.uint16, 28: np.uint8}


def number(value: Any) -> int:
    """Of a C number or an int."""
    return int(getattr(value, "value", value) or 0)


def algo_of(settings: dict[str, int]) -> Algo:
    """With these settings in its bytes."""
    packed = np.zeros(16, np.uint32)
    packed[: len(settings)] = list(settings.values())
    return Algo.from_buffer_copy(packed.tobytes())


def settings_of(algo: Algo) -> dict[str, int]:
    """Those in its bytes."""
    return dict(zip(CONFIG_TYPES, np.frombuffer(bytes(algo), np.uint32)[:9].tolist(), strict=True))


class FakeCublas:
    """`offers`: the heuristic's algorithms, by their settings and states; `workspace`: bytes that one asks for."""

    def __init__(self, offers: list[tuple[dict[str, int], int]] | None = None, workspace: int = 64) -> None:
        self.offers = [(OFFERED, 0), (OFFERED | {"tile": 24}, NOT_SUPPORTED)] if offers is None else offers
        self.workspace = workspace
        self.made: dict[int, dict[Any, Any]] = {}
        self.destroyed: list[int] = []
        self.asked = 0
        self.ran: list[tuple[dict[str, int], int, int]] = []
        """Settings, bytes of workspace, and stream of each product."""

    def new(self, reference: Any, **values: Any) -> int:
        """A handle, and what is known of it."""
        reference._obj.value = len(self.made) + 1
        self.made[len(self.made) + 1] = values
        return 0

    def cublasLtCreate(self, handle: Any) -> int:
        return self.new(handle)

    def cublasLtMatmulDescCreate(self, desc: Any, compute: int, scale: int) -> int:
        return self.new(desc, compute=compute, scale=scale)

    def cublasLtMatmulDescSetAttribute(self, desc: Any, attribute: int, value: Any, size: Any) -> int:
        sizes = {25: 1, 17: 8, 18: 8}
        if number(size) != sizes.get(attribute, 4):
            return INVALID_VALUE
        self.made[number(desc)][attribute] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, layout: Any, dtype: int, rows: Any, columns: Any, leading: Any) -> int:
        return self.new(layout, dtype=dtype, rows=number(rows), columns=number(columns), leading=number(leading))

    def cublasLtMatmulPreferenceCreate(self, preference: Any) -> int:
        return self.new(preference)

    def cublasLtMatmulPreferenceSetAttribute(self, preference: Any, attribute: int, value: Any, size: Any) -> int:
        self.made[number(preference)][attribute] = value._obj.value
        return 0 if number(size) == 8 else INVALID_VALUE

    def cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:
        self.destroyed.append(number(preference))
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        most, results, count = arguments[-3:]
        self.asked += 1
        for place, (settings, state) in enumerate(self.offers[:most]):
            results[place].algo = algo_of(settings)
            results[place].state = state
        count._obj.value = min(most, len(self.offers))
        return 0

    def cublasLtMatmulAlgoCheck(self, *arguments: Any) -> int:
        algo, result = arguments[-2]._obj, arguments[-1]._obj
        settings = settings_of(algo)
        result.workspace = self.workspace * settings["split"]
        result.state = 0
        refused = settings["cluster"] == UNSUPPORTED_CLUSTER or settings["tile"] == REFUSED_TILE
        return NOT_SUPPORTED if refused else 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algo: Any, attribute: int, value: Any, *_: Any) -> int:
        value._obj.value = list(settings_of(algo._obj).values())[attribute]
        return 0

    def cublasLtMatmulAlgoConfigSetAttribute(self, algo: Any, attribute: int, value: Any, size: Any) -> int:
        name = list(CONFIG_TYPES)[attribute]
        if number(size) != (2 if name in ("inner", "cluster") else 4):
            return INVALID_VALUE
        if name == "cluster" and value._obj.value == REFUSED_CLUSTER:
            return INVALID_VALUE
        algo._obj.data = algo_of(settings_of(algo._obj) | {name: value._obj.value}).data
        return 0

    def cublasLtMatmulAlgoCapGetAttribute(self, _: Any, attribute: int, value: Any, size: Any, written: Any) -> int:
        lists = {6: TILES, 13: STAGES}
        if attribute not in lists:
            value._obj.value = {0: 1, 1: 2, 2: 1, 7: 4}[attribute]
        elif value is None:
            written._obj.value = 4 * len(lists[attribute])
        else:
            value[:] = lists[attribute]
        return 0

    def cublasLtMatmul(self, *arguments: Any) -> int:
        _, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algo, workspace, room, stream = (
            arguments
        )
        known = self.made[number(desc)]
        right_numbers = (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        if not right_numbers or (number(c), number(c_layout)) != (number(d), number(d_layout)):
            return INVALID_VALUE
        if known[3] != 1 or known[4] != 0 or (number(room) > 0) != (number(workspace) > 0):
            return INVALID_VALUE
        left, right = self._matrix(a, a_layout), self._matrix(b, b_layout)
        if 31 in known:
            left = left * _factors(known[17], known[31], left.shape)
            right = right * _factors(known[18], known[32], right.shape)
        product = (left.T @ right).to(torch.bfloat16)
        self._bits(d, d_layout)[:] = product.view(torch.int16).numpy().view(np.uint16)
        self.ran.append((settings_of(algo._obj), number(room), number(stream)))
        return 0

    def _bits(self, address: Any, handle: Any) -> Any:
        """A matrix where it lies, columns first."""
        layout = self.made[number(handle)]
        kind = NUMPY[layout["dtype"]]
        count = layout["columns"] * layout["leading"]
        memory = (ctypes.c_uint8 * (count * np.dtype(kind).itemsize)).from_address(number(address))
        return np.frombuffer(memory, kind).reshape(layout["columns"], layout["leading"])[:, : layout["rows"]].T

    def _matrix(self, address: Any, handle: Any) -> torch.Tensor:
        bits = np.ascontiguousarray(self._bits(address, handle))
        if bits.dtype == np.uint8:
            return torch.from_numpy(bits).view(torch.float8_e4m3fn).float()
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()


def _factors(address: int, mode: int, shape: torch.Size) -> torch.Tensor:
    """[K, outputs] of a matrix of that shape, from where they lie: one for each output (3), of 128 inputs for each
    output, outputs dense (4), or for 128 x 128, inputs dense (5)."""
    size, outputs = shape
    groups, blocks = -(-size // 128), -(-outputs // 128)
    count = {3: outputs, 4: groups * outputs, 5: groups * blocks}[mode]
    memory = (ctypes.c_float * count).from_address(address)
    found = torch.tensor(list(memory))
    if mode == 3:
        return found.expand(size, outputs)
    if mode == 4:
        return found.view(groups, outputs).repeat_interleave(128, 0)[:size]
    return found.view(blocks, groups).T.repeat_interleave(128, 0)[:size].repeat_interleave(128, 1)[:, :outputs]


def quantized(kind: Kind, x: Tensor, weight: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Rows [M, K] and a weight [N, K], each as 8-bit floats and factors, as `fp8_tiles.multiply` takes them."""
    if kind is Kind.FP8_ROWS:
        return fp8.reference_quantize(x), fp8.reference_quantize(weight)
    numbers, factors = eight_bits.reference_quantize(x, eight_bits.BLOCK, fp8.FP8)
    held = fp8_blocks.quantize(weight)
    made = eight_bits.blocks_of_floats(held.values, held.scales)
    return (numbers, factors.contiguous()), (made.values, made.scales)
