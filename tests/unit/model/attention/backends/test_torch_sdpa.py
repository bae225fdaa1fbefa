"""Attention of encoders over batches without padding, against each request alone."""

import pytest
import torch

from pagemill.model.attention.backends.torch_sdpa import SdpaBackend
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import CommonAttentionMetadata

CPU = torch.device("cpu")


def plan(spec, lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return SdpaBackend.metadata_builder(spec, CPU).build(
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


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [3, 7, 3, 1]])
def test_a_batch_equals_each_request_alone(lengths, window):
    spec = AttentionLayerSpec(4, 2, 8, 0.3, window, bidirectional=True)
    torch.manual_seed(0)
    total = sum(lengths)
    query, key, value = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    found = SdpaBackend.impl(spec).forward(query, key, value, torch.empty(0), plan(spec, lengths))
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        keys, values = (part[own].repeat_interleave(2, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[own], keys) * spec.scale
        if window is not None:
            places = torch.arange(length)
            scores = scores.masked_fill((places.unsqueeze(1) - places).abs() > window, -torch.inf)
        wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        torch.testing.assert_close(found[own], wanted)
        start += length


def test_requests_of_one_length_that_follow_each_other_are_not_copied():
    spec = AttentionLayerSpec(4, 2, 8, 0.3, bidirectional=True)
    together = plan(spec, [4, 4]).groups
    assert [(group.num_requests, group.rows) for group in together] == [(2, None)]
    apart = plan(spec, [4, 2, 4]).groups
    assert apart[0].rows is not None
    assert apart[0].rows.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
