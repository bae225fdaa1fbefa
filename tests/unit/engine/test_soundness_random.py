"""Thousands of random steps of scheduler and KV cache from a seed, and that defects would be noticed.

SOUNDNESS_STEPS and SOUNDNESS_SEED make the long run longer and another one (`make nightly`).
"""

import os

import pytest

from pagemill.engine.kv_cache import prefix_hash
from pagemill.engine.kv_cache.block_heads import BlockHeads
from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.events import EventRecorder
from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.kv_cache.managers.chunked_local import ChunkedLocalManager
from pagemill.engine.kv_cache.managers.interface import GroupManager
from pagemill.engine.kv_cache.managers.mamba import MambaManager
from pagemill.engine.kv_cache.managers.recent import RecentBlocksManager
from pagemill.engine.kv_cache.managers.sliding_window import SlidingWindowManager
from pagemill.engine.kv_cache.partial_reuse import PartialReuse
from pagemill.engine.scheduler import admission as admission_module
from pagemill.engine.scheduler import scheduler as scheduler_module
from pagemill.engine.scheduler.admission import Admission
from pagemill.engine.scheduler.limits import room_to_limit
from pagemill.engine.scheduler.queues import WaitingQueue
from pagemill.engine.scheduler.scheduler import Scheduler
from pagemill.engine.scheduler.slots import SlotStates
from tests.fakes.random_traffic import random_run
from tests.marks import slow

pytestmark = pytest.mark.cases(one_in=6)

NUM_STEPS = int(os.environ.get("SOUNDNESS_STEPS", "5000"))
SEED = int(os.environ.get("SOUNDNESS_SEED", "0"))

HAPPENS = (
    "evicted",
    "preempted",
    "preempted with a token in flight",
    "yielded",
    "cached",
    "copied",
    "cached after preemption",
    "pool full",
    "reset",
    "reset refused",
    "drafts accepted",
    "drafts rejected",
    "forced",
    "forced with a token in flight",
    "finished by stop",
    "finished by length",
    "abort of a request that is waiting",
    "abort of a request that is half prefilled",
    "abort of a request that is running",
    "abort of a request that is sampled in flight",
    "abort of a request that is preempted",
    "abort of a request that is finished",
)


def test_a_few_hundred_random_steps():
    seen = random_run(seed=7, num_steps=500)
    assert seen["preempted"] and seen["cached"]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_steps():
    seen = random_run(SEED, NUM_STEPS)
    print(f"\n{dict(sorted(seen.items()))}")
    missed = [event for event in HAPPENS if not seen[event]]
    assert not missed or NUM_STEPS < 5000, f"the run has not seen {missed}"


# --- what the driver is worth: each of these defects fails it -------------------------------------------------------


DEFECTS = {}


def patched(owner, name):
    """Add a defect: a method, replaced by what the decorated function makes of it."""

    def decorate(make):
        DEFECTS[make.__name__] = (owner, name, make)
        return make

    return decorate


@patched(prefix_hash, "extra_keys")
def salts_are_ignored(real):
    return lambda *args: []


