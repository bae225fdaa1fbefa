"""The runner on a real GPU: what is queued, what is sent, what is taken of its memory."""

import numpy as np
import pytest
import torch

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.platforms.choose import choose_platform
from pagemill.platforms.cuda_queue import CudaTransfers
from pagemill.worker.batch.buffers import UploadRing
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request

LLAMA = "LlamaForCausalLM"
KV_BYTES = 64 << 20
BUSY = 20_000_000
"""Cycles of the device: about 10 ms."""


def start(checkpoints, **settings):
    """A core on the GPU, and its worker."""
    defaults = {"dtype": "bfloat16", "max_num_seqs": 16, "kv_cache_memory_bytes": KV_BYTES, "max_model_len": 512}
    config = build_config(EngineArgs(checkpoints.path(LLAMA), device="cuda", **(defaults | settings)))
    worker = Worker(config)
    return EngineCore(config, UniprocExecutor(worker, overlap=bool(config.scheduler.async_scheduling))), worker


@pytest.fixture
def engine(checkpoints):
    core, worker = start(checkpoints)
    yield Client(core), worker
    core.shutdown()


def test_facts_are_those_of_torch(gpu):
    facts, properties = choose_platform("cuda").facts(), torch.cuda.get_device_properties(0)
    assert facts.title == properties.name
    assert facts.capability == (properties.major, properties.minor)
    assert 0 < facts.free_bytes <= properties.total_memory


def test_uploads_do_not_wait_and_arrive_before_what_reads_them(gpu):
    ring = UploadRing(CudaTransfers(), gpu, 1024)
    totals = []
    for step in range(20):
        torch.cuda._sleep(BUSY // 20)
        (sent,) = ring.send([np.full(1000, step, np.int32)])
        totals.append(sent.sum())
        ring.sent_is_used()
    assert [int(total) for total in totals] == [1000 * step for step in range(20)]


def test_downloads_come_while_later_work_runs(gpu):
    transfers = CudaTransfers()
    target, source = transfers.host_buffer((4,), "int32"), torch.zeros(4, dtype=torch.int32, device=gpu)
    torch.cuda.synchronize()
    source.fill_(7)
    mark = transfers.download(target, source)
    torch.cuda._sleep(BUSY)
    behind = transfers.mark()
    mark.wait()
    assert target.tolist() == [7] * 4
    assert not behind.reached()
    behind.wait()


def test_a_steady_step_sends_nothing_and_replays(engine):
    client, worker = engine
    client.add(*(core_request(str(index), 20 + index, max_tokens=100, ignore_eos=True) for index in range(4)))
    for _ in range(12):
        client.step()
    before = worker.runner.uploads.num_uploads
    for _ in range(64):
        client.step()
    # A request takes a block every 16 steps.
    assert worker.runner.uploads.num_uploads - before <= 4 * (64 // 16 + 1)


def test_the_next_step_is_queued_before_the_tokens_are_there(engine):
    client, _ = engine
    client.add(core_request("a", 20, max_tokens=64, temperature=0, ignore_eos=True))
    for _ in range(8):
        client.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    client.core.step()
    assert len(client.core._in_flight) == 1
    client.run()
    assert len(client.tokens["a"]) >= 60


@pytest.mark.parametrize("ahead", [True, False])
def test_depth_does_not_change_tokens(checkpoints, ahead):
    tokens = []
    for settings in ({"async_scheduling": ahead}, {"async_scheduling": False, "enforce_eager": True}):
        core, _ = start(checkpoints, dtype="float32", **settings)
        client = Client(core)
        client.add(*(core_request(str(index), 3 + 9 * index, max_tokens=24, temperature=0) for index in range(10)))
        client.run()
        tokens.append(client.tokens)
        core.shutdown()
    assert tokens[0] == tokens[1]


def test_preemption_and_aborts_in_flight(checkpoints):
    core, _ = start(checkpoints, dtype="float32", num_gpu_blocks_override=40, max_model_len=256)
    client = Client(core)
    everyone = [core_request(str(i), 20 + 3 * i, max_tokens=60, temperature=0, ignore_eos=True) for i in range(12)]
    client.add(*everyone)
    for _ in range(20):
        client.step()
    core.abort(["3", "5"])
    client.run()
    assert client.stats.num_preemptions > 0
    for request in everyone:
        if request.request_id not in ("3", "5"):
            name = f"again {request.request_id}"
            client.add(core_request(name, request.prompt_token_ids, max_tokens=60, temperature=0, ignore_eos=True))
            client.run()
            assert client.tokens[name] == client.tokens[request.request_id]
    core.shutdown()


def test_memory_is_what_the_table_says(checkpoints):
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.2
    core, _ = start(checkpoints, kv_cache_memory_bytes=None, gpu_memory_utilization=share, max_num_seqs=64)
    client = Client(core)
    client.add(*(core_request(str(index), 300, max_tokens=40, ignore_eos=True, top_k=50) for index in range(80)))
    client.run()
    used = total - torch.cuda.mem_get_info()[0]
    assert 0.95 <= used / (share * total) <= 1.0
    core.shutdown()
