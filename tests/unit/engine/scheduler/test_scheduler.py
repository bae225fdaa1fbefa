"""Who runs when, with how many tokens, and who gives way."""

import numpy as np
import pytest

from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.scheduler.queues import WaitingQueue
from pagemill.engine.scheduler.scheduler import Scheduler
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from pagemill.messages.step import ModelRunnerOutput
from tests.fakes.engine_setup import Client, core_request, full, make_core, sliding
from tests.fakes.scripted_worker import alone

NO_STOP = {"max_tokens": 100}


def engine(specs=None, **settings):
    core, worker = make_core(specs, **settings)
    return Client(core), worker


def shape(step):
    """{slot: tokens} of a step."""
    return dict(zip(step.slots.tolist(), step.num_tokens.tolist(), strict=True))


def expected(worker, request, max_model_len=64):
    return alone(request, worker.group_specs, worker.vocab_size, max_model_len)


# --- budget and chunks --------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    client, worker = engine(budget=8)
    short, long = core_request("short", [9, 9], **NO_STOP), core_request("long", 20, max_tokens=2)
    client.add(short)
    client.step()
    client.add(long)
    for _ in range(4):
        client.step()
    assert [shape(step) for step in worker.steps] == [{0: 2}, {0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 6}, {0: 1, 1: 1}]
    assert [len(step.new) for step in worker.steps] == [1, 1, 0, 0, 0]
    assert client.tokens["long"] == expected(worker, long)


def test_the_threshold_leaves_room_for_others():
    client, worker = engine(budget=16, long_prefill_token_threshold=5)
    client.add(core_request("long", [8] * 12), core_request("other", 4))
    client.step()
    client.step()
    client.step()
    assert [shape(step) for step in worker.steps] == [{0: 5, 1: 4}, {0: 5, 1: 1}, {0: 2, 1: 1}]


def test_prompts_beyond_the_limit_start_a_step_later_uncut():
    client, worker = engine(budget=64, max_prefill_tokens=10)
    client.add(*(core_request(name, [token] * 4) for token, name in enumerate("abcde")))
    for _ in range(3):
        client.step()
    assert [[new.request_id for new in step.new] for step in worker.steps] == [["a", "b"], ["c", "d"], ["e"]]
    assert shape(worker.steps[1]) == {0: 1, 1: 1, 2: 4, 3: 4}


def test_a_prompt_beyond_the_limit_of_prompts_starts_alone():
    client, worker = engine(budget=16, max_prefill_tokens=10)
    client.add(core_request("a", [8] * 4), core_request("long", [7] * 20), core_request("b", [6] * 4))
    for _ in range(3):
        client.step()
    assert [shape(step) for step in worker.steps] == [{0: 4}, {0: 1, 1: 15}, {0: 1, 1: 5, 2: 4}]


def test_generating_requests_get_their_token_before_chunks_of_those_before_them():
    client, worker = engine(budget=10, long_prefill_token_threshold=5)
    client.add(core_request("a", [8] * 20), core_request("b", [7] * 4, **NO_STOP))
    client.step()
    client.add(core_request("c", [6] * 20))
    for _ in range(3):
        client.step()
    assert [shape(step)[1] for step in worker.steps] == [4, 1, 1, 1]
    assert all(step.total_tokens <= 10 for step in worker.steps)


def test_without_chunks_a_prompt_waits_until_it_fits_whole():
    client, worker = engine(budget=64, enable_chunked_prefill=False)
    client.add(core_request("a", [8] * 40), core_request("b", [7] * 30), core_request("c", [6] * 2))
    client.step()
    client.step()
    assert [shape(step) for step in worker.steps] == [{0: 40}, {0: 1, 1: 30, 2: 2}]


def test_no_more_requests_run_than_there_are_slots():
    client, worker = engine(max_num_seqs=2)
    client.add(*(core_request(name, [ord(name)] * 3, max_tokens=2) for name in "abc"))
    client.step()
    assert (client.stats.num_running, client.stats.num_waiting) == (2, 1)
    client.run()
    assert worker.steps[-2].released == [0, 1]
    assert {name: len(tokens) for name, tokens in client.tokens.items()} == {"a": 2, "b": 2, "c": 2}


def test_a_steady_step_carries_no_objects():
    client, worker = engine()
    client.add(*(core_request(name, [ord(name)] * 4, **NO_STOP) for name in "abc"))
    client.step()
    client.step()  # token 4 needs the second block
    for _ in range(3):
        client.step()
    assert [len(step.grown) for step in worker.steps] == [0, 3, 0, 0, 0]
    assert not any(step.new or step.released for step in worker.steps[1:])


