"""Steps of many rows, whose tasks threads take in order: the same bits as one thread operation by operation."""

import ctypes
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels import native
from pagemill.model.kernels.layer_plan import LayerPlan, PlanBuilder
from pagemill.model.kernels.linear import SILU, PackedLinear, pack_bf16
from pagemill.model.kernels.linear_int import Q8_0, pack_blocks, quantize_q8
from pagemill.model.kernels.mirrors import Batch, Layer
from pagemill.model.kernels.pack_linear import NO_GATE
from pagemill.model.kernels.plan_parts import AttentionParts, NormWeight
from tests.marks import slow

pytestmark = pytest.mark.cases(one_in=4)

HIDDEN, INNER, HEADS, KV_HEADS, SIZE, BLOCK_SIZE = 96, 160, 4, 2, 32, 16
LONGEST = 700
BATCHES = {
    "one prompt": [(0, 300)],
    "a prompt behind a cached prefix": [(350, 333)],
    "prompts": [(0, 130), (0, 70), (64, 61), (0, 2)],
    "decoding": [(length, 1) for length in range(1, 250)],
    "mixed": [(40, 1), (7, 1), (0, 190), (500, 1), (300, 90), (1, 1)],
}
"""(tokens that are cached, tokens of the step) of each request."""
FEW = [
    pytest.param(requests, id=name, marks=() if name in ("prompts", "mixed") else pytest.mark.slow)
    for name, requests in BATCHES.items()
]
WINDOWS = (0, 50, 0)
"""One per layer."""


@pytest.fixture(autouse=True)
def kernels() -> None:
    found = native.library()
    if found is None or found.isa() == b"portable":
        pytest.skip("this machine has no native plan")


