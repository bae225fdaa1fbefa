"""Which graph a batch runs in: golden."""

import pytest

from pagemill.config.graph_mode import GraphMode
from pagemill.model.forward_context import BatchDescriptor
from pagemill.worker.graphs.dispatcher import BatchLimits, Dispatcher

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
SIZES = (1, 2, 4, 8, 16)


def make(mode, sizes=SIZES, **limits):
    return Dispatcher(GraphMode[mode], sizes, BatchLimits(**({"max_num_requests": 8} | limits)))


def decode(count):
    return BatchDescriptor(count, count, True)


# mode -> (decode of 3, prefill of 7 tokens, decode of 3 with cascade, prefill of 17)
GOLDEN = {
    "NONE": (NONE, NONE, NONE, NONE),
    "PIECEWISE": (PIECEWISE, PIECEWISE, PIECEWISE, NONE),
    "FULL": (FULL, FULL, NONE, NONE),
    "FULL_DECODE_ONLY": (FULL, NONE, NONE, NONE),
    "FULL_AND_PIECEWISE": (FULL, PIECEWISE, PIECEWISE, NONE),
}


@pytest.mark.parametrize("mode", GOLDEN)
@pytest.mark.parametrize("has_lora", (False, True))
def test_the_mode_of_a_batch(mode, has_lora):
    dispatcher = make(mode, lora=True)
    batches = (
        dispatcher.dispatch(3, 3, True, has_lora),
        dispatcher.dispatch(7, 2, False, has_lora),
        dispatcher.dispatch(3, 3, True, has_lora, cascade=True),
        dispatcher.dispatch(17, 2, False, has_lora),
    )
    assert tuple(chosen for chosen, _ in batches) == GOLDEN[mode]
    assert {key.has_lora for _, key in batches} == {has_lora}


def test_a_batch_is_padded_to_the_next_size_that_was_captured():
    dispatcher = make("FULL_AND_PIECEWISE")
    assert dispatcher.dispatch(3, 3, True) == (FULL, decode(4))
    assert dispatcher.dispatch(4, 4, True) == (FULL, decode(4))
    assert dispatcher.dispatch(9, 2, False) == (PIECEWISE, BatchDescriptor(16, None))


def test_a_batch_without_a_graph_is_not_padded():
    assert make("FULL_DECODE_ONLY").dispatch(7, 2, False) == (NONE, BatchDescriptor(7, 2, False))
    assert make("FULL_AND_PIECEWISE").dispatch(19, 19, True) == (NONE, BatchDescriptor(19, 19, True))


def test_in_full_mode_decode_batches_share_the_graphs_of_the_others():
    dispatcher = make("FULL")
    assert dispatcher.dispatch(3, 3, True) == dispatcher.dispatch(3, 2, False) == (FULL, BatchDescriptor(4, 4, False))
    assert not any(key.uniform for _, key in dispatcher.graph_keys())


def test_a_graph_of_mixed_batches_has_room_for_every_number_of_requests():
    assert make("FULL").dispatch(12, 7, False) == (FULL, BatchDescriptor(16, 8, False))


def test_decode_graphs_go_up_to_the_most_requests_and_no_further():
    dispatcher = make("FULL_DECODE_ONLY", max_num_requests=7)
    assert dispatcher.dispatch(5, 5, True) == (FULL, decode(7))
    assert max(key.num_tokens for _, key in dispatcher.graph_keys()) == 7


def test_a_decode_step_with_drafts_has_as_many_tokens_per_request():
    dispatcher = make("FULL_AND_PIECEWISE", uniform_query_len=3)
    assert dispatcher.dispatch(9, 3, True) == (FULL, BatchDescriptor(9, 3, True))
    assert dispatcher.dispatch(12, 4, True) == (FULL, BatchDescriptor(18, 6, True))
    assert {key.num_tokens % 3 for mode, key in dispatcher.graph_keys() if mode is FULL} == {0}


def test_equal_lengths_that_are_no_decode_step_are_not_uniform():
    assert make("FULL_AND_PIECEWISE").dispatch(6, 2, True) == (PIECEWISE, BatchDescriptor(8, None))


def test_without_adapters_there_are_no_graphs_with_them():
    dispatcher = make("FULL_AND_PIECEWISE")
    assert not any(key.has_lora for _, key in dispatcher.graph_keys())
    assert dispatcher.dispatch(3, 3, True, has_lora=True)[0] is NONE


def test_adapters_double_the_keys():
    assert len(make("FULL_AND_PIECEWISE", lora=True).graph_keys()) == 2 * len(make("FULL_AND_PIECEWISE").graph_keys())


def test_keys_are_listed_once_and_the_largest_first():
    keys = make("FULL_AND_PIECEWISE").graph_keys()
    assert keys == [
        (PIECEWISE, BatchDescriptor(16, None)),
        (FULL, decode(8)),
        (PIECEWISE, BatchDescriptor(8, None)),
        (FULL, decode(4)),
        (PIECEWISE, BatchDescriptor(4, None)),
        (FULL, decode(2)),
        (PIECEWISE, BatchDescriptor(2, None)),
        (FULL, decode(1)),
        (PIECEWISE, BatchDescriptor(1, None)),
    ]


def test_every_dispatched_graph_is_a_key():
    for mode in GraphMode:
        dispatcher = make(mode.value, lora=True, uniform_query_len=2)
        keys = set(dispatcher.graph_keys())
        for tokens in range(1, 20):
            for requests in range(1, min(tokens, 8) + 1):
                for lora in (False, True):
                    for cascade in (False, True):
                        chosen, key = dispatcher.dispatch(tokens, requests, tokens == 2 * requests, lora, cascade)
                        assert key.num_tokens >= tokens
                        assert key.num_requests is None or key.num_requests >= requests
                        assert (chosen is NONE) != ((chosen, key) in keys)


def test_a_dropped_graph_falls_to_the_next_mode():
    dispatcher = make("FULL_AND_PIECEWISE")
    dispatcher.drop(FULL, decode(4))
    assert dispatcher.dispatch(3, 3, True) == (PIECEWISE, BatchDescriptor(4, None))
    dispatcher.drop(PIECEWISE, BatchDescriptor(4, None))
    assert dispatcher.dispatch(3, 3, True)[0] is NONE
    assert dispatcher.dispatch(2, 2, True) == (FULL, decode(2))
