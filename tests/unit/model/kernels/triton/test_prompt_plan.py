"""What tiles of prompts are, and in which order: the plan of the kernel for Hopper GPUs, which itself needs one."""

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from tests.fakes.triton_interpreter import DEVICE  # isort: skip

from pagemill.model.attention.backends.hopper_prompts import RECORD, plan, plan_ends
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import BatchLens
from pagemill.model.kernels.triton.gated_prompts import share_of_use
from pagemill.model.kernels.triton.prompt_attention import place_of
from tests.fakes.paged_attention import PagedCase

REQUESTS = [(70, 70), (1, 33), (40, 300), (5, 9)]
"""(new tokens, all tokens); the second decodes, and has no tile."""
TILE = 32
FIRST_TILE = [0, 3, 3, 5, 6]
TILE_REQUEST = [0, 0, 0, 2, 2, 3]


def records_of(**traits):
    spec = AttentionLayerSpec(16, 4, 128, 0.1, **traits)
    common = PagedCase(spec, REQUESTS, dtype=torch.bfloat16, device=DEVICE).common()
    room = torch.full(((2 * 8 + 1) * RECORD,), -1, dtype=torch.int32, device=DEVICE)
    lists = FIRST_TILE, [*TILE_REQUEST, 3, 3]
    first, request = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in lists)
    return plan(spec, common, room, first, request, 8).records[: len(TILE_REQUEST), :7].tolist()


def expected(first_seen):
    """Token in the batch, tokens, position, begin, end, request, length; those of the most keys first."""
    tiles = [
        (begin, min(TILE, query - tile), length - query + tile, request, length)
        for request, (query, length), start in zip(range(4), REQUESTS, (0, 70, 71, 111), strict=True)
        if query > 1
        for tile in range(0, query, TILE)
        for begin in (start + tile,)
    ]
    found = [
        [token, count, position, first_seen(position) // 16 * 16, position + count, request, length]
        for token, count, position, request, length in tiles
    ]
    return sorted(found, key=lambda record: record[3] - record[4])


def test_all_keys():
    assert records_of() == expected(lambda position: 0)


def test_a_window():
    assert records_of(window=50) == expected(lambda position: max(0, position - 49))


def test_chunks():
    assert records_of(chunk_size=64) == expected(lambda position: position // 64 * 64)


@pytest.mark.parametrize(
    ("kv_heads", "lens", "heads"),
    [
        (8, [8192], 4),
        (8, [16384], 2),
        (8, [3000] * 4, 2),
        (8, [100_000], 1),
        (6, [16384], 2),
        (7, [16384], 1),
        (8, [512] * 16, 4),
        (8, None, 8),
    ],
)
def test_key_heads_at_once(kv_heads, lens, heads):
    """As many as have 20 MiB of keys and values."""
    spec = AttentionLayerSpec(2 * kv_heads, kv_heads, 128, 0.1)
    common = PagedCase(spec, [(40, 40)], dtype=torch.bfloat16, device=DEVICE).common()
    if lens is not None:
        host = BatchLens(np.zeros(len(lens) + 1, np.int32), np.array(lens, np.int32))
        common = dataclasses.replace(common, batch_lens=host)
    room = torch.zeros(5 * RECORD, dtype=torch.int32, device=DEVICE)
    tiles = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    room[0] = 7
    found = plan(spec, common, room, tiles, tiles, 2)
    assert found.heads_at_once == heads
    assert found.counter == 0


@pytest.mark.parametrize("heads_at_once", [1, 3, 6])
def test_every_tile_of_some_heads_comes_before_other_heads(heads_at_once):
    found = [place_of.fn(item, 5, heads_at_once) for item in range(5 * 6)]
    parts = range(0, 6, heads_at_once)
    assert found == [(tile, first + head) for first in parts for tile in range(5) for head in range(heads_at_once)]


@pytest.mark.parametrize("traits", [{}, {"window": 50}, {"chunk_size": 64}])
@pytest.mark.parametrize("decode_tokens", [1, 5])
def test_the_last_tiles(traits, decode_tokens):
    spec = AttentionLayerSpec(16, 4, 128, 0.1, **traits)
    common = PagedCase(spec, REQUESTS, dtype=torch.bfloat16, device=DEVICE).common()
    room = torch.full(((len(REQUESTS) + 1) * RECORD,), -1, dtype=torch.int32, device=DEVICE)
    found = plan_ends(spec, common, room, decode_tokens)
    last = {record[5]: record for record in sorted(records_of(**traits)) if REQUESTS[record[5]][0] > decode_tokens}
    count = found.first_tile[found.num_requests]
    assert found.counter == 0
    assert found.records.view(-1, RECORD)[:count, :7].tolist() == list(last.values())


def test_the_last_tiles_of_many_requests():
    spec = AttentionLayerSpec(16, 4, 128, 0.1)
    common = PagedCase(spec, [(1, 3), (2, 3)] * 300, dtype=torch.bfloat16, device=DEVICE).common()
    room = torch.full((601 * RECORD,), -1, dtype=torch.int32, device=DEVICE)
    found = plan_ends(spec, common, room, 1)
    assert found.first_tile[0] == 300
    assert found.records.view(-1, RECORD)[:300, 5].tolist() == list(range(1, 600, 2))


@pytest.mark.parametrize(
    ("rows", "outputs", "share"), [(512, 12288, 384 / 396), (300, 12288, 288 / 396 * 300 / 384), (128, 128, 1 / 132)]
)
def test_share_of_use(rows, outputs, share):
    assert share_of_use(rows, outputs, 132) == pytest.approx(share)
