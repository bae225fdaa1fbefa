"""The budget of a device's memory, from readings that are made up."""

import dataclasses

import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.errors import ConfigError
from pagemill.launch import build_config
from pagemill.worker import memory
from pagemill.worker.memory import GIB, MemoryBudget, MemoryWatch
from pagemill.worker.worker import Worker
from tests.fakes.queued_platform import FixedMemory, QueuedPlatform
from tests.fakes.tiny_checkpoint import make_checkpoint

BUDGET = MemoryBudget(total=100 * GIB, share=0.9, weights=16 * GIB, steps=2 * GIB, outside=GIB, graphs=GIB)


def test_the_cache_gets_what_the_others_leave():
    assert BUDGET.kv_cache == 70 * GIB
    assert BUDGET.spent + BUDGET.kv_cache == BUDGET.allowed


def test_the_table_names_every_part():
    rows = dict(line.rsplit(maxsplit=1) for line in BUDGET.table().splitlines()[1:])
    assert {name.strip(): float(size) for name, size in rows.items()} == {
        "device": 100,
        "allowed (0.9 of it)": 90,
        "weights": 16,
        "steps, at their largest": 2,
        "outside torch": 1,
        "graphs (estimate)": 1,
        "KV cache": 70,
    }


def test_no_room_for_a_cache_is_an_error_that_names_the_parts_and_the_remedy():
    with pytest.raises(ConfigError, match=r"0.15 allows 15.00 of 100.00 GiB.*weights 16.00.*--gpu-memory-utilization"):
        _ = dataclasses.replace(BUDGET, share=0.15).kv_cache


def test_parts_are_told_apart():
    watch = MemoryWatch(FixedMemory(taken=3_000_000, used_by_others=700_000))
    watch.loaded()
    budget = watch.budget(0.9, num_graphs=0, kv_cache=1000)
    assert (budget.weights, budget.steps, budget.outside) == (1_000_000, 1_999_000, 500_000)


def test_what_others_use_cannot_be_asked_for():
    watch = MemoryWatch(FixedMemory(used_by_others=4_000_000))
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization=0.9 .* other processes .*--gpu-memory-utilization 0.6"
    ):
        watch.check_room(0.9)
    watch.check_room(0.6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


def core_of(checkpoint, **settings):
    fixed = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "attention_backend": "TORCH_PAGED", "dtype": "float32"}
    config = build_config(EngineArgs(str(checkpoint), device="cpu", **(fixed | settings)))
    platform = QueuedPlatform(graphs=False, memory=FixedMemory())
    return EngineCore(config, UniprocExecutor(Worker(config, platform=platform), overlap=True))


@pytest.mark.slow
def test_a_cache_fills_the_budget(checkpoint, monkeypatch):
    monkeypatch.setattr(memory, "GRAPH_BYTES", 0)
    core = core_of(checkpoint, max_model_len=64, gpu_memory_utilization=0.9)
    page = 2 * 16 * 2 * 16 * 4
    spent = 3_000_000 - 4 * page + 500_000
    assert core.ready.num_blocks == (9_000_000 - spent) // (4 * page)


def test_a_length_that_does_not_fit_is_refused_with_one_that_does(checkpoint):
    with pytest.raises(ConfigError, match=r"max_model_len=512 .*--max-model-len (\d+) or less"):
        core_of(checkpoint, max_model_len=512, gpu_memory_utilization=0.38)
