"""The attention kernel against its reference, and what makes results independent of company, chunks and threads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagemill.model.kernels import native, reference
from pagemill.model.kernels.plan_parts import keys_as_values
from tests.marks import slow
from tests.unit.model.kernels.conftest import DTYPES, KV_DTYPES, MIXED, Paged, expected, make_paged

pytestmark = pytest.mark.cases(one_in=12)


def check(case: Paged) -> None:
    found = case.run()
    for cache, new in zip(reference.unpacked_cache(case.kv_cache), (case.key, case.value), strict=True):
        block_size = cache.shape[2]
        torch.testing.assert_close(
            cache[case.slot_mapping // block_size, :, case.slot_mapping % block_size], new, rtol=0, atol=0
        )
    tolerance = 2e-5 if case.query.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected(case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "head_size", [slow(16), 64, 80, slow(96), slow(128), slow(256), slow(8), slow(20), 33, slow(1)]
)
def test_head_sizes(isa: str, dtype: torch.dtype, head_size: int) -> None:
    check(make_paged(MIXED[:6], head_size=head_size, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [slow(8), 16, slow(32), slow(128), slow(1), 5])
@pytest.mark.parametrize("window", [None, slow(1), 7, slow(64), slow(300)])
def test_blocks_and_windows(isa: str, dtype: torch.dtype, block_size: int, window: int | None) -> None:
    check(make_paged(MIXED, block_size=block_size, window=window, dtype=dtype, head_size=32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [slow(1), 7, 64, slow(256), slow(300)])
def test_chunks(isa: str, dtype: torch.dtype, chunk_size: int) -> None:
    check(make_paged(MIXED, chunk_size=chunk_size, dtype=dtype, head_size=32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_size"), [(6, 48), slow(130, 64), slow(3, 40)])
def test_keys_that_are_values_too(isa: str, dtype: torch.dtype, num_heads: int, head_size: int) -> None:
    """The cache has them once, as rows, also where it has others as the products read them."""
    case = make_paged(MIXED, num_heads, 1, head_size, dtype=dtype)
    kept = reference.unpacked_cache(case.kv_cache)[0, :, 0]
    case = replace(case, value=case.key, kv_cache=keys_as_values(kept))
    found = case.run()
    slots = case.slot_mapping
    torch.testing.assert_close(kept[slots // 16, slots % 16], case.key[:, 0], rtol=0, atol=0)
    wanted = reference.paged_attention(
        case.query, case.kv_cache, case.query_start, case.seq_lens, case.block_table, case.scale
    )
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_size"), [(16, 64), (48, 80), (8, 64), (16, 24)])
def test_the_layout_of_the_cache(isa: str, dtype: torch.dtype, block_size: int, head_size: int) -> None:
    """Element by element, and the same for all instruction sets."""
    case = make_paged([(70, 70), (1, 1)], 2, 2, head_size, block_size, dtype)
    case.run()
    packed = block_size % 16 == 0 and head_size % 16 == 0
    pair = 1 if dtype == torch.float32 else 2
    for token, head, d in ((0, 0, 0), (1, 1, 5), (33, 0, 6), (69, 1, head_size - 1), (70, 1, 1)):
        block, offset = divmod(int(case.slot_mapping[token]), block_size)
        places = [offset * head_size + d] * 2
        if packed:
            places = [
                (d // pair * block_size + offset) * pair + d % pair,
                (offset // pair * head_size + d) * pair + offset % pair,
            ]
        for cache, new, place in zip(case.kv_cache, (case.key, case.value), places, strict=True):
            assert cache[block, head].flatten()[place] == new[token, head, d]
    assert torch.equal(
        torch.nan_to_num(reference.packed_cache(reference.unpacked_cache(case.kv_cache))),
        torch.nan_to_num(case.kv_cache),
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 255, 256, 257, 272, 513])
def test_what_is_not_seen_may_be_anything(isa: str, window: int | None, length: int) -> None:
    """Zeros or NaN around what a token sees: the same bits, wherever the first and the last key lie in their pairs."""
    case = make_paged([(1, length)], dtype=torch.bfloat16, window=window)
    clean = replace(case, kv_cache=torch.nan_to_num(case.kv_cache))
    found = case.run()
    assert found.isfinite().all()
    assert torch.equal(found, clean.run())


def test_a_block_may_be_one_piece_of_memory(isa: str) -> None:
    """Keys and values of a block side by side, as the cache is laid out, give the same bits as far apart."""
    case = make_paged(MIXED, block_size=8)
    together = torch.empty(case.kv_cache.transpose(0, 1).shape).transpose(0, 1).copy_(case.kv_cache)
    assert together.stride(1) == 2 * together.stride(0)
    assert torch.equal(replace(case, kv_cache=together).run(), case.run())
    assert torch.equal(torch.nan_to_num(together), torch.nan_to_num(case.kv_cache))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (7, 1), (32, 8), (14, 2), (100, 1)])
def test_head_groups(isa: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    check(make_paged([(1, 40), (9, 9), (3, 270)], *heads, head_size=32, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(isa: str, dtype: torch.dtype, soft_cap: float) -> None:
    check(make_paged(MIXED, soft_cap=soft_cap, dtype=dtype, window=50))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("threads", [1, slow(3)])
def test_sinks_and_slopes(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, threads: int) -> None:
    """Also of heads whose sink is far above all scores, or below. Keys of one request are shared by threads."""
    sinks = torch.tensor([0.5, -3.0, 4.0, 200.0, -200.0, 1e6])
    slopes = torch.tensor([0.25, 0.0, 1.0, 0.1, 0.01, 0.5])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for lengths in (MIXED, [(1, 900)]):
            case = make_paged(lengths, dtype=dtype, kv_dtype=kv_dtype)
            for more in ({"sinks": sinks}, {"slopes": slopes}, {"sinks": sinks, "slopes": slopes}):
                one = replace(case, **more)
                found = one.run()
                tolerance = 2e-5 if dtype == torch.float32 and kv_dtype is None else 3e-2
                torch.testing.assert_close(found.float(), expected(one), rtol=tolerance, atol=tolerance)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", [*range(4), *map(slow, range(4, 12))])
def test_random_batches(isa: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)

    def pick(high: int) -> int:
        return int(torch.randint(1, high, (), generator=g))

    def choose(options: list) -> object:
        return options[pick(len(options) + 1) - 1]

    lengths = [(count, count + pick(600) - 1) for count in (choose([1, 1, pick(200)]) for _ in range(pick(6)))]
    groups, kv_heads = pick(9), pick(4)
    check(
        make_paged(
            lengths, groups * kv_heads, kv_heads, choose([16, 64, 72, 128]), choose([8, 16, 32]), choose(DTYPES),
            choose([None, pick(400)]), choose([None, 20.0]), seed,
        )
    )  # fmt: skip


@pytest.mark.parametrize("scale", [30.0, -30.0])
def test_scores_of_any_size(isa: str, scale: float) -> None:
    """The online softmax neither overflows nor forgets when the maximum moves by thousands between segments."""
    case = make_paged([(1, 900), (3, 600)])
    case.query.mul_(scale)
    check(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_same_bits_alone_in_company_and_in_chunks(
    isa: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int | None
) -> None:
    whole = make_paged([(1, 400), (700, 700), (20, 321)], dtype=dtype, kv_dtype=kv_dtype, window=window)
    together = whole.run()
    for request, end in enumerate(whole.query_start[1:].tolist()):
        for count in (1, 2, 19):
            if count > int(whole.query_start[request + 1] - whole.query_start[request]):
                continue
            alone = whole.last(request, count).run(write=False)
            assert torch.equal(alone, together[end - count : end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[(1, 3000)], slow([(600, 600)]), slow([(1, 2000), (1, 30), (64, 1500)])])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_same_bits_with_any_number_of_threads(
    isa: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, lengths: list[tuple[int, int]]
) -> None:
    case = make_paged(lengths, dtype=dtype, kv_dtype=kv_dtype, head_size=128)
    case.run()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(case.run(write=False))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_block_addresses_beyond_32_bits(isa: str) -> None:
    """A cache of more than 2^31 elements: pages that are not touched cost nothing."""
    num_blocks, block_size = 40_000, 128
    cache = torch.from_numpy(__import__("numpy").zeros(2 * num_blocks * block_size * 256, "uint16"))
    case = make_paged([(2, 130)], 2, 1, 256, block_size, torch.bfloat16)
    large = cache.view(torch.bfloat16).view(2, num_blocks, 1, block_size, 256)
    high = torch.tensor([[num_blocks - 1, num_blocks - 2]], dtype=torch.int32)
    large[:, high[0].long()] = case.kv_cache[:, case.block_table[0, :2].long()]
    slots = high[0, 1].long() * block_size + torch.tensor([0, 1])
    moved = Paged(
        case.query, case.key, case.value, large, case.query_start, case.seq_lens, high, slots, case.scale, None, None
    )
    assert torch.equal(moved.run(), case.run())


def test_one_openmp_runtime(library: native.Library) -> None:
    """The function that the kernels call is torch's: a second runtime would bring a second set of threads."""
    runtimes = set()
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            if "libgomp" in line or "libomp" in line or "libiomp" in line:
                runtimes.add(line.split()[-1])
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                if low <= library.parallel_runtime() < high:
                    used = line.split()[-1]
    torch_folder = str(torch.__path__[0])
    assert used.startswith(torch_folder) or not any(path.startswith(torch_folder) for path in runtimes)
