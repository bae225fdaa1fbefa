"""cuBLASLt by ctypes, with a library that computes on the host."""

import ctypes

import pytest
import torch

from pagemill.model.kernels import cublas_lt
from pagemill.model.kernels.cublas_lt import Algo, CublasError, CublasLt, Kind, Product, Result
from tests.fakes.cublas_library import OFFERED, REFUSED_CLUSTER, UNSUPPORTED_CLUSTER, FakeCublas, algo_of, settings_of

ROOM = 1 << 20


@pytest.fixture
def fake() -> FakeCublas:
    return FakeCublas()


@pytest.fixture
def library(fake: FakeCublas) -> CublasLt:
    return CublasLt(fake)


def test_structures_are_as_large_as_in_the_header():
    assert ctypes.sizeof(Algo) == 64
    assert ctypes.sizeof(Result) == 96


def test_the_product_is_that_of_row_major_matrices(library: CublasLt, fake: FakeCublas):
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    out = torch.zeros(3, 5).bfloat16()
    product = Product(library, Kind.BFLOAT16, (3, 5, 8), ROOM)
    workspace = torch.empty(64, dtype=torch.uint8)
    algo = product.offered()[0]
    product.run(algo, (weight.data_ptr(), x.data_ptr(), out.data_ptr()), (workspace.data_ptr(), 64), 77)
    torch.testing.assert_close(out, x @ weight.T, rtol=0.01, atol=0.01)
    assert fake.ran == [(OFFERED, 64, 77)]


def test_what_cannot_run_is_not_offered_and_the_preference_is_freed(library: CublasLt, fake: FakeCublas):
    offered = Product(library, Kind.BFLOAT16, (3, 5, 8), ROOM).offered(8)
    assert [settings_of(algo) for algo in offered] == [OFFERED]
    (preference,) = fake.destroyed
    assert fake.made[preference] == {1: ROOM}


def test_nothing_is_offered(library: CublasLt, fake: FakeCublas):
    fake.offers = []
    with pytest.raises(CublasError, match="offers nothing"):
        Product(library, Kind.FP8_ROWS, (3, 5, 8), ROOM).offered()
    assert len(fake.destroyed) == 1


@pytest.mark.parametrize(
    ("kind", "modes", "fast"), [(Kind.FP8_ROWS, (3, 3), 1), (Kind.FP8_BLOCKS, (5, 4), 0)], ids=["rows", "blocks"]
)
def test_factors_of_eight_bit_floats(
    library: CublasLt, fake: FakeCublas, kind: Kind, modes: tuple[int, int], fast: int
):
    Product(library, kind, (4, 256, 512), ROOM).set_scales(111, 222)
    desc = next(values for values in fake.made.values() if "compute" in values)
    assert desc == {"compute": 68, "scale": 0, 3: 1, 4: 0, 31: modes[0], 32: modes[1], 25: fast, 17: 111, 18: 222}
    assert [values["dtype"] for values in fake.made.values() if "dtype" in values] == [28, 28, 14]


def test_settings_of_an_algorithm(library: CublasLt):
    changed = library.changed(algo_of(OFFERED), tile=15, cluster=2)
    assert changed is not None and settings_of(changed) == OFFERED | {"tile": 15, "cluster": 2}
    assert library.changed(algo_of(OFFERED), cluster=REFUSED_CLUSTER) is None


def test_the_workspace_that_is_needed(library: CublasLt):
    product = Product(library, Kind.BFLOAT16, (3, 5, 8), 128)
    assert product.workspace_of(algo_of(OFFERED)) == 64
    assert product.workspace_of(algo_of(OFFERED | {"cluster": UNSUPPORTED_CLUSTER})) is None
    assert product.workspace_of(algo_of(OFFERED | {"split": 3})) is None, "more than there may be"


def test_an_error_names_the_call_and_its_status(library: CublasLt, fake: FakeCublas, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fake, "cublasLtMatmulDescCreate", lambda *_: 7)
    with pytest.raises(CublasError, match="cublasLtMatmulDescCreate gives status 7"):
        Product(library, Kind.BFLOAT16, (3, 5, 8), ROOM)


def test_a_process_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f10 r-xp 00000000 08:01 1  /usr/lib/libc.so.6\n7f20-7f30 rw-p 00000000 00:00 0\n")
    monkeypatch.setattr(cublas_lt, "MAPS", maps)
    with pytest.raises(CublasError, match="has not loaded libcublasLt"):
        cublas_lt.loaded_path()
    maps.write_text("7f00-7f10 r-xp 00000000 08:01 1    /somewhere else/libcublasLt.so.13\n")
    assert cublas_lt.loaded_path() == "/somewhere else/libcublasLt.so.13"
