"""Which graph a batch runs in: golden."""

import pytest

from pagemill.config.capture_sizes import capture_sizes
from pagemill.config.graph_mode import GraphMode
from pagemill.model.forward_context import BatchDescriptor
from pagemill.worker.graphs.dispatcher import BatchLimits, Dispatcher

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
SIZES = (1, 2, 4, 8, 16)


def make(mode, sizes=SIZES, small_step=0, **limits):
    return Dispatcher(GraphMode[mode], sizes, BatchLimits(**({"max_num_requests": 8} | limits)), small_step=small_step)


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


def verifying(requests, length):
    return FULL, BatchDescriptor(requests * length, requests, True)


def test_steps_that_verify_drafts_have_graphs_of_their_own():
    dispatcher = make("FULL_AND_PIECEWISE", verify_lens=(3, 6), verify_tokens=40)
    keys = dispatcher.graph_keys()
    of_six = sorted(key.num_requests for mode, key in keys if mode is FULL and key.query_len == 6)
    assert of_six == [1, 2, 3, 4, 6], "as many as have room, and a round number"
    assert dispatcher.dispatch(15, 5, True) == verifying(6, 3)
    assert dispatcher.dispatch(30, 5, True) == verifying(6, 6)
    assert dispatcher.dispatch(5, 5, True) == (FULL, decode(8))
    assert dispatcher.dispatch(10, 5, True)[0] is PIECEWISE, "nobody asked for one draft"
    assert dispatcher.dispatch(15, 5, True, cascade=True)[0] is PIECEWISE
    assert dispatcher.dispatch(12, 5, False)[0] is PIECEWISE
    dispatcher.captured(*verifying(4, 6))
    assert dispatcher.stand_in(18, 3, True) == verifying(4, 6)
    assert dispatcher.stand_in(9, 3, True) is None, "nor one of six tokens for three"
    assert not [key for _, key in make("PIECEWISE", verify_lens=(3,), verify_tokens=40).graph_keys() if key.uniform]


def mixed(tokens, requests):
    return FULL, BatchDescriptor(tokens, requests, False)


@pytest.mark.parametrize("mode", ("FULL", "FULL_AND_PIECEWISE"))
def test_decode_batches_and_others_have_graphs_of_their_own(mode):
    dispatcher = make(mode, small_step=16)
    assert dispatcher.dispatch(3, 3, True) == (FULL, decode(4))
    assert dispatcher.dispatch(3, 2, False) == dispatcher.dispatch(4, 4, False) == mixed(4, 4)
    dispatcher.drop(FULL, decode(4))
    assert dispatcher.dispatch(3, 3, True) == (
        (PIECEWISE, BatchDescriptor(4, None)) if mode != "FULL" else (NONE, BatchDescriptor(3, 3, True))
    )


# (tokens, requests) -> the shape of its graph where there are 200 requests at most, in FULL and, up to 512 tokens, in
# FULL_AND_PIECEWISE.
MIXED = {
    (1, 2): (mixed(2, 2), mixed(2, 2)),
    (2, 1): (mixed(2, 1), mixed(2, 1)),
    (9, 1): (mixed(16, 1), mixed(16, 1)),
    (128, 1): (mixed(128, 1), mixed(128, 1)),
    (129, 2): (mixed(160, 16), mixed(160, 16)),
    (130, 16): (mixed(160, 16), mixed(160, 16)),
    (130, 17): (mixed(160, 128), mixed(160, 128)),
    (100, 99): (mixed(112, 112), mixed(112, 112)),
    (512, 128): (mixed(512, 128), mixed(512, 128)),
    (300, 129): (mixed(320, 200), (PIECEWISE, BatchDescriptor(304, None))),
    (513, 1): (mixed(640, 1), (PIECEWISE, BatchDescriptor(576, None))),
    (1000, 200): (mixed(1000, 200), (PIECEWISE, BatchDescriptor(1000, None))),
    (1001, 1): ((NONE, BatchDescriptor(1001, 1)), (NONE, BatchDescriptor(1001, 1))),
}


@pytest.mark.parametrize("batch", MIXED)
def test_the_graph_of_a_mixed_batch(batch):
    sizes = capture_sizes(1000)
    whole, usual = (
        make(mode, sizes, max_num_requests=200, small_step=512).dispatch(*batch, False)
        for mode in ("FULL", "FULL_AND_PIECEWISE")
    )
    assert (whole, usual) == MIXED[batch]


def test_what_cannot_be_captured_whole_is_not():
    dispatcher = make("FULL_AND_PIECEWISE", small_step=0)
    assert dispatcher.dispatch(7, 2, False) == (PIECEWISE, BatchDescriptor(8, None))
    assert not any(mode is FULL and not key.uniform for mode, key in dispatcher.graph_keys())


def test_graphs_of_mixed_batches_stay_few():
    sizes = capture_sizes(1024)
    keys = make("FULL_AND_PIECEWISE", sizes, max_num_requests=1024, small_step=512).graph_keys()
    assert sum(mode is FULL and not key.uniform for mode, key in keys) < 64


def test_a_dropped_mixed_graph_falls_to_one_of_more_requests():
    dispatcher = make("FULL_AND_PIECEWISE", small_step=16)
    assert dispatcher.dispatch(8, 1, False) == mixed(8, 1)
    dispatcher.drop(*mixed(8, 1))
    assert dispatcher.dispatch(8, 1, False) == mixed(8, 8)
    dispatcher.drop(*mixed(8, 8))
    assert dispatcher.dispatch(8, 1, False) == (PIECEWISE, BatchDescriptor(8, None))


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
        dispatcher = make(mode.value, lora=True, uniform_query_len=2, small_step=8)
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
