"""`CublasLt`: the cuBLASLt library that torch has loaded, by ctypes, and `Product`, x [M, K] times a weight [N, K] with
an algorithm that the caller picks.

Numbers are those of NVIDIA's public header, cublasLt.h of CUDA 12.9 and later. Knows no shapes.
"""

import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int8, c_int32, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

_COMPUTE_32F = 68
_FLOAT32, _BFLOAT16, _FP8 = 0, 14, 28
"""cudaDataType: CUDA_R_32F, CUDA_R_16BF, CUDA_R_8F_E4M3."""
_TRANSA, _TRANSB = 3, 4
_A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_ACCUM = 17, 18, 25
_A_SCALE_MODE, _B_SCALE_MODE = 31, 32
_OUTER_VECTOR, _VECTOR_128, _BLOCK_128 = 3, 4, 5
"""cublasLtMatmulMatrixScale_t: a factor for each row or column, for 128 inputs of one, for 128 of each."""
_MAX_WORKSPACE = 1
_TILE_IDS, _SPLIT_SUPPORT, _REDUCTIONS, _SWIZZLE_SUPPORT, _MOST_CUSTOM, _STAGES_IDS = 6, 0, 1, 2, 7, 13
"""cublasLtMatmulAlgoCapAttributes_t."""
MAX_RESULTS = 64
"""Algorithms that are asked for."""


class Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", c_uint64 * 8)]


class Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", Algo), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4),
    ]  # fmt: skip


class Config(NamedTuple):
    """What an algorithm is set to, in the order of cublasLtMatmulAlgoConfigAttributes_t."""

    algorithm: int
    tile: int
    split: int
    reduction: int
    swizzle: int
    custom: int
    stages: int
    inner: int
    cluster: int


_CONFIG_TYPES = (c_int32, c_uint32, c_int32, c_uint32, c_uint32, c_uint32, c_uint32, c_uint16, c_uint16)
CLUSTERS = (0, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12)
"""cublasLtClusterShape_t: automatic, 1x1, 2x1, 4x1, 1x2, 2x2, 4x2, 1x4, 2x4, 8x1, 1x8."""


class CublasError(RuntimeError):
    """A call that the library has not done."""


