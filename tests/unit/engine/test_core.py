"""Starting, stepping, dying."""

import json

import msgspec
import pytest

from pagemill.engine.core import limits_of_cache
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.errors import ConfigError, EngineDeadError
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from pagemill.messages.structured_outputs import GrammarSpec
from tests.fakes.engine_setup import Client, core_request, full, make_core, mamba, sliding
from tests.fakes.scripted_worker import ScriptedWorker, alone

GRAMMAR = GrammarSpec("anything")


def test_the_engine_starts_in_order_and_says_what_it_learnt():
    core, worker = make_core(num_blocks=None, worker=ScriptedWorker(kv_bytes=32 * 50))
    assert worker.calls == ["load_model", "kv_cache_specs", "available_kv_bytes", "initialize_kv_cache", "warm_up"]
    assert (core.ready.max_model_len, core.ready.vocab_size) == (64, 13)
    assert (core.ready.num_blocks, core.ready.block_size) == (50, 4)
    assert worker.config.num_blocks == 50
    core.shutdown()
    assert worker.calls[-1] == "shutdown"


def test_too_little_memory_is_said_before_any_is_allocated():
    worker = ScriptedWorker(kv_bytes=32 * 5)
    with pytest.raises(ConfigError, match="--max-model-len 16 or less"):
        make_core(num_blocks=None, worker=worker)
    assert "initialize_kv_cache" not in worker.calls


def test_an_idle_engine_has_no_work_and_a_step_does_nothing():
    core, worker = make_core()
    assert not core.has_work()
    assert core.step() == []
    assert not worker.steps


def test_new_requests_are_held_while_others_end():
    core, _ = make_core()
    core.add(core_request("a", 5, max_tokens=2))
    assert core.call("is_done") is False
    core.call("hold")
    core.add(core_request("b", 5, max_tokens=2))
    core.add(core_request("c", 5, max_tokens=2))
    assert core.stats().num_waiting == 3
    ended = set()
    while core.has_work():
        ended |= {output.request_id for outputs in core.step() for output in outputs.outputs if output.finish}
    assert (ended, core.call("is_done")) == ({"a"}, True)
    core.abort(["b"])
    with pytest.raises(ValueError, match="'c' is in use"):
        core.add(core_request("c", 5))
    core.call("resume")
    while core.has_work():
        ended |= {output.request_id for outputs in core.step() for output in outputs.outputs if output.finish}
    assert ended == {"a", "c"}


@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_a_failing_worker_is_the_end_of_the_engine(monkeypatch, method):
    core, worker = make_core()
    core.add(core_request("a", 5))

    def fail(*args):
        raise MemoryError("no memory left")

    monkeypatch.setattr(worker, method, fail)
    with pytest.raises(EngineDeadError, match="the engine stopped: MemoryError: no memory left") as caught:
        core.step()
    assert isinstance(caught.value.__cause__, MemoryError)
    for call in (core.step, lambda: core.add(core_request("b", 5))):
        with pytest.raises(EngineDeadError, match="no memory left"):
            call()
    core.abort(["a"])
    core.shutdown()


@pytest.mark.parametrize("first", [None, GRAMMAR])
@pytest.mark.parametrize("second", [None, GRAMMAR])
def test_an_id_that_is_in_use_is_refused_and_hurts_nobody(first, second):
    """Also while the grammar of its request is being made, which here fails: the model has no tokenizer."""
    core, _ = make_core()
    client = Client(core)
    client.add(msgspec.structs.replace(core_request("a", 5, max_tokens=3), grammar=first))
    with pytest.raises(ValueError, match="request_id='a' is in use"):
        core.add(msgspec.structs.replace(core_request("a", 5), grammar=second))
    client.run()
    assert len(client.tokens["a"]) == (0 if first else 3)
    again = Client(core)
    again.add(core_request("a", 5, max_tokens=2))
    again.run()
    assert len(again.tokens["a"]) == 2
    core.shutdown()


def test_calls_by_name():
    core, _ = make_core()
    client = Client(core)
    client.add(core_request("a", 9))
    client.step()
    assert core.call("reset_prefix_cache") is False
    client.run()
    assert core.call("reset_prefix_cache") is True
    client.add(core_request("b", 9))
    client.run()
    assert client.cached == {"a": 0, "b": 0}
    with pytest.raises(ValueError, match="unknown call 'explode'; known: reset_prefix_cache"):
        core.call("explode")


def test_workers_are_called_by_name():
    core, worker = make_core()
    assert json.loads(core.call("collective_rpc", "describe")) == [worker.describe()]
    core.call("collective_rpc", "start_profile", "x")
    assert worker.calls[-1] == "start_profile x"
    for name in ("shutdown", "execute_model", "__class__"):
        with pytest.raises(ValueError, match=f"method='{name}' is not one of describe, save_sharded_state"):
            core.call("collective_rpc", name)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_the_hash_algorithm_is_the_configured_one(algorithm):
    core, _ = make_core(algorithm=algorithm)
    client = Client(core)
    client.add(core_request("a", 9))
    client.run()
    client.add(core_request("b", 9))
    client.run()
    assert client.cached == {"a": 0, "b": 8}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_any_pipeline_depth_gives_the_same_tokens(depth):
    core, worker = make_core({"full": full(), "sliding": sliding(6)}, depth=depth, num_blocks=40)
    client = Client(core)
    requests = [core_request(str(seed), 5 + seed, max_tokens=20, seed=seed, stop_token_ids=[3]) for seed in range(5)]
    client.add(*requests)
    client.run()
    for request in requests:
        assert client.tokens[request.request_id] == alone(request, worker.group_specs, worker.vocab_size, 64)


def test_steps_overlap_up_to_the_depth():
    core, worker = make_core(depth=2)
    core.add(core_request("a", 5))
    assert core.step() == []
    assert len(worker.steps) == 1
    (outputs,) = core.step()
    assert len(worker.steps) == 2
    assert len(outputs.outputs) == 1


def test_pythonhashseed_pins_the_hashes_of_prefixes(monkeypatch):
    def first_hash():
        core, _ = make_core()
        client = Client(core)
        client.add(core_request("a", 9))
        client.run()
        return next(iter(core._kv.pool.cached_blocks().values()))

    monkeypatch.setenv("PYTHONHASHSEED", "random")
    assert first_hash() != first_hash()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert first_hash() == first_hash()


def test_a_pause_keeps_requests_as_they_are():
    core, worker = make_core()
    client = Client(core)
    client.add(core_request("a", 9))
    client.step()
    assert core.call("pause") is True and core.call("is_paused") is True
    while core.has_work():
        core.step()
    num_steps = len(worker.steps)
    client.add(core_request("b", 5))
    assert not core.has_work()
    assert core.step() == [] and len(worker.steps) == num_steps
    core.check_integrity()
    assert core.call("resume") is True and core.call("is_paused") is False
    client.run()
    assert len(worker.steps) > num_steps


@pytest.mark.parametrize(("spec", "depth", "scored"), [(full(), 2, True), (mamba(), 1, True), (mamba(), 2, False)])
def test_no_forced_token_is_scored_where_a_state_would_be_computed_twice(spec, depth, scored):
    plan = KVCacheConfig(8, (KVCacheGroup(("layer",), full()), KVCacheGroup(("other",), spec)))
    assert limits_of_cache(SchedulerLimits(64, 4, 64), plan, depth).scores_forced is scored