def weight(outputs: int, inputs: int, integers: bool, gate: int = NO_GATE) -> PackedLinear:
    values = (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16()
    return pack_blocks(Q8_0, quantize_q8(values), gate=gate) if integers else pack_bf16(values, gate=gate)


def make_plan(caches: list[Tensor], integers: bool) -> LayerPlan:
    table = torch.randn(LONGEST, SIZE).clamp(-1, 1).bfloat16()
    norm = NormWeight(torch.rand(HIDDEN).bfloat16(), 1e-5)
    builder = PlanBuilder()
    hidden = source = builder.buffer("embedded", HIDDEN)
    residual = None
    for index, (cache, window) in enumerate(zip(caches, WINDOWS, strict=True)):
        layer = Layer(HEADS, KV_HEADS, SIZE, window, 0, SIZE**-0.5, 0.0)
        parts = AttentionParts(f"layer {index}", layer, cache, (table, table))
        if residual is None:
            normed, residual = builder.norm(hidden, norm, "normed"), hidden
        else:
            normed, residual = builder.add_norm(hidden, residual, norm, "normed", "after MLP")
        qkv = builder.linear(normed, weight((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN, integers), "qkv")
        attended = builder.attention(qkv, parts, "attended")
        hidden = builder.linear(attended, weight(HIDDEN, HEADS * SIZE, integers), "hidden")
        normed, residual = builder.add_norm(hidden, residual, norm, "normed", "after attention")
        inner = builder.linear(normed, weight(2 * INNER, HIDDEN, integers, SILU), "inner")
        hidden = builder.linear(inner, weight(HIDDEN, INNER, integers), "hidden")
    result, _ = builder.add_norm(hidden, residual, norm, "result", "after MLP")
    return builder.finish(source, result)


@dataclass
class Case:
    """A step: the same tokens and the same caches whenever it is run."""

    plan: LayerPlan
    caches: list[Tensor]
    requests: list[tuple[int, int]]
    donors: dict[int, tuple[int, int]]
    """Request -> (whose blocks are its first ones, how many of them)."""

    @classmethod
    def make(
        cls, requests: list[tuple[int, int]], integers: bool, donors: dict[int, tuple[int, int]] | None = None
    ) -> "Case":
        torch.manual_seed(0)
        num_blocks = 1 + sum(-(-sum(one) // BLOCK_SIZE) for one in requests)
        shape = 2, num_blocks, KV_HEADS, BLOCK_SIZE, SIZE
        caches = [torch.randn(shape).bfloat16() for _ in WINDOWS]
        return cls(make_plan(caches, integers), caches, requests, donors or {})

    def run(self, threads: int, wanted: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """[T, E], valid until the next run, and the caches as the step leaves them."""
        torch.manual_seed(1)
        counts = [tokens for _, tokens in self.requests]
        hidden = torch.randn(sum(counts), HIDDEN).bfloat16()
        positions = torch.cat([torch.arange(before, before + tokens) for before, tokens in self.requests])
        lengths = [sum(one) for one in self.requests]
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        order = (torch.randperm(sum(blocks)) + 1).int()
        for row, ids in enumerate(order.split(blocks)):
            table[row, : len(ids)] = ids
        for row, (donor, shared) in self.donors.items():
            table[row, :shared] = table[donor, :shared]
        owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        slots = table[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        kept = [starts, torch.tensor(lengths, dtype=torch.int32), table, slots]
        sizes = len(counts), sum(counts), table.shape[1], BLOCK_SIZE
        batch = Batch(*(tensor.data_ptr() for tensor in kept), *sizes)
        before, original = torch.get_num_threads(), [cache.clone() for cache in self.caches]
        try:
            torch.set_num_threads(threads)
            result = self.plan.run(hidden, positions, [ctypes.addressof(batch)] * len(WINDOWS), wanted)
            return result, [cache.clone() for cache in self.caches]
        finally:
            torch.set_num_threads(before)
            for cache, values in zip(self.caches, original, strict=True):
                cache.copy_(values)


@pytest.mark.parametrize("integers", [False, True], ids=["bf16", "Q8_0"])
@pytest.mark.parametrize("requests", FEW)
def test_threads_change_nothing(requests: list[tuple[int, int]], integers: bool) -> None:
    case = Case.make(requests, integers)
    alone, caches = case.run(1)
    alone = alone.clone()
    assert alone.isfinite().all()
    for threads in (2, 3, 7):
        together, theirs = case.run(threads)
        assert torch.equal(together, alone)
        assert all(torch.equal(one, other) for one, other in zip(caches, theirs, strict=True))


@pytest.mark.parametrize("window", [0, slow(50)], ids=["full", "window"])
@pytest.mark.parametrize("filler", [0, slow(3)], ids=["filled before", "filled after"])
def test_blocks_that_the_same_step_fills(filler: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests may find in the cache what another one, anywhere in the batch, computes in the same step."""
    monkeypatch.setattr(f"{__name__}.WINDOWS", (window, window))
    requests = [(256, 61), (256, 40), (64, 30), (256, 2)]
    requests[filler] = (0, 300)
    donors = {row: (filler, cached // BLOCK_SIZE) for row, (cached, _) in enumerate(requests) if cached}
    case = Case.make(requests, integers=False, donors=donors)
    alone, caches = case.run(1)
    alone = alone.clone()
    for threads in (2, 3, *[7] * 8):
        together, theirs = case.run(threads)
        assert torch.equal(together, alone)
        assert all(torch.equal(one, other) for one, other in zip(caches, theirs, strict=True))


@pytest.mark.parametrize("requests", FEW)
def test_wanted_rows(requests: list[tuple[int, int]]) -> None:
    """They are what they are when all rows are computed; keys and values of every token are in the caches."""
    case = Case.make(requests, integers=True)
    alone, caches = case.run(1)
    alone = alone.clone()
    ends = torch.tensor([tokens for _, tokens in requests]).cumsum(0) - 1
    for wanted in (ends, ends[:0], torch.arange(len(alone))[5:200:3]):
        for threads in (1, 2, 3):
            rows, theirs = case.run(threads, wanted)
            assert torch.equal(rows[wanted], alone[wanted])
            assert all(torch.equal(one, other) for one, other in zip(caches, theirs, strict=True))


def test_rows_that_nobody_wants_are_left_out() -> None:
    case = Case.make(BATCHES["one prompt"], integers=False)
    rows, _ = case.run(1)
    last = rows[299].clone()
    rows.fill_(7)
    rows, _ = case.run(2, torch.tensor([299]))
    assert torch.equal(rows[299], last)
    assert (rows[:299] == 7).all()
