"""`CublasLt`: the cuBLASLt library that torch has loaded, by ctypes, and `Product`, x [M, K] times a weight [N, K] with
an algorithm that the caller picks.

Numbers are those of NVIDIA's public header, cublasLt.h of CUDA 12.9 and later. Knows no shapes.
"""

import ctypes
from ctypes import c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from enum import Enum
from pathlib import Path
from typing import Any

_COMPUTE_32F = 68
_FLOAT32, _BFLOAT16, _FP8 = 0, 14, 28
"""cudaDataType: CUDA_R_32F, CUDA_R_16BF, CUDA_R_8F_E4M3."""
_TRANSA, _TRANSB = 3, 4
_A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_ACCUM = 17, 18, 25
_A_SCALE_MODE, _B_SCALE_MODE = 31, 32
_OUTER_VECTOR, _VECTOR_128, _BLOCK_128 = 3, 4, 5
"""cublasLtMatmulMatrixScale_t: a factor for each row or column, for 128 inputs of one, for 128 of each."""
_MAX_WORKSPACE = 1
MAPS = Path("/proc/self/maps")
"""What this process has loaded."""
CONFIG_TYPES = {
    "algorithm": c_int32,
    "tile": c_uint32,
    "split": c_int32,
    "reduction": c_uint32,
    "swizzle": c_uint32,
    "custom": c_uint32,
    "stages": c_uint32,
    "inner": c_uint16,
    "cluster": c_uint16,
}
"""What an algorithm is set to, in the order of cublasLtMatmulAlgoConfigAttributes_t."""


class Kind(Enum):
    """What is multiplied; results are bfloat16."""

    BFLOAT16 = "bf16"
    FP8_ROWS = "fp8-rows"
    """8-bit floats (e4m3) with a factor for each row, and for each output of the weight."""
    FP8_BLOCKS = "fp8-blocks"
    """8-bit floats with a factor for 128 inputs of a row, and for 128 x 128 of the weight."""


class Algo(ctypes.Structure):
    """An algorithm with its settings, whose bytes only the library reads: cublasLtMatmulAlgo_t."""

    _fields_ = [("data", c_uint64 * 8)]


