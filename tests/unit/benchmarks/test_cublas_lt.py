"""benchmarks/cublas_lt.py, with a library that does in numpy what cuBLASLt's documentation says, columns first."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cublas_lt import Algo, Config, CublasError, CublasLt, Product, Result

OPERATION_T = 1
NUMPY = {14: np.uint16, 28: np.uint8}
CONFIG = Config(algorithm=66, tile=20, split=1, reduction=0, swizzle=0, custom=0, stages=36, inner=0, cluster=2)
TILES, STAGES = (20, 24), (36,)


def number(value: Any) -> int:
    """Of a C number or an int."""
    return int(getattr(value, "value", value) or 0)


def put(reference: Any, value: int) -> None:
    """Through `byref`."""
    reference._obj.value = value


class FakeLibrary:
    """Descriptors by their handles, two algorithms that can run, one that cannot; values of an algorithm are the nine
    numbers of `Config` in its bytes."""

    def __init__(self) -> None:
        self.made: dict[int, dict[Any, Any]] = {}
        self.destroyed: list[int] = []
        self.ran: list[tuple[Config, int, int]] = []

    def new(self, reference: Any, **values: Any) -> int:
        handle = len(self.made) + 1
        self.made[handle] = values
        put(reference, handle)
        return 0

    def cublasLtCreate(self, handle: Any) -> int:
        return self.new(handle)

    def cublasLtMatmulDescCreate(self, desc: Any, compute: int, scale: int) -> int:
        return self.new(desc, compute=compute, scale=scale)

    def cublasLtMatmulDescSetAttribute(self, desc: Any, attribute: int, value: Any, size: Any) -> int:
        assert ctypes.sizeof(value._obj) == number(size)
        self.made[number(desc)][attribute] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, layout: Any, dtype: int, rows: Any, columns: Any, leading: Any) -> int:
        return self.new(layout, dtype=dtype, rows=number(rows), columns=number(columns), leading=number(leading))

    def cublasLtMatmulPreferenceCreate(self, preference: Any) -> int:
        return self.new(preference)

    def cublasLtMatmulPreferenceSetAttribute(self, preference: Any, attribute: int, value: Any, size: Any) -> int:
        self.made[number(preference)][attribute] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:
        self.destroyed.append(number(preference))
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        *_, preference, most, results, count = arguments
        assert self.made[number(preference)] == {1: 1 << 20}
        assert most >= 2
        for place, (config, state) in enumerate([(CONFIG, 0), (CONFIG._replace(tile=24), 15)]):
            results[place].algo = algo_of(config)
            results[place].state = state
        put(count, 2)
        return 0

    def cublasLtMatmulAlgoCheck(self, *arguments: Any) -> int:
        algo, result = arguments[-2]._obj, arguments[-1]._obj
        config = config_of(algo)
        result.workspace = 1 << 30 if config.split > 2 else 0
        result.state = 0
        return 15 if config.cluster == 9 else 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algo: Any, attribute: int, value: Any, *_: Any) -> int:
        put(value, config_of(algo._obj)[attribute])
        return 0

    def cublasLtMatmulAlgoConfigSetAttribute(self, algo: Any, attribute: int, value: Any, size: Any) -> int:
        field = Config._fields[attribute]
        assert number(size) == (2 if field in ("inner", "cluster") else 4)
        if field == "cluster" and value._obj.value == 12:
            return 7
        algo._obj.data = algo_of(config_of(algo._obj)._replace(**{field: value._obj.value})).data
        return 0

    def cublasLtMatmulAlgoCapGetAttribute(self, _: Any, attribute: int, value: Any, size: Any, written: Any) -> int:
        lists = {6: TILES, 13: STAGES}
        if attribute not in lists:
            put(value, {0: 1, 1: 2, 2: 1, 7: 1}[attribute])
        elif value is None:
            put(written, 4 * len(lists[attribute]))
        else:
            value[:] = lists[attribute]
        return 0

    def cublasLtMatmul(self, *arguments: Any) -> int:
        _, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algo, *rest = arguments
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        assert (number(c), number(c_layout)) == (number(d), number(d_layout))
        self.ran.append((config_of(algo._obj), number(rest[0]), number(rest[2])))
        left = self.matrix(a, a_layout, transposed=self.made[number(desc)].get(3) == OPERATION_T)
        right = self.matrix(b, b_layout, transposed=self.made[number(desc)].get(4) == OPERATION_T)
        out = self.bits(d, d_layout)
        product = torch.from_numpy(left @ right).bfloat16()
        out[:] = product.view(torch.int16).numpy().view(np.uint16)
        return 0

    def bits(self, address: Any, handle: Any) -> np.ndarray:
        """A matrix where it lies, columns first."""
        layout = self.made[number(handle)]
        kind = NUMPY[layout["dtype"]]
        size = layout["columns"] * layout["leading"]
        memory = (ctypes.c_uint8 * (size * np.dtype(kind).itemsize)).from_address(number(address))
        return np.frombuffer(memory, kind).reshape(layout["columns"], layout["leading"])[:, : layout["rows"]].T

    def matrix(self, address: Any, handle: Any, *, transposed: bool) -> np.ndarray:
        """The numbers of one of bfloat16."""
        wide = np.ascontiguousarray(self.bits(address, handle)).astype(np.uint32) << 16
        return (wide.T if transposed else wide).copy().view(np.float32)


def algo_of(config: Config) -> Algo:
    """With these nine numbers in its bytes."""
    packed = np.zeros(16, np.uint32)
    packed[: len(config)] = config
    return Algo.from_buffer_copy(packed.tobytes())


def config_of(algo: Algo) -> Config:
    """The nine numbers in its bytes."""
    return Config(*np.frombuffer(bytes(algo), np.uint32)[:9].tolist())


@pytest.fixture
def fake() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture
def library(fake: FakeLibrary) -> CublasLt:
    return CublasLt(fake)


def test_structures_are_as_large_as_in_the_header():
    assert ctypes.sizeof(Algo) == 64
    assert ctypes.sizeof(Result) == 96


def test_the_product_is_that_of_row_major_matrices(library: CublasLt, fake: FakeLibrary):
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    out = torch.zeros(3, 5).bfloat16()
    product = Product(library, "bf16", (3, 5, 8), 1 << 20)
    algo = product.heuristic()[0]
    product.run(algo, (weight.data_ptr(), x.data_ptr(), out.data_ptr()), 4096, 77)
    torch.testing.assert_close(out, x @ weight.T, rtol=0.01, atol=0.01)
    assert fake.ran == [(CONFIG, 4096, 77)]


def test_what_the_heuristic_says_cannot_run_is_left_out_and_the_preference_is_freed(
    library: CublasLt, fake: FakeLibrary
):
    offered = Product(library, "bf16", (3, 5, 8), 1 << 20).heuristic()
    assert [library.read(algo) for algo in offered] == [CONFIG]
    assert len(fake.destroyed) == 1


@pytest.mark.parametrize(("kind", "weight_mode", "rows_mode", "fast"), [("fp8-rows", 3, 3, 1), ("fp8-blocks", 5, 4, 0)])
def test_factors_of_eight_bit_floats(
    library: CublasLt, fake: FakeLibrary, kind: str, weight_mode: int, rows_mode: int, fast: int
):
    product = Product(library, kind, (4, 256, 512), 1 << 20)
    product.set_scales(111, 222)
    desc = next(values for values in fake.made.values() if "compute" in values)
    assert desc == {"compute": 68, "scale": 0, 3: 1, 4: 0, 31: weight_mode, 32: rows_mode, 25: fast, 17: 111, 18: 222}
    assert [values["dtype"] for values in fake.made.values() if "dtype" in values] == [28, 28, 14]


def test_neighbours_differ_in_one_thing(library: CublasLt):
    found = [library.read(algo) for algo in library.neighbours(algo_of(CONFIG))]
    assert CONFIG not in found
    assert len(set(found)) == len(found)
    for config in found:
        changed = {name for name in Config._fields if getattr(config, name) != getattr(CONFIG, name)}
        assert changed == {"split", "reduction"} or len(changed) == 1
    assert {config.tile for config in found} == set(TILES)
    assert {(config.split, config.reduction) for config in found} == {(1, 0), (2, 2), (3, 2), (4, 2)}
    assert 12 not in {config.cluster for config in found}, "which the library refuses"


def test_what_can_run(library: CublasLt):
    product = Product(library, "bf16", (3, 5, 8), 1 << 20)
    assert product.takes(algo_of(CONFIG))
    assert not product.takes(algo_of(CONFIG._replace(cluster=9)))
    assert not product.takes(algo_of(CONFIG._replace(split=3))), "more workspace than there is"


def test_an_error_names_the_call_and_its_status(library: CublasLt, fake: FakeLibrary):
    fake.cublasLtMatmulDescCreate = lambda *_: 7
    with pytest.raises(CublasError, match="cublasLtMatmulDescCreate gives status 7"):
        Product(library, "bf16", (3, 5, 8), 1 << 20)
