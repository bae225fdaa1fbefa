"""Products of 8-bit floats by cuBLAS in tiles of our choice, with a library that computes on the host."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels import eight_bits, fp8_tiles
from pagemill.model.kernels.cublas_lt import CublasError, CublasLt, Kind
from pagemill.model.kernels.fp8_tiles import MOST_ROWS, Plans, choose, multiply
from tests.fakes.cublas_library import OFFERED, REFUSED_TILE, FakeCublas, quantized

H200 = 132
OURS = {"split": 1, "reduction": 0}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCublas:
    """In the place of the library, on a machine that has what it takes."""
    library = FakeCublas()
    plans = Plans(CublasLt(library), H200)
    monkeypatch.setattr(fp8_tiles, "_plans", lambda device: plans)
    monkeypatch.setattr(fp8_tiles, "is_hopper", lambda device: True)
    monkeypatch.setattr(fp8_tiles, "ALIGNMENT", 16)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    return library


def rows_and_weight(
    kind: Kind, num_rows: int = 40, outputs: int = 256, size: int = 512
) -> tuple[tuple[Tensor, ...], ...]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, size, generator=generator)
    weight = torch.randn(outputs, size, generator=generator) / 16
    return quantized(kind, x, weight)


def expected(kind: Kind, rows: tuple[Tensor, ...], weight: tuple[Tensor, ...]) -> Tensor:
    if kind is Kind.FP8_ROWS:
        wide = [values.float() * factors[:, None] for values, factors in (rows, weight)]
    else:
        wide = [
            eight_bits.floats(eight_bits.EightBits(*rows, eight_bits.BLOCK, 1), torch.float32),
            eight_bits.floats(eight_bits.EightBits(*weight, eight_bits.BLOCK, eight_bits.BLOCK), torch.float32),
        ]
    return (wide[0] @ wide[1].T).bfloat16()


@pytest.mark.parametrize("kind", [Kind.FP8_ROWS, Kind.FP8_BLOCKS])
def test_what_is_multiplied(fake: FakeCublas, kind: Kind):
    rows, weight = rows_and_weight(kind)
    found = multiply(kind, rows, weight)
    assert found is not None and found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected(kind, rows, weight), rtol=0.02, atol=0.02)
    chosen = OURS | {"tile": 13, "custom": 1, "cluster": 2} if kind is Kind.FP8_ROWS else {}
    assert fake.ran == [(OFFERED | chosen, 64, 77)]


@pytest.mark.parametrize(
    ("outputs", "rows", "settings"),
    [
        (256, 8, {"tile": 13, "custom": 1, "cluster": 4}),
        (256, 64, {"tile": 13, "custom": 1, "cluster": 2}),
        (6144, 64, {"tile": 15, "custom": 0, "cluster": 4}),
        (24576, 8, {"tile": 16, "custom": 1, "cluster": 2}),
    ],
)
def test_narrow_tiles_read_their_rows_together(fake: FakeCublas, outputs: int, rows: int, settings: dict[str, int]):
    assert multiply(Kind.FP8_ROWS, *rows_and_weight(Kind.FP8_ROWS, rows, outputs)) is not None
    assert fake.ran[0][0] == OFFERED | OURS | settings


@pytest.mark.parametrize(
    ("outputs", "rows", "tile"),
    [
        (4096, 8, (64, 32)),
        (6144, 32, (64, 32)),
        (24576, 32, (128, 32)),
        (4096, 40, (64, 32)),
        (6144, 64, (64, 64)),
        (4096, 128, (64, 64)),
        (4096, 192, (96, 64)),
        (4096, 256, (128, 64)),
        (4096, 384, (96, 128)),
        (4096, 512, (128, 128)),
        (6144, 256, (96, 128)),
        (24576, 64, (192, 64)),
        (24576, 256, (128, 128)),
    ],
)
def test_tiles_leave_no_multiprocessor_idle(outputs: int, rows: int, tile: tuple[int, int]):
    assert choose(Kind.FP8_ROWS, outputs, rows, H200) == tile


def test_a_product_is_planned_once_for_its_sizes(fake: FakeCublas):
    for seed in (1, 2):
        rows, weight = rows_and_weight(Kind.FP8_ROWS)
        rows = rows[0], rows[1] * seed
        found = multiply(Kind.FP8_ROWS, rows, weight)
        assert found is not None
        torch.testing.assert_close(found, expected(Kind.FP8_ROWS, rows, weight), rtol=0.02, atol=0.02)
    assert fake.asked == 1
    multiply(Kind.FP8_ROWS, *rows_and_weight(Kind.FP8_ROWS, num_rows=41))
    assert fake.asked == 2


def test_where_our_tile_is_refused_the_library_chooses(fake: FakeCublas, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(fp8_tiles._TILES[Kind.FP8_ROWS], (64, 32), (REFUSED_TILE, 1))
    assert multiply(Kind.FP8_ROWS, *rows_and_weight(Kind.FP8_ROWS)) is not None
    assert fake.ran[0][0] == OFFERED


def test_large_tiles_of_blocks_are_the_librarys(fake: FakeCublas):
    assert multiply(Kind.FP8_BLOCKS, *rows_and_weight(Kind.FP8_BLOCKS, 512, 4096, 512)) is not None
    assert fake.ran[0][0] == OFFERED


def test_what_is_left_to_torch(fake: FakeCublas, monkeypatch: pytest.MonkeyPatch):
    kind = Kind.FP8_ROWS
    (numbers, factors), (values, scales) = rows_and_weight(kind, MOST_ROWS + 1)
    assert multiply(kind, (numbers, factors), (values, scales)) is None, "many rows"
    few = numbers[:40], factors[:40]
    assert multiply(kind, (few[0][:, ::2], few[1]), (values[:, ::2], scales)) is None, "not dense"
    assert multiply(kind, (numbers[:0], factors[:0]), (values, scales)) is None, "no rows"
    monkeypatch.setattr(fp8_tiles, "ALIGNMENT", 1 << 40)
    assert multiply(kind, few, (values, scales)) is None, "not aligned"
    monkeypatch.setattr(fp8_tiles, "ALIGNMENT", 16)
    monkeypatch.setattr(fp8_tiles, "is_hopper", lambda device: False)
    assert multiply(kind, few, (values, scales)) is None, "another GPU"
    assert fake.ran == []


def test_what_the_library_cannot_do_is_asked_once(fake: FakeCublas):
    fake.offers = []
    for _ in range(2):
        assert multiply(Kind.FP8_ROWS, *rows_and_weight(Kind.FP8_ROWS)) is None
    assert fake.asked == 1


def test_what_fails_is_left_to_torch_from_then_on(fake: FakeCublas, monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(fake, "cublasLtMatmul", lambda *arguments: calls.append(arguments) or 13)
    for _ in range(2):
        assert multiply(Kind.FP8_ROWS, *rows_and_weight(Kind.FP8_ROWS)) is None
    assert len(calls) == 1


def test_without_a_library(fake: FakeCublas, monkeypatch: pytest.MonkeyPatch):
    def missing() -> CublasLt:
        raise CublasError("this process has not loaded libcublasLt")

    monkeypatch.setattr(fp8_tiles, "CublasLt", missing)
    for version in (None, "12.8", "13.0"):
        monkeypatch.setattr(torch.version, "cuda", version)
        plans = Plans(fp8_tiles._library(), H200)
        monkeypatch.setattr(fp8_tiles, "_plans", lambda device, plans=plans: plans)
        assert multiply(Kind.FP8_ROWS, *rows_and_weight(Kind.FP8_ROWS)) is None


def test_a_compiler_is_told_that_there_are_no_tiles(fake: FakeCublas, monkeypatch: pytest.MonkeyPatch):
    device = torch.device("cpu")
    assert fp8_tiles.available(device)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not fp8_tiles.available(device)
    assert multiply(Kind.FP8_ROWS, *rows_and_weight(Kind.FP8_ROWS)) is None