# --- prefix cache -------------------------------------------------------------------------------------------------


def test_a_full_hit_recomputes_the_last_token():
    client, worker = engine()
    first, second = core_request("1", 8, max_tokens=1), core_request("2", 8, max_tokens=1)
    client.add(first)
    client.run()
    client.add(second)
    client.run()
    assert worker.steps[1].new[0].num_computed_tokens == 4
    assert client.cached == {"1": 0, "2": 4}
    assert client.tokens["1"] == client.tokens["2"] == expected(worker, second)
    assert (client.stats.prefix_cache_queries, client.stats.prefix_cache_hits) == (16, 4)


def test_prompts_that_arrive_together_share_their_blocks():
    client, worker = engine()
    client.add(core_request("1", 10), core_request("2", 10))
    client.step()
    assert shape(worker.steps[0]) == {0: 10, 1: 2}
    assert worker.steps[0].new[1].block_ids[0][:2] == worker.steps[0].new[0].block_ids[0][:2]


def test_blocks_of_a_chunk_are_shared_only_as_far_as_they_are_computed():
    client, worker = engine(budget=10, long_prefill_token_threshold=6)
    client.add(core_request("1", 16), core_request("2", 16))
    client.step()
    assert shape(worker.steps[0]) == {0: 6, 1: 4}
    assert worker.steps[0].new[1].num_computed_tokens == 4
    client.run()
    assert client.tokens["1"] == client.tokens["2"] == expected(worker, core_request("1", 16))


def test_generated_tokens_are_shared_with_a_running_request():
    client, _ = engine()
    client.add(core_request("1", 3, **NO_STOP))
    for _ in range(7):
        client.step()
    tokens = [1, 2, 3, *client.tokens["1"]]
    client.add(core_request("2", [*tokens, 5], max_tokens=3))
    client.step()
    assert client.cached["2"] == 8


def test_a_step_says_when_it_ended_and_what_it_computed():
    client, _ = engine(budget=6)
    seen = []
    client.add(core_request("r", 10, max_tokens=3))
    for _ in range(4):
        seen += client.core.step()
    assert [outputs.num_step_tokens for outputs in seen] == [6, 4, 1, 1]
    times = [outputs.step_at for outputs in seen]
    assert times == sorted(times)
    (first,) = seen[1].outputs
    assert 0 < first.queued_at <= first.scheduled_at <= times[0], "it ran in the first step"
    assert [output.queued_at for outputs in seen[2:] for output in outputs.outputs] == [None], "said once"


def test_preemption_does_not_move_the_time_of_the_first_scheduling():
    client, _ = tight(6, caching=False)
    client.add(core_request("old", [9] * 8, max_tokens=12), core_request("new", [8] * 7, max_tokens=6))
    client.step()
    (request,) = [item for item in client.core._scheduler._requests.values() if item.request_id == "new"]
    scheduled_at = request.scheduled_at
    client.run()
    assert client.stats.num_preemptions
    assert request.scheduled_at == scheduled_at > 0


# --- memory -------------------------------------------------------------------------------------------------------


def tight(num_blocks, **settings):
    """A pool of `num_blocks` blocks that can be allocated, of 4 tokens each."""
    return engine(num_blocks=num_blocks + 1, max_model_len=4 * num_blocks, **settings)


def test_the_latest_request_gives_way_and_resumes_with_all_its_tokens():
    client, worker = tight(6, caching=False)
    old, new = core_request("old", [9] * 8, max_tokens=12), core_request("new", [8] * 7, max_tokens=6)
    client.add(old, new)
    for _ in range(5):
        client.step()
    assert (client.stats.num_preemptions, client.stats.kv_cache_usage) == (0, 1)
    client.step()  # the 13th token of old needs a fourth block
    assert (client.stats.num_preemptions, client.stats.num_running) == (1, 1)
    client.run()
    resumed = [item for step in worker.steps for item in step.new if item.request_id == "new"][1]
    assert resumed.token_ids.tolist() == [*new.prompt_token_ids, *client.tokens["new"][: len(resumed.token_ids) - 7]]
    assert resumed.num_prompt_tokens == 7
    assert len(resumed.token_ids) > 7
    assert client.tokens == {"old": expected(worker, old, 24), "new": expected(worker, new, 24)}
    assert list(client.finish) == ["old", "new"]


