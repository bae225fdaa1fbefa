"""Attention of encoders by the native kernels over batches without padding, against each request alone in float64."""

import itertools

import pytest
import torch

from pagemill.model.attention.backends.cpu_encoder import BLOCK_SIZE, CpuEncoderBackend
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import CommonAttentionMetadata
from pagemill.model.kernels import native

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(native.library() is None, reason="the CPU kernels cannot be built here")


def plan(spec, lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return CpuEncoderBackend.metadata_builder(spec, CPU).build(
        CommonAttentionMetadata(
            query_start=bounds,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.zeros(len(lengths), 1, dtype=torch.int32),
            slot_mapping=torch.zeros(0, dtype=torch.int64),
            num_requests=len(lengths),
            num_tokens=int(bounds[-1]),
            max_query_len=max(lengths),
            max_seq_len=max(lengths),
            block_size=16,
        )
    )


def expected(spec, query, key, value):
    """Of one request, [n, H, D] and twice [n, Hkv, D]."""
    group = spec.num_heads // spec.num_kv_heads
    query, key, value = (part.double() for part in (query, key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * spec.scale
    if spec.window is not None:
        places = torch.arange(len(query))
        scores = scores.masked_fill((places.unsqueeze(1) - places).abs() > spec.window, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(group, 1))


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 8), (12, 12, 32), (2, 2, 80)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("lengths", [[5], [1, 33, 1], [4, 4, 4], [300, 7, 97, 1, 520]], ids=str)
def test_a_batch_equals_each_request_alone(lengths, window, heads, dtype, tolerance):
    num_heads, num_kv_heads, size = heads
    spec = AttentionLayerSpec(num_heads, num_kv_heads, size, size**-0.5, window, bidirectional=True)
    generator = torch.Generator().manual_seed(0)
    # Slices of a wider tensor, as a projection gives them.
    joined = torch.randn(sum(lengths), num_heads + 2 * num_kv_heads, size, generator=generator).to(dtype)
    query, key, value = joined.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    found = CpuEncoderBackend.impl(spec).forward(query, key, value, torch.empty(0), plan(spec, lengths))
    for start, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        own = slice(start, end)
        wanted = expected(spec, query[own], key[own], value[own])
        assert (found[own].double() - wanted).abs().max() < tolerance


def test_requests_have_blocks_of_their_own():
    spec = AttentionLayerSpec(4, 2, 8, 0.3, bidirectional=True)
    made = plan(spec, [1, BLOCK_SIZE + 1, BLOCK_SIZE])
    assert made.num_blocks == 4
    assert made.common.block_table.tolist() == [[0, 1], [1, 2], [3, 4]]
    assert made.common.slot_mapping.tolist() == [0, *range(BLOCK_SIZE, 2 * BLOCK_SIZE + 1), *range(96, 128)]


def test_it_is_for_encoders_in_types_that_the_kernels_compute():
    encoder = AttentionLayerSpec(4, 2, 8, 0.3, bidirectional=True)
    assert CpuEncoderBackend.capability.attention_types.isdisjoint({"decoder"})
    assert CpuEncoderBackend.unsupported(encoder, "cpu", "float16")
