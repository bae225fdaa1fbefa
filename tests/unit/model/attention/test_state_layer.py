"""How a step is cut for layers with states."""

import torch

from pagemill.model.attention.interface import CommonAttentionMetadata
from pagemill.model.attention.state_layer import StatePlanner


def cut(requests, table, block_size=4, drafts=None):
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
            num_drafts_host=None if drafts is None else torch.tensor(drafts),
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


def test_drafts_are_tried_token_by_token_behind_what_is_certain():
    requests, table = [(1, 5), (3, 9), (6, 8), (3, 3)], [[1, 2, 0], [3, 4, 5], [6, 7, 0], [8, 0, 0]]
    plan = cut(requests, table, drafts=[0, 2, 3, 2])
    assert plan.start.tolist() == [0, 1, 3], "of the third request, two tokens come before the one that is tried first"
    assert (plan.source.tolist(), plan.target.tolist()) == ([1, 6], [2, 6])
    assert [(run.begin, run.end, run.ends) for run in plan.runs] == [(4, 6, (2,))]
    trials = plan.trials
    assert (trials.requests.tolist(), trials.num_alive) == ([2, 1, 3], (3, 3, 3, 1))
    assert trials.rows.tolist() == [6, 1, 10]
    assert (trials.source.tolist(), trials.fresh.tolist()) == ([6, 4, 8], [False, False, True])
    assert trials.target[0].tolist() == [7, 7, 7, 7]
    assert trials.target[1, :3].tolist() == [4, 4, 5]
    assert trials.last.tolist() == [
        [False, False, False, True],
        [False, True, False, False],
        [False, False, False, True],
    ]


def test_without_drafts_nothing_is_tried():
    assert cut([(3, 9)], [[3, 4, 5]], drafts=[0]).trials is None