def test_nobody_is_admitted_in_a_step_that_preempted():
    client, worker = tight(6, caching=False, scheduling_policy="priority")
    client.add(core_request("old", [9] * 11, max_tokens=12, priority=1), core_request("new", [8] * 11, priority=2))
    client.step()
    client.add(core_request("tiny", [7], max_tokens=2, priority=0))
    client.step()
    assert (client.stats.num_preemptions, client.stats.num_waiting) == (0, 1)
    client.step()  # new makes room for a block of old; what is left is enough for tiny
    assert (client.stats.num_preemptions, client.stats.num_waiting) == (1, 2)
    assert (worker.steps[-1].released, worker.steps[-1].new) == ([1], [])
    client.step()
    assert [item.request_id for item in worker.steps[-1].new] == ["tiny"]
    client.run()
    assert client.finish.keys() == {"old", "new", "tiny"}


def test_the_lowest_priority_gives_way_even_after_it_was_given_blocks():
    client, worker = tight(4, caching=False, scheduling_policy="priority")
    low = core_request("low", [9] * 4, priority=5, max_tokens=9)
    high = core_request("high", [8] * 8, priority=0, max_tokens=8)
    client.add(low)
    client.step()
    client.add(high)
    client.step()  # low takes its second block
    client.run()
    assert client.stats.num_preemptions >= 1
    assert list(client.finish) == ["high", "low"]
    assert client.tokens == {"low": expected(worker, low, 16), "high": expected(worker, high, 16)}
    preempting = next(step for step in worker.steps if step.released and not step.new)
    assert 0 not in shape(preempting)
    assert all(grown.slot != 0 for grown in preempting.grown)


def test_blocks_given_to_a_later_victim_are_not_in_the_step():
    """Both cross a block in the same step; the low one, first in order, gets the last block and loses it again."""
    client, worker = tight(3, caching=False, scheduling_policy="priority")
    low, high = core_request("low", [9] * 3, priority=5), core_request("high", [8] * 4, priority=0)
    client.add(low)
    client.step()
    client.add(high)
    client.step()
    client.step()
    step = worker.steps[2]
    assert (shape(step), step.released) == ({1: 1}, [0])
    assert [grown.slot for grown in step.grown] == [1]
    client.run()
    assert client.tokens == {"low": expected(worker, low, 12), "high": expected(worker, high, 12)}


def test_a_prompt_is_admitted_only_if_all_of_it_fits_beside_unfinished_prompts():
    client, worker = tight(10, budget=4)
    client.add(core_request("long", [9] * 28, max_tokens=1), core_request("other", [8] * 14, max_tokens=1))
    for _ in range(6):
        client.step()
        assert client.stats.num_running == 1
    client.run()
    assert client.stats.num_preemptions == 0
    assert worker.steps[7].new[0].request_id == "other"


def test_some_blocks_are_left_for_running_requests_to_grow():
    client, _ = engine(num_blocks=201, max_model_len=800, budget=800)
    client.add(core_request("a", [9] * 780, **NO_STOP), core_request("b", [8] * 16), core_request("c", [7] * 4))
    client.step()
    assert (client.stats.num_running, client.stats.num_waiting) == (1, 2)
    client.core.abort(["b"])
    client.step()
    assert (client.stats.num_running, client.stats.num_waiting) == (2, 0)


def test_whoever_waits_for_memory_is_looked_up_again_only_when_some_was_freed(monkeypatch):
    client, _ = tight(6)
    client.add(core_request("a", [9] * 16, max_tokens=8), core_request("b", [8] * 16, max_tokens=1))
    lookups = []
    real = KVCacheManager.cached_prefix
    monkeypatch.setattr(
        KVCacheManager, "cached_prefix", lambda kv, request: lookups.append(request.request_id) or real(kv, request)
    )
    while "b" not in client.tokens:
        client.step()
    assert lookups == ["a", "b", "b"]


def test_a_window_lets_a_request_be_longer_than_the_pool():
    client, worker = engine({"layer": sliding(6)}, num_blocks=6, max_model_len=200, budget=4)
    request = core_request("a", [3, 1, 4, 1, 5] * 8, max_tokens=60)
    client.add(request)
    client.run()
    assert client.tokens["a"] == expected(worker, request, 200)
    assert client.stats.num_preemptions == 0


