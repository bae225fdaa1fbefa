"""Prompts that become vectors: they end when they are computed, whatever the steps, blocks and interruptions."""

import numpy as np
import pytest

from pagemill.messages.core_calls import AddRequests, EngineCall, EngineReport, StepOutputs
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, FinishReason
from pagemill.messages.step import ModelRunnerOutput
from pagemill.transport.codec import Codec, Limits
from tests.fakes.engine_setup import Client, make_core, pooling_request
from tests.fakes.scripted_pooling import PoolingWorker, vector_alone
from tests.fakes.step_payloads import copies_of

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def make_client(depth=1, **settings):
    core, worker = make_core(worker=PoolingWorker(), depth=depth, **settings)
    return Client(core), worker


def prompt_of(size, first=1):
    return [first, *(index % 11 for index in range(size - 1))]


@DEPTHS
@pytest.mark.parametrize("budget", [64, 8, 3])
def test_vectors_do_not_depend_on_the_steps(depth, budget):
    client, _ = make_client(depth, budget=budget, max_num_seqs=3)
    prompts = {str(size): prompt_of(size, size % 13) for size in (1, 4, 5, 17, 30, 64)}
    client.add(*(pooling_request(name, prompt) for name, prompt in prompts.items()))
    client.run()
    assert client.vectors == {name: vector_alone(prompt) for name, prompt in prompts.items()}
    assert {finish.reason for finish in client.finish.values()} == {FinishReason.STOP}
    assert not any(client.tokens.values()), "nothing is sampled"
    assert client.stats.num_running == client.stats.kv_cache_usage == 0


def test_a_prompt_may_fill_the_context_and_no_more():
    client, _ = make_client()
    client.add(pooling_request("full", 64), pooling_request("over", 65), pooling_request("empty", []))
    client.run()
    assert client.vectors.keys() == {"full"}
    assert client.finish["over"].reason is client.finish["empty"].reason is FinishReason.ERROR
    assert "1 to 64 are allowed" in client.finish["over"].message


@DEPTHS
def test_a_prefix_is_reused_unless_all_tokens_are_read(depth):
    client, worker = make_client(depth)
    prompt = prompt_of(17)
    client.add(pooling_request("mean", prompt, pooling_type="MEAN"))
    client.run()
    client.add(pooling_request("last", prompt), pooling_request("first", prompt, pooling_type="CLS"))
    client.add(pooling_request("again", prompt, pooling_type="MEAN"))
    client.run()
    assert client.cached == {"mean": 0, "last": 16, "first": 0, "again": 0}
    assert set(map(tuple, client.vectors.values())) == {tuple(vector_alone(prompt))}
    assert client.stats.prefix_cache_queries == 17, "those that were not looked up do not count"
    assert sum(int(step.num_tokens.sum()) for step in worker.steps) == 3 * 17 + 1


@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN"])
def test_no_partial_block_is_copied_for_who_reads_all(pooling_type):
    client, worker = make_client(partial=True)
    for name in ("one", "two"):
        client.add(pooling_request(name, prompt_of(7), pooling_type=pooling_type))
        client.run()
    assert client.cached["two"] == (6 if pooling_type == "LAST" else 0)
    assert any(copies_of(step) for step in worker.steps) == (pooling_type == "LAST")


def test_dimensions_are_the_first_ones():
    client, _ = make_client()
    client.add(pooling_request("short", 5, dimensions=2), pooling_request("long", 5))
    client.run()
    assert client.vectors == {"short": vector_alone([1, 2, 3, 4, 5], 2), "long": vector_alone([1, 2, 3, 4, 5])}


@DEPTHS
def test_an_abort_in_the_middle_of_a_prompt_frees_everything(depth):
    client, _ = make_client(depth, budget=8)
    client.add(pooling_request("gone", prompt_of(50)), pooling_request("stays", prompt_of(9, 3)))
    client.step()
    client.core.abort(["gone"])
    client.run()
    assert client.vectors == {"stays": vector_alone(prompt_of(9, 3))}
    assert client.core.stats().kv_cache_usage == 0


@DEPTHS
def test_an_abort_while_the_last_step_is_in_flight_leaves_the_others_their_vectors(depth):
    client, _ = make_client(depth)
    client.add(*(pooling_request(str(n), prompt_of(9, n)) for n in range(3)))
    if depth == 2:
        client.core.step()  # in flight
    client.core.abort(["1"])
    client.run()
    assert client.vectors == {str(n): vector_alone(prompt_of(9, n)) for n in (0, 2)}


@DEPTHS
@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN"])
def test_more_than_the_cache_holds(depth, pooling_type):
    client, _ = make_client(depth, budget=16, num_blocks=18, max_num_seqs=8)
    prompts = {str(n): prompt_of(20 + n, n) for n in range(10)}
    client.add(*(pooling_request(name, prompt, pooling_type=pooling_type) for name, prompt in prompts.items()))
    client.run()
    assert client.vectors == {name: vector_alone(prompt) for name, prompt in prompts.items()}


def test_what_travels():
    vector = np.arange(2000, dtype=np.float32)
    report = StepOutputs(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="r", pooled=vector)]))
    codec = Codec(EngineReport)
    frames = codec.encode(report)
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.float32), vector), "not copied"
    (output,) = codec.decode(frames).outputs.outputs
    assert output.pooled.dtype == np.float32
    assert np.array_equal(output.pooled, vector)
    answer = Codec(ModelRunnerOutput).decode(
        Codec(ModelRunnerOutput).encode(ModelRunnerOutput(1, *np.zeros((2, 1), np.int32), vector[None]))
    )
    assert answer.vectors.shape == (1, 2000)
    request = pooling_request("r", 5, pooling_type="MEAN", dimensions=3)
    calls = Codec(EngineCall)
    assert calls.decode(calls.encode(AddRequests([request]))).requests == [request]


def test_a_step_may_end_more_requests_than_a_message_has_frames():
    vectors = [np.full(1500, number, np.float32) for number in range(20)]
    report = StepOutputs(
        EngineCoreOutputs(outputs=[EngineCoreOutput(request_id=str(n), pooled=v) for n, v in enumerate(vectors)])
    )
    codec = Codec(EngineReport, Limits(max_frames=8))
    frames = codec.encode(report)
    assert len(frames) == 8
    outputs = codec.decode(frames).outputs.outputs
    assert all(np.array_equal(output.pooled, vector) for output, vector in zip(outputs, vectors, strict=True))


@DEPTHS
def test_a_vector_that_is_not_finite_fails_its_request_alone(depth):
    client, worker = make_client(depth)
    prompts = {name: prompt_of(17, first) for name, first in (("a", 1), ("b", 2), ("c", 3))}
    sample = worker.sample_tokens

    def with_nan(payloads):
        pending = sample()
        pending.result().vectors[1, 2] = np.nan
        return pending

    worker.sample_tokens = with_nan
    client.add(*(pooling_request(name, prompt) for name, prompt in prompts.items()))
    client.run()
    assert client.vectors == {name: vector_alone(prompts[name]) for name in "ac"}
    assert client.finish["b"].reason is FinishReason.ERROR
    assert "NaN" in client.finish["b"].message
    worker.sample_tokens = sample
    client.add(pooling_request("again", prompts["b"]))
    client.run()
    assert (client.cached["again"], client.vectors["again"]) == (0, vector_alone(prompts["b"]))
