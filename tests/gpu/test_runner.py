"""The runner on a real GPU: what is queued, what is sent, what is taken of its memory."""

import numpy as np
import pytest
import torch

from pagemill.config.arguments import EngineArgs
from pagemill.config.graph_mode import GraphMode
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.messages.engine_io import FinishReason
from pagemill.platforms.choose import choose_platform
from pagemill.platforms.cuda_queue import CudaTransfers
from pagemill.worker.batch.buffers import UploadRing
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request

LLAMA = "LlamaForCausalLM"
KV_BYTES = 64 << 20
BUSY = 20_000_000
"""Cycles of the device: about 10 ms."""


def start(checkpoints, architecture=LLAMA, **settings):
    """A core on the GPU, and its worker."""
    defaults = {"dtype": "bfloat16", "max_num_seqs": 16, "kv_cache_memory_bytes": KV_BYTES, "max_model_len": 512}
    config = build_config(EngineArgs(checkpoints.path(architecture), device="cuda", **(defaults | settings)))
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
        ring.uploads_consumed()
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


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_mixed_steps_replayed_whole_equal_eager(checkpoints, mode, temperature):
    """The same requests three times: what was captured at the start is replayed in all of them."""
    prompts = [[3 + (7 * index + place) % 250 for place in range(1 + 13 * index)] for index in range(10)]
    sampling = {"temperature": temperature, "top_k": 20, "max_tokens": 16, "ignore_eos": True}
    tokens, shares = [], []
    for settings in ({"compilation_config": {"cudagraph_mode": mode}}, {"enforce_eager": True}):
        settings |= {"attention_backend": "TRITON_ATTN", "enable_prefix_caching": False}
        core, worker = start(checkpoints, dtype="float32", **settings)
        client = Client(core)
        for turn in range(3):
            for index, prompt in enumerate(prompts):
                client.add(core_request(f"{turn} {index}", prompt, **sampling, **{"seed": index}))
                client.step()
            client.run()
        tokens.append([[client.tokens[f"{turn} {index}"] for index in range(len(prompts))] for turn in range(3)])
        stats = getattr(worker.runner._forward._graphs.graphs, "stats", None)
        shares.append(0 if stats is None else stats.steps[GraphMode.FULL] / stats.steps.total())
        core.shutdown()
    captured, eager = tokens
    assert captured[0] == captured[1] == captured[2], "graphs, and the same steps without"
    equal = sum(mine == other for mine, other in zip(captured[2], eager[2], strict=True))
    assert equal >= 9, "other shapes may be multiplied by other kernels"
    assert shares[0] > 0.5


def test_a_short_prompt_is_one_replay(checkpoints):
    core, worker = start(checkpoints, max_num_seqs=64, attention_backend="TRITON_ATTN", enable_prefix_caching=False)
    client, stats = Client(core), worker.runner._forward._graphs.graphs.stats
    for turn in range(4):
        client.add(core_request(str(turn), 120, max_tokens=1, temperature=0, ignore_eos=True))
        client.run()
    assert stats.steps[GraphMode.FULL] == 4 and stats.steps[GraphMode.PIECEWISE] == 0
    assert len({tuple(found) for found in client.tokens.values()}) == 1
    core.shutdown()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_nan_end_their_request_alone(checkpoints, eager, temperature):
    """A token's embedding becomes NaN between two turns of the same requests; some have it in their prompts."""
    settings = {"dtype": "float32", "enforce_eager": eager, "enable_prefix_caching": False}
    core, worker = start(checkpoints, "Qwen3ForCausalLM", **settings)
    client, sampling = Client(core), {"temperature": temperature, "top_p": 0.9, "ignore_eos": True}
    for turn in range(3):
        if turn == 2:
            worker.model.embed_tokens.weight[251] = torch.nan
        for index in range(8):
            prompt = [3 + (7 * index + place) % 240 for place in range(20 + 13 * index)]
            client.add(core_request(f"{turn} {index}", prompt, max_tokens=16, **sampling, seed=index))
            client.add(core_request(f"{turn} bad {index}", [*prompt, 251, 5 + turn], max_tokens=1, **sampling))
        client.run()
    for index in range(8):
        assert client.tokens[f"2 {index}"] == client.tokens[f"1 {index}"]
        assert client.finish[f"2 {index}"].reason is FinishReason.LENGTH
        assert client.finish[f"1 bad {index}"].reason is FinishReason.LENGTH
        assert client.finish[f"2 bad {index}"].reason is FinishReason.ERROR
        assert client.tokens[f"2 bad {index}"] == []
    core.shutdown()


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