# --- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "chunk", "running", "preempted", "finished"])
def test_an_abort_frees_everything_in_any_state(state):
    client, worker = tight(6, caching=False, budget=8)
    client.add(core_request("other", [9] * 8, max_tokens=12))
    length, max_tokens = (14, 6) if state == "chunk" else (7, 2 if state == "finished" else 6)
    victim = core_request("victim", [8] * length, max_tokens=max_tokens)
    client.step()
    client.add(victim)
    if state != "waiting":
        client.step()
    if state == "running":
        client.step()
    while state == "preempted" and client.stats.num_preemptions == 0:
        client.step()
    while state == "finished" and "victim" not in client.finish:
        client.step()
    before = len(client.tokens.get("victim", []))
    client.core.abort(["victim", "nobody"])
    client.core.check_integrity()
    client.step()
    assert (client.stats.num_running, client.stats.num_waiting) == (1, 0)
    assert set(worker.slots) == {0}
    client.run()
    assert len(client.tokens.get("victim", [])) == before
    assert client.core.call("reset_prefix_cache")


def test_an_aborted_id_may_be_used_again():
    client, worker = engine()
    client.add(core_request("a", 5))
    client.step()
    client.core.abort(["a"])
    client.tokens.clear()
    client.cached.clear()
    request = core_request("a", [4, 5, 6])
    client.add(request)
    client.run()
    assert client.tokens["a"] == expected(worker, request)


def test_a_request_without_room_ends_with_an_error_and_others_go_on():
    client, worker = engine()
    good = core_request("good", 5)
    client.add(core_request("long", 64), good, core_request("empty", []), core_request("wide", [2**40]))
    client.run()
    assert {name: finish.reason.value for name, finish in client.finish.items()} == {
        "long": "error",
        "empty": "error",
        "wide": "error",
        "good": "length",
    }
    assert "the prompt has 64 tokens; 1 to 63 are allowed" in client.finish["long"].message
    assert client.tokens["good"] == expected(worker, good)


def test_no_output_follows_an_abort_of_a_request_that_failed():
    client, _ = engine()
    client.add(core_request("long", 64))
    client.core.abort(["long"])
    client.run()
    assert not client.finish


def test_a_request_that_fails_on_admission_ends_alone(monkeypatch):
    client, worker = engine()
    real = KVCacheManager.cached_prefix

    def fail_one(kv, request):
        if request.request_id == "bad":
            raise LookupError("poison")
        return real(kv, request)

    monkeypatch.setattr(KVCacheManager, "cached_prefix", fail_one)
    good = core_request("good", 5)
    client.add(core_request("bad", 6), good)
    client.run()
    assert client.finish["bad"].reason.value == "error"
    assert client.finish["bad"].message == "LookupError: poison"
    assert client.tokens["good"] == expected(worker, good)


def test_a_resumed_request_that_was_complete_ends_at_once():
    client, worker = engine()
    client.add(core_request("a", 5, emitted=[1, 2], max_tokens=2))
    client.run()
    assert client.finish["a"].reason.value == "length"
    assert client.tokens["a"] == []
    assert not worker.steps


def test_an_id_in_use_is_refused():
    client, _ = engine()
    client.add(core_request("a", 5))
    with pytest.raises(ValueError, match="request_id='a' is in use"):
        client.add(core_request("a", 5))


# --- steps in flight ----------------------------------------------------------------------------------------------


def bare(depth=1, **limits):
    config = KVCacheConfig(33, (KVCacheGroup(("layer",), full()),))
    return Scheduler(SchedulerLimits(64, 4, 64, **limits), KVCacheManager(config, "sha256"), depth=depth)


def output(step, *token_ids):
    return ModelRunnerOutput(step.step_id, step.slots, np.array(token_ids, np.int32))


def test_tokens_of_another_step_or_of_other_slots_are_refused():
    scheduler = bare()
    scheduler.add(core_request("a", 3))
    step = scheduler.schedule()
    with pytest.raises(RuntimeError, match="1 steps are in flight already"):
        scheduler.schedule()
    with pytest.raises(RuntimeError, match="returned step 5"):
        scheduler.update(ModelRunnerOutput(5, step.slots, np.array([1], np.int32)))
    with pytest.raises(RuntimeError, match="no step is in flight"):
        scheduler.update(output(step, 1))
    scheduler = bare()
    scheduler.add(core_request("a", 3))
    step = scheduler.schedule()
    with pytest.raises(RuntimeError, match="samples slots"):
        scheduler.update(ModelRunnerOutput(0, np.array([2], np.int32), np.array([1], np.int32)))


