"""How a step is cut for layers with states."""

import torch

from pagemill.model.attention.interface import CommonAttentionMetadata
from pagemill.model.attention.state_layer import StatePlanner


def cut(requests, table, block_size=4):
    """(query tokens, tokens of the sequence) of each request."""
    start = torch.tensor([0, *(count for count, _ in requests)], dtype=torch.int32).cumsum(0).to(torch.int32)
    return StatePlanner().build(
        CommonAttentionMetadata(
            query_start=start,
            seq_lens=torch.tensor([length for _, length in requests], dtype=torch.int32),
            block_table=torch.tensor(table, dtype=torch.int32),
            slot_mapping=torch.zeros(0, dtype=torch.int64),
            num_requests=len(requests),
            num_tokens=int(start[-1]),
            max_query_len=max(count for count, _ in requests),
            max_seq_len=max(length for _, length in requests),
            block_size=block_size,
        )
    )


def test_a_prompt_is_cut_at_the_ends_of_blocks():
    plan = cut([(10, 10)], [[7, 8, 9]])
    assert plan.start.tolist() == [0, 4, 8, 10]
    assert plan.target.tolist() == [7, 8, 9]
    assert plan.source.tolist()[1:] == [7, 8]
    assert plan.fresh.tolist() == [True, False, False]


def test_a_chunk_continues_within_its_block_and_beyond():
    plan = cut([(4, 7)], [[7, 8]])  # tokens 3 to 6
    assert plan.start.tolist() == [0, 1, 4]
    assert plan.source.tolist() == [7, 7]
    assert plan.target.tolist() == [7, 8]
    assert not plan.fresh.any()


def test_a_cached_state_is_read_and_the_next_block_written():
    plan = cut([(3, 11)], [[0, 5, 6]])
    assert (plan.start.tolist(), plan.source.tolist(), plan.target.tolist()) == ([0, 3], [5], [6])
    assert not plan.fresh.any()


def test_decodes_are_one_segment_each_in_the_order_of_the_batch():
    plan = cut([(1, 1), (1, 4), (1, 5), (2, 9)], [[1, 0, 0], [2, 0, 0], [3, 4, 0], [0, 5, 6]])
    assert plan.start.tolist() == [0, 1, 2, 3, 4, 5]
    assert plan.source.tolist()[1:] == [2, 3, 5, 5]
    assert plan.target.tolist() == [1, 2, 4, 5, 6]
    assert plan.fresh.tolist() == [True, False, False, False, False]