def loaded_path() -> str:
    """Where the library is that this process has loaded, else its name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libcublasLt.so" in path:
            return path
    return "libcublasLt.so.13"


class CublasLt:
    """The library and a handle."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._library = ctypes.CDLL(loaded_path()) if library is None else library
        handle = c_void_p()
        self.call("Create", ctypes.byref(handle))
        self.handle = handle

    def call(self, name: str, *arguments: object) -> None:
        """`cublasLt` + name. Raises CublasError with its status."""
        status = self.status(name, *arguments)
        if status:
            raise CublasError(f"cublasLt{name} gives status {status}")

    def status(self, name: str, *arguments: object) -> int:
        """The same, and 0 where it has been done."""
        return int(getattr(self._library, "cublasLt" + name)(*arguments))

    def version(self) -> int:
        """As 130100 for 13.1.0."""
        self._library.cublasLtGetVersion.restype = c_size_t
        return int(self._library.cublasLtGetVersion())

    def read(self, algo: Algo) -> Config:
        """What it is set to."""
        values = []
        for attribute, kind in enumerate(_CONFIG_TYPES):
            value, written = kind(), c_size_t()
            size = c_size_t(ctypes.sizeof(kind))
            self.call(
                "MatmulAlgoConfigGetAttribute", ctypes.byref(algo), attribute, ctypes.byref(value), size,
                ctypes.byref(written),
            )  # fmt: skip
            values.append(value.value)
        return Config(*values)

    def changed(self, algo: Algo, **values: int) -> Algo | None:
        """A copy with these fields of `Config` set; None where one is refused."""
        copy = Algo.from_buffer_copy(algo)
        for name, number in values.items():
            attribute = Config._fields.index(name)
            value = _CONFIG_TYPES[attribute](number)
            size = c_size_t(ctypes.sizeof(value))
            if self.status("MatmulAlgoConfigSetAttribute", ctypes.byref(copy), attribute, ctypes.byref(value), size):
                return None
        return copy

    def can(self, algo: Algo, attribute: int) -> int:
        """A capability of four bytes."""
        value, written = c_uint32(), c_size_t()
        size = c_size_t(4)
        arguments = ctypes.byref(algo), attribute, ctypes.byref(value), size, ctypes.byref(written)
        return 0 if self.status("MatmulAlgoCapGetAttribute", *arguments) else value.value

    def ids(self, algo: Algo, attribute: int) -> list[int]:
        """A capability that is a list of ids; none where it has none."""
        name, needed = "MatmulAlgoCapGetAttribute", c_size_t()
        if self.status(name, ctypes.byref(algo), attribute, None, c_size_t(0), ctypes.byref(needed)):
            return []
        values = (c_uint32 * (needed.value // 4))()
        if len(values):
            self.call(name, ctypes.byref(algo), attribute, values, needed, ctypes.byref(needed))
        return list(values)

    def neighbours(self, algo: Algo) -> Iterator[Algo]:
        """Algorithms that differ in one thing, whether they can run or not."""
        now = self.read(algo)
        changes: list[dict[str, int]] = [{"cluster": cluster} for cluster in CLUSTERS]
        changes += [{"tile": tile} for tile in self.ids(algo, _TILE_IDS)]
        changes += [{"stages": stages} for stages in self.ids(algo, _STAGES_IDS)]
        changes += [{"custom": custom} for custom in range(min(self.can(algo, _MOST_CUSTOM), 63) + 1)]
        if self.can(algo, _SWIZZLE_SUPPORT):
            changes += [{"swizzle": swizzle} for swizzle in (0, 1)]
        changes.append({"split": 1, "reduction": 0})
        if self.can(algo, _SPLIT_SUPPORT):
            schemes = [scheme for scheme in (1, 2) if self.can(algo, _REDUCTIONS) & scheme]
            changes += [{"split": split, "reduction": scheme} for split in (2, 3, 4) for scheme in schemes]
        for change in changes:
            if any(getattr(now, name) != value for name, value in change.items()):
                other = self.changed(algo, **change)
                if other is not None:
                    yield other


class Product:
    """x [M, K] times a weight [N, K] -> [M, N] bfloat16, all row-major: for the library, columns first, the transposed
    weight times a matrix K by M."""

    def __init__(self, library: CublasLt, kind: str, sizes: tuple[int, int, int], workspace_bytes: int) -> None:
        """kind: bf16, fp8-rows (a factor for each row and output), fp8-blocks (for 128 inputs of a row, and for 128 x
        128 of the weight). sizes: M, N, K."""
        self._library, self._kind = library, kind
        num_rows, outputs, size = sizes
        desc = c_void_p()
        library.call("MatmulDescCreate", ctypes.byref(desc), _COMPUTE_32F, _FLOAT32)
        self._desc = desc
        self._set(_TRANSA, c_int32(1))
        self._set(_TRANSB, c_int32(0))
        if kind != "bf16":
            blocks = kind == "fp8-blocks"
            self._set(_A_SCALE_MODE, c_int32(_BLOCK_128 if blocks else _OUTER_VECTOR))
            self._set(_B_SCALE_MODE, c_int32(_VECTOR_128 if blocks else _OUTER_VECTOR))
            self._set(_FAST_ACCUM, c_int8(not blocks))
        dtype = _BFLOAT16 if kind == "bf16" else _FP8
        self._weight = self._layout(dtype, size, outputs)
        self._rows = self._layout(dtype, size, num_rows)
        self._out = self._layout(_BFLOAT16, outputs, num_rows)
        self._workspace_bytes = workspace_bytes
        self._one, self._zero = c_float(1.0), c_float(0.0)

    def _set(self, attribute: int, value: "ctypes._SimpleCData[int]") -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._library.call("MatmulDescSetAttribute", self._desc, attribute, ctypes.byref(value), size)

    def _layout(self, dtype: int, rows: int, columns: int) -> c_void_p:
        made = c_void_p()
        arguments = ctypes.byref(made), dtype, c_uint64(rows), c_uint64(columns), ctypes.c_int64(rows)
        self._library.call("MatrixLayoutCreate", *arguments)
        return made

    @property
    def _layouts(self) -> tuple[c_void_p, c_void_p, c_void_p, c_void_p]:
        return self._weight, self._rows, self._out, self._out

    def set_scales(self, weight_scales: int, row_factors: int) -> None:
        """Addresses of float32 factors, for 8-bit floats; before anything else."""
        self._set(_A_SCALE_POINTER, c_uint64(weight_scales))
        self._set(_B_SCALE_POINTER, c_uint64(row_factors))

    def heuristic(self) -> list[Algo]:
        """Algorithms in the library's order, those that it expects to be faster first."""
        preference = c_void_p()
        self._library.call("MatmulPreferenceCreate", ctypes.byref(preference))
        most = c_uint64(self._workspace_bytes)
        self._library.call("MatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, ctypes.byref(most), c_size_t(8))
        results, count = (Result * MAX_RESULTS)(), c_int()
        self._library.call(
            "MatmulAlgoGetHeuristic", self._library.handle, self._desc, *self._layouts, preference, MAX_RESULTS,
            results, ctypes.byref(count),
        )  # fmt: skip
        self._library.call("MatmulPreferenceDestroy", preference)
        return [Algo.from_buffer_copy(result.algo) for result in results[: count.value] if result.state == 0]

    def takes(self, algo: Algo) -> bool:
        """Whether the library says that it can run so."""
        result = Result()
        arguments = self._library.handle, self._desc, *self._layouts, ctypes.byref(algo), ctypes.byref(result)
        refused = self._library.status("MatmulAlgoCheck", *arguments)
        return refused == 0 and result.state == 0 and result.workspace <= self._workspace_bytes

    def run(self, algo: Algo, addresses: tuple[int, int, int], workspace: int, stream: int) -> None:
        """Of weight, x and result."""
        weight, rows, out = map(c_void_p, addresses)
        self._library.call(
            "Matmul", self._library.handle, self._desc, ctypes.byref(self._one), weight, self._weight, rows, self._rows,
            ctypes.byref(self._zero), out, self._out, out, self._out, ctypes.byref(algo), c_void_p(workspace),
            c_size_t(self._workspace_bytes), c_void_p(stream),
        )  # fmt: skip