def test_a_step_is_scheduled_before_the_tokens_of_the_last_are_known():
    scheduler = bare(depth=2)
    scheduler.add(core_request("a", 3, max_tokens=3))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (shape(first), shape(second)) == ({0: 3}, {0: 1})
    scheduler.update(output(first, 7))
    third = scheduler.schedule()
    assert shape(third) == {0: 1}
    scheduler.update(output(second, 8))
    assert scheduler.schedule() is None, "the last token is in flight: there is nothing to compute"
    (end,) = scheduler.update(output(third, 9)).outputs
    assert end.finish.reason.value == "length"
    assert not scheduler.has_work()
    scheduler.check_integrity()


def test_tokens_in_flight_of_a_request_that_is_gone_are_not_the_next_ones():
    scheduler = bare(depth=2, policy="fcfs")
    scheduler.add(core_request("a", 3, max_tokens=9, stop_token_ids=[7]))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(output(first, 7))
    scheduler.add(core_request("b", [9, 9]))
    third = scheduler.schedule()
    assert (third.released, third.new[0].slot, third.new[0].request_id) == ([0], 0, "b")
    late = scheduler.update(output(second, 5))
    assert (late.request_ids, late.outputs) == ([], [])
    (row,) = scheduler.update(output(third, 6)).outputs
    assert (row.request_id, row.new_token_ids) == ("b", [6])
    scheduler.check_integrity()


# --- calls with many completions ----------------------------------------------------------------------------------


def test_a_first_completion_takes_the_slot_of_a_later_one():
    client, worker = engine(max_num_seqs=2)
    client.add(*(core_request(f"hog{rank}", [7, 7], rank=rank, **NO_STOP) for rank in range(4)))
    for _ in range(3):
        client.step()
    small = core_request("small", [5, 6], max_tokens=2)
    client.add(small)
    for _ in range(3):
        client.step()
    assert client.tokens["small"] == expected(worker, small)
    assert client.stats.num_preemptions == 1
    while client.core.has_work():
        client.step()
    for rank in range(4):
        hog = core_request(f"hog{rank}", [7, 7], rank=rank, **NO_STOP)
        assert client.tokens[f"hog{rank}"] == expected(worker, hog)


def test_a_first_completion_waits_for_first_ones_and_for_nothing_that_ends_by_itself():
    client, _ = engine(max_num_seqs=2)
    client.add(core_request("a", [1], **NO_STOP), core_request("b", [2], rank=0, **NO_STOP))
    client.step()
    client.add(core_request("c", [3], max_tokens=1))
    for _ in range(5):
        client.step()
    assert client.stats.num_preemptions == 0
    assert "c" not in client.tokens or not client.tokens["c"]


def test_the_only_slot_is_given_up_too():
    client, worker = engine(max_num_seqs=1)
    client.add(core_request("hog0", [1], max_tokens=1), core_request("hog1", [1], rank=1, **NO_STOP))
    for _ in range(4):
        client.step()
    small = core_request("small", [5, 6], max_tokens=2)
    client.add(small)
    for _ in range(3):
        client.step()
    assert client.tokens["small"] == expected(worker, small)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_could_give_way_is_looked_for_once_while_the_same_requests_run(policy, monkeypatch):
    client, _ = engine(max_num_seqs=2, scheduling_policy=policy)
    # The last in order does not give way: by priority, it is a first one itself; by arrival, so are all.
    later = {"rank": 1} if policy == "priority" else {}
    client.add(core_request("later", [1], priority=0, **later, **NO_STOP), core_request("last", [2], priority=9))
    client.step()
    looked = []
    last = WaitingQueue.last
    monkeypatch.setattr(WaitingQueue, "last", lambda queue, running: looked.append(1) or last(queue, running))
    client.add(core_request("first", [3], priority=1, max_tokens=1))
    for _ in range(3):
        client.step()
    assert len(looked) == (policy == "priority")
    assert client.stats.num_preemptions == 0


def test_after_one_came_or_went_the_search_begins_anew():
    client, worker = engine(max_num_seqs=2, scheduling_policy="priority")
    later = core_request("later", [1], priority=5, rank=1, max_tokens=50)
    client.add(later, core_request("last", [2], priority=9, max_tokens=5))
    client.step()
    first, second = (core_request(name, [3], priority=1, max_tokens=30) for name in ("first", "second"))
    client.add(first)
    for _ in range(3):
        client.step()
    assert client.stats.num_preemptions == 0
    client.add(second)
    while "second" not in client.tokens:  # as soon as "last" has ended, and long before "later" does
        client.step()
    assert client.stats.num_preemptions == 1
    while client.core.has_work():
        client.step()
    for request in (later, first, second):
        assert client.tokens[request.request_id] == expected(worker, request)