@patched(KVCacheManager, "commit")
def blocks_are_shared_before_they_are_full(real):
    return lambda kv, request, num_tokens: real(
        kv, request, -(-num_tokens // 4) * 4 if num_tokens % 4 == 3 else num_tokens
    )


@patched(BlockPool, "touch")
def a_hit_does_not_hold_its_blocks(real):
    return lambda pool, blocks: None


@patched(BlockPool, "_forget")
def evicted_blocks_stay_findable(real):
    return lambda pool, block: pool._keys.__setitem__(block, None)


@patched(SlidingWindowManager, "drop_out_of_window")
def the_window_is_dropped_a_token_early(real):
    return lambda manager, request_id, num_computed: real(manager, request_id, num_computed + 1)


@patched(SlidingWindowManager, "drop_out_of_window")
def the_window_is_never_dropped(real):
    return lambda manager, request_id, num_computed: None


@patched(ChunkedLocalManager, "first_read")
def a_chunk_is_dropped_before_its_end(real):
    return lambda manager, position: real(manager, position + 1)


@patched(MambaManager, "_find")
def states_are_shared_in_the_step_that_writes_them(real):
    return RecentBlocksManager._find


@patched(MambaManager, "first_read")
def the_state_before_is_dropped_with_the_step_that_reads_it(real):
    return lambda manager, position: position // manager.block_size


@patched(BlockHeads, "add")
def parts_of_blocks_are_copied_in_the_step_that_writes_them(real):
    def add(heads, *args):
        real(heads, *args)
        heads.begin_step()

    return add


@patched(EventRecorder, "removed")
def one_removal_in_a_hundred_is_not_told(real):
    count = iter(range(1, 10**9))
    return lambda events, key: real(events, key) if next(count) % 100 else None


@patched(BlockHeads, "taken")
def parts_of_evicted_blocks_are_copied(real):
    return lambda heads, blocks: None


@patched(PartialReuse, "extend")
def parts_of_blocks_are_copied_from_another_group(real):
    def extend(partial, request, num_tokens):
        num_copied, sources = real(partial, request, num_tokens)
        return num_copied, sources[::-1]

    return extend


@patched(prefix_hash.PrefixHasher, "past")
def parts_of_blocks_are_copied_whatever_the_salt(real):
    def past(hasher, request, block_index):
        return request.block_hashes[block_index - 1] if block_index else hasher.root

    return past


@patched(PartialReuse, "commit")
def a_token_more_is_copied_than_was_computed(real):
    return lambda partial, request, num_tokens: real(partial, request, num_tokens + bool(num_tokens % 4))


@patched(GroupManager, "free")
def a_request_keeps_a_block(real):
    def free(manager, request_id):
        table = manager.table(request_id)
        table.block_ids = table.block_ids[1:]
        real(manager, request_id)

    return free


@patched(Scheduler, "_match")
def tokens_in_flight_of_a_gone_request_count(real):
    def match(scheduler, output):
        scheduler._states.epoch[:] = 0
        for flight in scheduler._in_flight:
            flight.epochs[:] = 0
        return real(scheduler, output)

    return match


@patched(Scheduler, "_continue_running")
def a_step_that_preempts_admits(real):
    return lambda scheduler, step: real(scheduler, step) and False


@patched(WaitingQueue, "victims")
def the_first_gives_way(real):
    return lambda queue, running: real(queue, running)[::-1]


@patched(WaitingQueue, "push")
def the_preempted_are_forgotten(real):
    return lambda queue, request: request.scheduled_at or real(queue, request)


@patched(WaitingQueue, "precedes")
def a_later_completion_gives_way_to_one_behind_it(real):
    return lambda queue, request, other: True


@patched(Admission, "_count_prefix")
def hits_are_counted_again_after_a_preemption(real):
    def count(admission, request, prefix):
        request.num_cached_tokens = None
        real(admission, request, prefix)

    return count


@patched(Admission, "_try_admit")
def whoever_does_not_fit_is_passed_over(real):
    def admit(admission, request, step):
        waiting = admission._waiting
        if real(admission, request, step):
            return True
        waiting.remove(request)
        admitted = bool(len(waiting)) and real(admission, waiting.peek(), step)
        waiting.push(request)
        return admitted

    return admit


@patched(admission_module, "token_limits")
def new_prompts_may_take_the_whole_budget(real):
    return lambda limits: (room_to_limit,)


@patched(scheduler_module, "token_limits")
def the_last_token_is_computed_too(real):
    return lambda limits: real(limits)[1:]


@patched(SlotStates, "settle")
def drafts_that_were_rejected_count_as_computed(real):
    return lambda states, slots, most, counts: None


@patched(SlotStates, "surely_computed")
def the_window_is_dropped_as_if_all_drafts_were_accepted(real):
    return lambda states, slots, num_computed: num_computed


@patched(SlotStates, "force")
def tokens_in_flight_count_where_others_were_forced(real):
    def force(states, slot, token_ids, num_computed):
        real(states, slot, token_ids, num_computed)
        states.epoch[slot] -= 1

    return force


@patched(scheduler_module, "follow_grammars")
def workers_do_not_hear_of_forced_tokens(real):
    return lambda *args: (real(*args)[0], [])


LONG = (
    "a_chunk_is_dropped_before_its_end",
    "states_are_shared_in_the_step_that_writes_them",
    "the_state_before_is_dropped_with_the_step_that_reads_it",
    "parts_of_evicted_blocks_are_copied",
    "the_first_gives_way",
)
"""It takes a third of a second or more until they show."""


@pytest.mark.parametrize("defect", [slow(name) if name in LONG else name for name in DEFECTS])
def test_a_defect_is_noticed(monkeypatch, defect):
    owner, name, make = DEFECTS[defect]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    with pytest.raises((AssertionError, RuntimeError, KeyError)) as caught:
        random_run(seed=0, num_steps=3000)
    assert "run_episode(0, " in caught.value.__notes__[0]
