"""The compiled library, once per instruction set that this CPU has; each test leaves the best one chosen.

cpu/test_dispatch.py skips once for each instruction set that it has not.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from pagemill import envs
from pagemill.model.kernels import native, reference
from pagemill.model.kernels.mirrors import Batch, Layer

DTYPES = [torch.float32, torch.bfloat16]
KV_DTYPES = [None, torch.int8]
"""Of the cache; None: that of the model."""
MIXED = [(1, 1), (1, 300), (5, 5), (70, 70), (33, 290), (1, 16), (1, 17), (40, 555)]
"""(new tokens, all tokens) of requests of every kind."""


@pytest.fixture(scope="session")
def library() -> native.Library:
    found = native.library()
    if found is None and shutil.which(envs.compiler()) is None:
        pytest.skip(f"no C++ compiler ({envs.compiler()}) on this machine")
    assert found is not None, "the kernels do not build here"
    return found


def instruction_sets() -> list[str]:
    """Those of the kernels that this CPU has; without kernels the first, so that `library` says why."""
    found = native.library()
    if found is None:
        return [native.ISAS[0]]
    here = [name for name in native.ISAS if found.init(name.encode()) == 0]
    found.init(None)
    return here


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest, library: native.Library) -> Iterator[str]:
    assert library.init(request.param.encode()) == 0
    assert library.isa().decode() == request.param
    yield request.param
    library.init(None)


@dataclass(frozen=True)
class Paged:
    """Random requests over a cache with permuted blocks. What must not be read is NaN."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    """As the kernels lay it out."""
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    chunk_size: int | None = None
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    def run(self, write: bool = True) -> torch.Tensor:
        """Through the native kernel."""
        _, _, num_kv_heads, block_size, _ = self.kv_cache.shape
        batch = Batch(
            self.query_start.data_ptr(), self.seq_lens.data_ptr(), self.block_table.data_ptr(),
            self.slot_mapping.data_ptr(), len(self.seq_lens), len(self.query), self.block_table.stride(0), block_size,
        )  # fmt: skip
        layer = Layer(
            self.query.shape[1],
            num_kv_heads,
            self.query.shape[2],
            self.window or 0,
            self.chunk_size or 0,
            self.scale,
            self.soft_cap or 0.0,
        )
        if self.sinks is not None:
            layer.sinks = self.sinks.data_ptr()
        if self.slopes is not None:
            layer.slopes = self.slopes.data_ptr()
        key, value = (self.key, self.value) if write else (None, None)
        return native.attention(
            self.query, key, value, self.kv_cache, native.ctypes.addressof(batch), native.ctypes.addressof(layer)
        )

    def last(self, request: int, count: int) -> "Paged":
        """Only the last `count` tokens of one request."""
        end = int(self.query_start[request + 1])
        part = slice(end - count, end)
        return replace(
            self,
            query=self.query[part], key=self.key[part], value=self.value[part], slot_mapping=self.slot_mapping[part],
            query_start=torch.tensor([0, count], dtype=torch.int32), seq_lens=self.seq_lens[request : request + 1],
            block_table=self.block_table[request : request + 1],
        )  # fmt: skip


def make_paged(
    lengths: list[tuple[int, int]],
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    soft_cap: float | None = None,
    seed: int = 0,
    chunk_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Paged:
    """lengths: (query tokens, tokens of the sequence) of each request. `kv_dtype`: int8, or dtype.

    Tokens of the step are not in the cache yet. Out-of-window blocks are the null block, which is NaN, as are unused
    blocks, unused slots of used blocks and the unused tail of the block table (an id that would be read is NaN).
    """
    g = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for _, length in lengths]
    num_blocks = 2 + sum(needed)
    order = (torch.randperm(sum(needed), generator=g) + 1).to(torch.int32)
    table = torch.full((len(lengths), max(needed) + 3), num_blocks - 1, dtype=torch.int32)
    cache = torch.full((2, num_blocks, num_kv_heads, block_size, head_size), float("nan"), dtype=dtype)
    if kv_dtype == torch.int8:
        cache = reference.quantized_rows(cache) | -1  # every bit is set, the scales are NaN
    slots, used = [], 0
    for r, (count, length) in enumerate(lengths):
        blocks = order[used : used + needed[r]].clone()
        used += needed[r]
        positions = torch.arange(length)
        slot = blocks[positions // block_size].long() * block_size + positions % block_size
        slots.append(slot[length - count :])
        first = max(0, length - count - (window or length) + 1)
        if chunk_size is not None:
            first = max(first, (length - count) // chunk_size * chunk_size)
        old = slot[first : length - count]
        rows = torch.randn((len(old), 2, num_kv_heads, head_size), generator=g).to(dtype)
        rows = reference.quantized_rows(rows) if kv_dtype == torch.int8 else rows
        cache[:, old // block_size, :, old % block_size] = rows
        blocks[: first // block_size] = 0
        table[r, : needed[r]] = blocks
    total = sum(count for count, _ in lengths)
    qkv = torch.randn((total, num_heads + 2 * num_kv_heads, head_size), generator=g).to(dtype)
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    start = torch.tensor([0, *(count for count, _ in lengths)]).cumsum(0).to(torch.int32)
    return Paged(
        query, key, value, reference.packed_cache(cache), start,
        torch.tensor([n for _, n in lengths], dtype=torch.int32), table,
        torch.cat(slots), head_size**-0.5, window, soft_cap, chunk_size,
    )  # fmt: skip


def expected(case: Paged) -> torch.Tensor:
    """The reference on the cache as the kernel left it."""
    return reference.paged_attention(
        case.query, reference.unpacked_cache(case.kv_cache), case.query_start, case.seq_lens, case.block_table,
        case.scale, case.window, case.soft_cap, case.chunk_size, (case.sinks, case.slopes),
    )  # fmt: skip
