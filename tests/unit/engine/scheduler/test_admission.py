"""Who starts to run: in order, in full, and each on its own account."""

import pytest

from pagemill.engine.kv_cache.block_pool import IntegrityError
from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.errors import EngineDeadError
from pagemill.messages.engine_io import FinishReason
from tests.fakes.engine_setup import BLOCK_SIZE, Client, core_request, make_core
from tests.fakes.scripted_worker import alone


def test_nobody_overtakes_a_request_that_does_not_fit():
    core, worker = make_core(num_blocks=11, max_model_len=40, budget=64)
    client = Client(core)
    client.add(core_request("runs", 20, max_tokens=12))
    client.step()
    client.add(core_request("long", range(100, 124), max_tokens=2), core_request("short", range(200, 203)))
    client.step()
    assert [new.request_id for new in worker.steps[-1].new] == []
    client.run()
    assert [new.request_id for step in worker.steps for new in step.new] == ["runs", "long", "short"]


def test_a_prompt_in_chunks_starts_only_when_all_of_it_will_fit():
    """Two prompts of 8 blocks and a pool of 12: the second waits, although its first chunk would fit."""
    core, worker = make_core(num_blocks=13, max_model_len=40, budget=8)
    client = Client(core)
    client.add(core_request("a", 32, max_tokens=2), core_request("b", range(100, 132), max_tokens=2))
    for _ in range(4):
        client.step()
        assert worker.steps[-1].slots.size == 1
    client.run()
    assert client.stats.num_preemptions == 0


@pytest.mark.parametrize(("num_tokens", "starts"), [(93 * BLOCK_SIZE, True), (94 * BLOCK_SIZE, False)])
def test_one_block_in_a_hundred_is_left_for_those_that_run(num_tokens, starts):
    core, worker = make_core(num_blocks=101, max_model_len=400, budget=1024)
    client = Client(core)
    client.add(core_request("runs", 20, max_tokens=12))
    client.step()
    client.add(core_request("b", range(100, 100 + num_tokens), max_tokens=2))
    client.step()  # "runs" takes its sixth block: 94 are free
    assert [new.request_id for new in worker.steps[-1].new] == (["b"] if starts else [])
    client.run()
    assert client.finish["b"].reason is FinishReason.LENGTH


def test_completions_of_one_prompt_share_its_blocks():
    core, worker = make_core(num_blocks=64)
    client = Client(core)
    client.add(*(core_request(f"r.{index}", 18, seed=index, max_tokens=6) for index in range(4)))
    client.step()
    tables = [new.block_ids[0] for new in worker.steps[0].new]
    assert [table[:4] for table in tables] == [tables[0][:4]] * 4
    assert len({table[4] for table in tables}) == 4
    assert client.cached == {"r.0": 0, "r.1": 16, "r.2": 16, "r.3": 16}
    client.run()
    assert all(finish.reason is FinishReason.LENGTH for finish in client.finish.values())


def test_a_request_whose_data_fails_ends_alone(monkeypatch):
    core, _ = make_core()
    client = Client(core)
    real = core._kv.cached_prefix

    def fail_for_b(request):
        if request.request_id == "b":
            raise TypeError("b is not hashable")
        return real(request)

    monkeypatch.setattr(core._kv, "cached_prefix", fail_for_b)
    client.add(core_request("a", 5), core_request("b", 5), core_request("c", 5))
    client.run()
    assert client.finish["b"].reason is FinishReason.ERROR
    assert "b is not hashable" in client.finish["b"].message
    assert [client.finish[name].reason for name in "ac"] == [FinishReason.LENGTH] * 2
    core.check_integrity()


@pytest.mark.parametrize(
    ("owner", "method"), [(KVCacheManager, "cached_prefix"), (KVCacheManager, "begin"), (SlotStates, "_set_stops")]
)
def test_wherever_admission_fails_the_request_ends_alone_and_leaves_nothing(monkeypatch, owner, method):
    """Not even blocks that others would find by its prompt, although nobody computed them."""
    core, worker = make_core()
    real = getattr(owner, method)

    def fail_one(self, *args):
        result = real(self, *args)
        if any(getattr(arg, "request_id", None) == "bad" for arg in args):
            raise LookupError("poison")
        return result

    monkeypatch.setattr(owner, method, fail_one)
    client = Client(core)
    good = core_request("good", 9)
    client.add(core_request("bad", 9), good)
    client.run()
    assert client.finish["bad"].message == "LookupError: poison"
    assert client.cached["good"] == 0
    assert client.tokens["good"] == alone(good, worker.group_specs, worker.vocab_size, 64)
    assert client.stats.num_running == 0


def test_blocks_that_contradict_each_other_are_no_fault_of_the_request(monkeypatch):
    core, _ = make_core()

    def contradict(*args):
        raise IntegrityError("block 7 was freed twice")

    monkeypatch.setattr(KVCacheManager, "begin", contradict)
    core.add(core_request("a", 9))
    with pytest.raises(EngineDeadError, match="block 7 was freed twice"):
        core.step()
