"""Attention over a cache of int8: what is written, and the kernel against its reference on what was written."""

from dataclasses import replace

import pytest
import torch

from pagemill.model.kernels import reference
from tests.marks import slow
from tests.unit.model.kernels.conftest import DTYPES, MIXED, Paged, expected, make_paged

pytestmark = pytest.mark.cases(one_in=12)


def make(lengths: list[tuple[int, int]], *sizes: int, **settings: object) -> Paged:
    return make_paged(lengths, *sizes, kv_dtype=torch.int8, **settings)


def check(case: Paged) -> None:
    """The new tokens are in the cache bit by bit; results are as exact as their type: nothing is lost on the way."""
    found = case.run()
    for cache, new in zip(reference.unpacked_cache(case.kv_cache), (case.key, case.value), strict=True):
        block_size = cache.shape[2]
        written = cache[case.slot_mapping // block_size, :, case.slot_mapping % block_size]
        assert torch.equal(written, reference.quantized_rows(new))
    tolerance = 2e-5 if case.query.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found.float(), expected(case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [slow(16), 48, 64, 80, slow(96), slow(128), slow(256), slow(1024)])
def test_head_sizes(isa: str, dtype: torch.dtype, head_size: int) -> None:
    check(make(MIXED[:6], head_size=head_size, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, slow(32), 48, slow(128)])
@pytest.mark.parametrize("window", [None, slow(1), 7, slow(64), slow(300)])
def test_blocks_and_windows(isa: str, dtype: torch.dtype, block_size: int, window: int | None) -> None:
    check(make(MIXED, block_size=block_size, window=window, dtype=dtype, head_size=32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [slow(1), 7, 64, slow(256), slow(300)])
def test_chunks(isa: str, dtype: torch.dtype, chunk_size: int) -> None:
    check(make(MIXED, chunk_size=chunk_size, dtype=dtype, head_size=32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (7, 1), (32, 8), (14, 2), (100, 1)])
def test_head_groups(isa: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    check(make([(1, 40), (9, 9), (3, 270)], *heads, head_size=32, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(isa: str, dtype: torch.dtype, soft_cap: float) -> None:
    check(make(MIXED, soft_cap=soft_cap, dtype=dtype, window=50))


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(isa: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)

    def pick(high: int) -> int:
        return int(torch.randint(1, high, (), generator=g))

    def choose(options: list) -> object:
        return options[pick(len(options) + 1) - 1]

    lengths = [(count, count + pick(600) - 1) for count in (choose([1, 1, pick(200)]) for _ in range(pick(6)))]
    groups, kv_heads = pick(9), pick(4)
    check(
        make(
            lengths, groups * kv_heads, kv_heads, choose([16, 64, 80, 128]), choose([16, 32]), choose(DTYPES),
            choose([None, pick(400)]), choose([None, 20.0]), seed,
        )
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layout_of_the_cache(isa: str, dtype: torch.dtype) -> None:
    """Byte by byte, and the same for all instruction sets."""
    size, block_size = 48, 32
    case = make([(70, 70), (1, 1)], 2, 2, size, block_size, dtype)
    case.run()
    for token, head, d in ((0, 0, 0), (1, 1, 5), (33, 0, 6), (69, 1, 47), (70, 1, 1)):
        block, offset = divmod(int(case.slot_mapping[token]), block_size)
        places = ((d // 4 * block_size + offset) * 4 + d % 4, (offset // 4 * size + d) * 4 + offset % 4)
        for cache, new, place in zip(case.kv_cache, (case.key, case.value), places, strict=True):
            row, part = reference.quantized_rows(new[token, head]), cache[block, head].flatten()
            assert part[place] == row[d]
            scale = block_size * size + offset * 4
            assert torch.equal(part[scale : scale + 4], row[size:])
    assert torch.equal(reference.packed_cache(reference.unpacked_cache(case.kv_cache)), case.kv_cache)


def test_rows_are_within_half_a_step() -> None:
    x = torch.randn(50, 3, 64) * torch.logspace(-8, 8, 50)[:, None, None]
    rows = reference.quantized_rows(x)
    error = (reference.dequantized_rows(rows) - x).abs().amax(-1)
    assert (error <= x.abs().amax(-1) / 127 * 0.5001).all()
    assert reference.quantized_rows(torch.zeros(1, 16)).any() == torch.tensor(False)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 255, 256, 257, 272, 513])
def test_what_is_not_seen_may_be_anything(isa: str, window: int | None, length: int) -> None:
    """Zeros, or the largest integers with scales of NaN: the same bits, wherever the first and last key lie."""
    case = make([(1, length)], dtype=torch.bfloat16, window=window)
    rows = reference.unpacked_cache(case.kv_cache)
    unused = (rows == -1).all(-1, keepdim=True)
    clean = replace(case, kv_cache=reference.packed_cache(rows.masked_fill(unused, 0)))
    found = case.run()
    assert found.isfinite().all()
    assert torch.equal(found, clean.run())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_not_hidden(isa: str, dtype: torch.dtype, part: str, bad: float) -> None:
    """And it stays with the request that has it."""
    case = make([(1, 40), (3, 40), (1, 300)], dtype=dtype)
    clean = case.run()
    getattr(case, part)[1, :, 5] = bad
    found = case.run()
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 4]], clean[[0, 4]])


@pytest.mark.parametrize("size", [1e-35, 1e-6, 1e6])
def test_elements_of_any_size(isa: str, size: float) -> None:
    """Scales cover what float32 does; what is smaller than 1e-30 is zero."""
    case = make([(1, 300), (20, 40)], dtype=torch.bfloat16)
    case.value.mul_(size)
    case.key.mul_(min(size, 1.0))
    found = case.run()
    wanted = expected(case)
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=float(wanted.abs().max()) * 4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [30.0, -30.0])
def test_scores_of_any_size(isa: str, dtype: torch.dtype, scale: float) -> None:
    """One key takes all the weight, and its score is large. In bfloat16, queries have 16 bits: 0.03 of 3,000."""
    case = make([(1, 900), (3, 600)], dtype=dtype)
    case.query.mul_(scale)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(case.run().float(), expected(case), rtol=tolerance, atol=tolerance)


def test_a_block_may_be_one_piece_of_memory(isa: str) -> None:
    case = make(MIXED)
    together = torch.empty(case.kv_cache.transpose(0, 1).shape, dtype=torch.int8).transpose(0, 1).copy_(case.kv_cache)
    assert together.stride(1) == 2 * together.stride(0)
    assert torch.equal(replace(case, kv_cache=together).run(), case.run())
    assert torch.equal(together, case.kv_cache)