class Result(ctypes.Structure):
    """An algorithm and what running it takes, as the library tells: cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", Algo), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4),
    ]  # fmt: skip


class CublasError(RuntimeError):
    """A call that the library has not done."""


def loaded_path() -> str:
    """Where the library is that this process has loaded. Raises CublasError where it has loaded none."""
    for line in MAPS.read_text().splitlines():
        _, _, path = line.partition("/")
        if "libcublasLt.so" in path:
            return "/" + path
    raise CublasError("this process has not loaded libcublasLt")


class CublasLt:
    """The library and a handle, of the current device."""

    def __init__(self, library: Any = None) -> None:
        """`library`: in place of the one that is loaded. Raises CublasError, OSError, and AttributeError for one that
        lacks a function."""
        self._library = ctypes.CDLL(loaded_path()) if library is None else library
        self.handle = c_void_p()
        self.call("Create", ctypes.byref(self.handle))

    def call(self, name: str, *arguments: Any) -> None:
        """`cublasLt` + name. Raises CublasError with its status."""
        status = self.status(name, *arguments)
        if status:
            raise CublasError(f"cublasLt{name} gives status {status}")

    def status(self, name: str, *arguments: Any) -> int:
        """The same, and 0 where it has been done."""
        return int(getattr(self._library, "cublasLt" + name)(*arguments))

    def changed(self, algo: Algo, **values: int) -> Algo | None:
        """A copy with these settings, by their names in CONFIG_TYPES; None where one is refused."""
        copy = Algo.from_buffer_copy(algo)
        for name, number in values.items():
            value = CONFIG_TYPES[name](number)
            arguments = ctypes.byref(value), c_size_t(ctypes.sizeof(value))
            if self.status(
                "MatmulAlgoConfigSetAttribute", ctypes.byref(copy), list(CONFIG_TYPES).index(name), *arguments
            ):
                return None
        return copy


class Product:
    """x [M, K] times a weight [N, K] -> [M, N] bfloat16, all row-major: for the library, columns first, the transposed
    weight times a matrix K by M. One thread at a time."""

    def __init__(self, library: CublasLt, kind: Kind, sizes: tuple[int, int, int], workspace_bytes: int) -> None:
        """sizes: M, N, K. `workspace_bytes`: what an algorithm may ask for. Raises CublasError."""
        self._library = library
        num_rows, outputs, size = sizes
        self._desc = c_void_p()
        library.call("MatmulDescCreate", ctypes.byref(self._desc), _COMPUTE_32F, _FLOAT32)
        self._set(_TRANSA, c_int32(1))
        self._set(_TRANSB, c_int32(0))
        if kind is not Kind.BFLOAT16:
            blocks = kind is Kind.FP8_BLOCKS
            self._set(_A_SCALE_MODE, c_int32(_BLOCK_128 if blocks else _OUTER_VECTOR))
            self._set(_B_SCALE_MODE, c_int32(_VECTOR_128 if blocks else _OUTER_VECTOR))
            self._set(_FAST_ACCUM, c_int8(not blocks))
        dtype = _BFLOAT16 if kind is Kind.BFLOAT16 else _FP8
        self._weight = self._layout(dtype, size, outputs)
        self._rows = self._layout(dtype, size, num_rows)
        self._out = self._layout(_BFLOAT16, outputs, num_rows)
        self._workspace_bytes = workspace_bytes
        self._one, self._zero = c_float(1.0), c_float(0.0)

    def set_scales(self, weight_scales: int, row_factors: int) -> None:
        """Addresses of float32 factors, for 8-bit floats; before anything else."""
        self._set(_A_SCALE_POINTER, c_uint64(weight_scales))
        self._set(_B_SCALE_POINTER, c_uint64(row_factors))

    def offered(self, most: int = 1) -> list[Algo]:
        """Up to so many algorithms in the library's order, those that it expects to be faster first. Raises
        CublasError where there is none."""
        preference, results, count = c_void_p(), (Result * most)(), c_int()
        room = c_uint64(self._workspace_bytes)
        self._library.call("MatmulPreferenceCreate", ctypes.byref(preference))
        try:
            self._library.call(
                "MatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, ctypes.byref(room), c_size_t(8)
            )
            self._library.call(
                "MatmulAlgoGetHeuristic", self._library.handle, self._desc, *self._layouts, preference, most, results,
                ctypes.byref(count),
            )  # fmt: skip
        finally:
            self._library.call("MatmulPreferenceDestroy", preference)
        found = [Algo.from_buffer_copy(result.algo) for result in results[: count.value] if result.state == 0]
        if not found:
            raise CublasError("cublasLtMatmulAlgoGetHeuristic offers nothing")
        return found

    def workspace_of(self, algo: Algo) -> int | None:
        """Bytes of workspace that it needs; None where the library cannot run so, or not with what there may be."""
        result = Result()
        arguments = self._library.handle, self._desc, *self._layouts, ctypes.byref(algo), ctypes.byref(result)
        refused = self._library.status("MatmulAlgoCheck", *arguments) or result.state
        return None if refused or result.workspace > self._workspace_bytes else int(result.workspace)

    def run(self, algo: Algo, addresses: tuple[int, int, int], workspace: tuple[int, int], stream: int) -> None:
        """`addresses`: of weight, x and result. `workspace`: address and bytes. Raises CublasError."""
        weight, rows, out = map(c_void_p, addresses)
        self._library.call(
            "Matmul", self._library.handle, self._desc, ctypes.byref(self._one), weight, self._weight, rows, self._rows,
            ctypes.byref(self._zero), out, self._out, out, self._out, ctypes.byref(algo), c_void_p(workspace[0]),
            c_size_t(workspace[1]), c_void_p(stream),
        )  # fmt: skip

    def _set(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._library.call("MatmulDescSetAttribute", self._desc, attribute, ctypes.byref(value), size)

    def _layout(self, dtype: int, rows: int, columns: int) -> c_void_p:
        made = c_void_p()
        arguments = ctypes.byref(made), dtype, c_uint64(rows), c_uint64(columns), c_int64(rows)
        self._library.call("MatrixLayoutCreate", *arguments)
        return made

    @property
    def _layouts(self) -> tuple[c_void_p, c_void_p, c_void_p, c_void_p]:
        return self._weight, self._rows, self._out, self._out
