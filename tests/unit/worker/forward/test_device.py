"""The runner of a device that works ahead, on a CPU that behaves like one: what an engine writes is what it writes
without, whatever is in flight, captured, preempted or aborted."""

import contextlib
import dataclasses
import random

import pytest
import torch

from pagemill.catalog.attention import ATTENTION, register_backend
from pagemill.config.arguments import EngineArgs
from pagemill.config.compilation import GraphLimits, complete
from pagemill.config.graph_config import CompilationSettings, GraphSettings
from pagemill.config.graph_mode import GraphMode
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.engine.scheduler.scheduler import no_grammar
from pagemill.launch import build_config
from pagemill.model.forward_context import BatchDescriptor
from pagemill.model.kernels import ops
from pagemill.model.quantization.experts import SeparateExperts
from pagemill.worker.forward.device import DeviceForward
from pagemill.worker.sampling.processors.min_tokens import MinTokensProcessor
from pagemill.worker.worker import Worker
from tests.fakes import flashinfer_module
from tests.fakes.capturable_attention import CascadingBackend
from tests.fakes.capturable_experts import EveryTokenExperts
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.queued_platform import FixedMemory, QueuedPlatform
from tests.fakes.scripted_grammar import SOME_PLACES, at_positions, grammar_of
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.marks import slow

SEQS = 6
DEFAULTS = {
    "max_model_len": 128,
    "max_num_seqs": SEQS,
    "num_gpu_blocks_override": 100,
    "attention_backend": "TORCH_PAGED",
}
WHOLE = {"attention_backend": "TEST_CAPTURABLE"}
OWN_BACKENDS = {
    "TEST_CAPTURABLE": "tests.fakes.capturable_attention:CapturableBackend",
    "TEST_CASCADING": "tests.fakes.capturable_attention:CascadingBackend",
    "TEST_FLASHINFER": "tests.fakes.flashinfer_module:CpuFlashInfer",
}


# A fake graph records what torch is told; native kernels would go unseen.
pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.cases(one_in=15)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "MistralForCausalLM")


@pytest.fixture(scope="module", autouse=True)
def own_backends():
    for name, path in OWN_BACKENDS.items():
        register_backend(name, path)
    yield
    for name in OWN_BACKENDS:
        del ATTENTION._paths[name]


def settings_of(checkpoint, mode, compilation=None, **settings):
    config = build_config(
        EngineArgs(
            str(checkpoint),
            device="cpu",
            dtype="float32",
            **(DEFAULTS | settings),
        )
    )
    if mode is None:
        return config
    sizes = tuple(size for size in (1, 2, 4, 8, 16) if size <= config.scheduler.max_num_batched_tokens)
    asked = CompilationSettings(cudagraph_mode=GraphMode[mode], cudagraph_capture_sizes=sizes, **(compilation or {}))
    limits = GraphLimits(SEQS, config.scheduler.max_num_batched_tokens, "cuda", True)
    compilation = complete(GraphSettings(compilation_config=asked), limits)
    graphs = dataclasses.replace(config.graphs, compilation_config=compilation)
    return dataclasses.replace(config, graphs=graphs)


def requests(count=9, **params):
    rng = random.Random(1)
    for index in range(count):
        prompt = [rng.randrange(3, 300) for _ in range(1 + 5 * index % 37)]
        sampling = {"temperature": 0.0} if index % 3 == 0 else {"temperature": 0.9, "top_k": 20, "top_p": 0.9}
        yield core_request(str(index), prompt, **({"max_tokens": 12 + index, "seed": index} | sampling | params))


def engine(checkpoint, platform, mode=None, ahead=True, grammar_of=no_grammar, **settings):
    config = settings_of(checkpoint, mode, **settings)
    worker = Worker(config, platform=platform)
    return Client(EngineCore(config, UniprocExecutor(worker, overlap=ahead), grammar_of=grammar_of)), worker


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Of the runner that waits for every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEMILL_NATIVE_KERNELS", "0")
        client, _ = engine(checkpoint, None, ahead=False)
        client.add(*requests())
        client.run()
    return client.tokens


@pytest.mark.parametrize("mode", ["NONE", slow("FULL_DECODE_ONLY"), slow("PIECEWISE"), "FULL_AND_PIECEWISE"])
def test_tokens_are_those_of_a_runner_that_waits(checkpoint, expected, mode):
    platform = QueuedPlatform()
    client, _ = engine(checkpoint, platform, mode)
    client.add(*requests())
    client.run()
    assert client.tokens == expected
    assert (platform.maker.num_replays > 20) == (mode != "NONE")


@pytest.mark.parametrize("mode", [slow("PIECEWISE"), "FULL_AND_PIECEWISE"])
def test_experts_between_attention_layers_are_replayed_with_the_tokens_of_the_step(tmp_path, monkeypatch, mode):
    path = make_checkpoint(tmp_path, "Qwen3MoeForCausalLM")
    with pytest.raises(RuntimeError, match="not permitted"):  # which tokens chose an expert, the host asks
        engine(path, QueuedPlatform(), mode)
    monkeypatch.setattr(SeparateExperts, "apply", EveryTokenExperts.apply)
    waits, _ = engine(path, None, ahead=False)
    client, _ = engine(path, QueuedPlatform(), mode)
    for one in (waits, client):
        one.add(*requests(5))
        one.run()
    assert client.tokens == waits.tokens


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", slow("FULL_AND_PIECEWISE")])
def test_one_request_whose_logits_are_changed_changes_no_other(checkpoint, expected, mode):
    """A row is the same whether or not a processor changes another one, and no processor sees it."""
    asking = {"min_tokens": 40, "max_tokens": 40, "stop_token_ids": tuple(range(2, 200)), "temperature": 0.7}
    client, worker = engine(checkpoint, QueuedPlatform(), mode)
    processors = [processing.processor for processing in worker.runner._forward._sampler._processings]
    processor = next(processor for processor in processors if isinstance(processor, MinTokensProcessor))
    apply, seen = processor.apply, []

    def noted(logits, rows):
        seen.append(len(rows))
        return apply(logits, rows)

    processor.apply = noted
    client.add(core_request("special", [5, 6, 7], seed=1, **asking), *requests())
    client.run()
    assert set(seen) == {1}
    assert len(seen) == 40
    assert not set(client.tokens.pop("special")) & set(asking["stop_token_ids"])
    assert client.tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", slow("PIECEWISE"), "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}], ids=str)
def test_tokens_that_the_engine_knows(checkpoint, mode, ahead, params, monkeypatch):
    rule = grammar_of(at_positions(SOME_PLACES))
    platform = QueuedPlatform()
    client, _ = engine(checkpoint, platform, mode, ahead, grammar_of=rule)
    client.add(*requests(**params))
    client.run()
    assert (platform.maker.num_replays > 20) == (mode != "NONE")
    monkeypatch.setenv("PAGEMILL_NATIVE_KERNELS", "0")
    waiting, _ = engine(checkpoint, None, ahead=False, grammar_of=rule)
    waiting.add(*requests(**params))
    waiting.run()
    assert client.tokens == waiting.tokens
    assert all(tokens[5:8] == SOME_PLACES[5] for tokens in client.tokens.values())


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "budget"), [("FULL", 8), ("FULL_AND_PIECEWISE", 16), ("FULL_DECODE_ONLY", 16)])
def test_mixed_steps_replayed_whole_write_the_same(checkpoint, expected, mode, budget):
    platform = QueuedPlatform()
    client, worker = engine(checkpoint, platform, mode, max_num_batched_tokens=budget, **WHOLE)
    ran = steps_by_shape(worker)
    client.add(*requests())
    client.run()
    assert client.tokens == expected
    whole = {key for graph_mode, key in ran if graph_mode is GraphMode.FULL and not key.uniform}
    assert bool(whole) == (mode != "FULL_DECODE_ONLY")
    assert any(key.uniform for graph_mode, key in ran if graph_mode is GraphMode.FULL)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_what_plans_on_the_host_is_planned_before_each_replay(checkpoint, expected, mode, monkeypatch):
    flashinfer_module.install(monkeypatch)
    platform = QueuedPlatform()
    client, worker = engine(checkpoint, platform, mode, attention_backend="TEST_FLASHINFER")
    ran = steps_by_shape(worker)
    client.add(*requests())
    client.run()
    assert client.tokens == expected
    assert any(key.uniform for graph_mode, key in ran if graph_mode is GraphMode.FULL) == (mode != "NONE")


@pytest.mark.parametrize("disable", [True, False])
def test_a_cascade_is_precompiled(checkpoint, disable, monkeypatch):
    monkeypatch.setattr(CascadingBackend.metadata_builder, "prefixes", [])
    monkeypatch.setattr(CascadingBackend.metadata_builder, "checks", False)  # padding shares the null block
    settings = {"attention_backend": "TEST_CASCADING", "disable_cascade_attn": disable, "kv_cache_memory_bytes": 10**6}

    @contextlib.contextmanager
    def compiling(device, precompilation, whole):
        for _ in precompilation:
            pass
        yield

    monkeypatch.setattr(ops, "compile_together", compiling)
    engine(checkpoint, QueuedPlatform(memory=Roomy()), "NONE", **settings)
    assert set(CascadingBackend.metadata_builder.prefixes) == ({0} if disable else {0, 127})


@pytest.mark.slow
def test_a_graph_without_memory_for_its_plan_is_left_out(checkpoint, expected, monkeypatch):
    flashinfer_module.install(monkeypatch)
    builder = flashinfer_module.CpuFlashInfer.metadata_builder
    make, refused = builder._wrapper_of_size, []

    def of_size(planner, size, width):
        if size > 2:
            refused.append(size)
            raise torch.OutOfMemoryError("no room")
        return make(planner, size, width)

    monkeypatch.setattr(builder, "_wrapper_of_size", of_size)
    client, _ = engine(checkpoint, QueuedPlatform(), "FULL_DECODE_ONLY", attention_backend="TEST_FLASHINFER")
    client.add(*requests())
    client.run()
    assert client.tokens == expected
    assert refused and len(set(refused)) == len(refused), "each is asked for once"


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_decode_steps_of_one_prefix_are_cascades_outside_whole_graphs(checkpoint, mode, count, monkeypatch):
    prompts = [[*range(3, 52), 60 + index] for index in range(count)]
    found = {}
    for disable in (True, False):
        monkeypatch.setattr(CascadingBackend.metadata_builder, "prefixes", [])
        platform = QueuedPlatform()
        settings = {"attention_backend": "TEST_CASCADING", "disable_cascade_attn": disable}
        client, worker = engine(checkpoint, platform, mode, **settings)
        client.add(core_request("first", prompts[0], max_tokens=2, temperature=0))
        client.run()  # the others find its blocks
        ran = steps_by_shape(worker)
        client.add(*(core_request(str(i), prompt, max_tokens=12, temperature=0) for i, prompt in enumerate(prompts)))
        client.run()
        found[disable] = client.tokens
        prefixes = CascadingBackend.metadata_builder.prefixes
        assert set(prefixes) == ({0} if disable else {0, 48})
        if not disable:
            assert not any(key.uniform for graph_mode, key in ran if graph_mode is GraphMode.FULL)
    assert found[True] == found[False]


def steps_by_shape(worker):
    """(mode, key) of every step that the graphs choose from now on."""
    graphs, ran = worker.runner._forward._graphs.graphs, []
    choose = graphs.choose

    def noted(*args, **options):
        ran.append(choose(*args, **options))
        return ran[-1]

    graphs.choose = noted
    return ran


@pytest.mark.slow
def test_a_short_prompt_is_one_replay(checkpoint):
    platform = QueuedPlatform()
    client, worker = engine(checkpoint, platform, "FULL_AND_PIECEWISE", enable_prefix_caching=False, **WHOLE)
    ran, replays = steps_by_shape(worker), []
    for turn in range(4):
        before = platform.maker.num_replays
        client.add(core_request(str(turn), list(range(3, 16)), max_tokens=1, temperature=0))
        client.run()
        replays.append(platform.maker.num_replays - before)
    assert ran == [(GraphMode.FULL, BatchDescriptor(16, 1))] * 4
    assert replays == [1, 1, 1, 1]
    assert len(set(map(tuple, client.tokens.values()))) == 1


def kernels_of(count):
    """Which kernels run changes at powers of two."""
    return 1 << (count - 1).bit_length()


class Roomy(FixedMemory):
    """Has room for graphs."""

    def total(self):
        return 10**9


@pytest.mark.parametrize("mode", ["NONE", slow("FULL_AND_PIECEWISE")])
@pytest.mark.parametrize("asked", [slow(None), 10**6])
def test_what_runs_before_the_first_request_was_precompiled(checkpoint, expected, monkeypatch, mode, asked):
    compiled, launched, here = set(), set(), []

    @contextlib.contextmanager
    def compiling(device, precompilation, whole):
        assert not whole
        here.append(compiled)
        for _ in precompilation:
            pass
        here.append(launched)
        yield
        assert bool(launched) == (asked is None)

    def noted(step, shape):
        def run(self, *args, **words):
            if here:
                here[-1].add(shape(*args, **words))
            return step(self, *args, **words)

        return run

    def rows(num_rows):
        return kernels_of(num_rows)

    def mixed(told, extent):
        return kernels_of(len(told.tokens.slots)), kernels_of(len(told.slots)), extent.min_query_len

    monkeypatch.setattr(ops, "compile_together", compiling)
    monkeypatch.setattr(DeviceForward, "_decode_step", noted(DeviceForward._decode_step, rows))
    monkeypatch.setattr(DeviceForward, "_mixed_step", noted(DeviceForward._mixed_step, mixed))
    platform = QueuedPlatform(memory=Roomy())
    client, _ = engine(checkpoint, platform, mode, kv_cache_memory_bytes=asked, **WHOLE)
    assert launched and launched <= compiled
    num_graphs = len(platform.maker.graphs)
    here.clear()
    client.add(*requests())
    client.run()
    assert client.tokens == expected
    assert (num_graphs > 0) == (mode != "NONE")


@pytest.mark.slow
def test_every_shape_is_captured_before_the_first_request(checkpoint, expected):
    platform = QueuedPlatform()
    client, worker = engine(checkpoint, platform, "FULL", **WHOLE)
    while worker.runner.capture_one():
        pass
    captured = len(platform.maker.graphs)
    graphs = worker.runner._forward._graphs.graphs
    # Of a decode step there are the network, two ends, and both as one.
    assert captured == graphs.num_keys + 3 * (graphs.num_keys - len(graphs.mixed_keys))
    client.add(*requests())
    client.run()
    assert client.tokens == expected
    assert len(platform.maker.graphs) == captured


@pytest.mark.slow
def test_one_step_at_a_time_is_the_same(checkpoint, expected):
    client, _ = engine(checkpoint, QueuedPlatform(), "FULL_DECODE_ONLY", ahead=False)
    client.add(*requests())
    client.run()
    assert client.tokens == expected


@pytest.mark.slow
def test_chunks_of_prompts_do_not_matter(checkpoint, expected):
    client, _ = engine(checkpoint, QueuedPlatform(), "FULL_AND_PIECEWISE", max_num_batched_tokens=8)
    client.add(*requests())
    client.run()
    assert client.tokens == expected


@pytest.mark.slow
def test_preemption_in_flight_does_not_matter(checkpoint, expected):
    client, _ = engine(checkpoint, QueuedPlatform(), "FULL_DECODE_ONLY", num_gpu_blocks_override=12)
    client.add(*requests())
    client.run()
    assert client.stats.num_preemptions > 0
    assert client.tokens == expected


@pytest.mark.slow
def test_an_abort_with_tokens_in_flight_leaves_the_slot_to_the_next(checkpoint, expected):
    client, _ = engine(checkpoint, QueuedPlatform(), "FULL_DECODE_ONLY")
    everyone = list(requests())
    client.add(*everyone[:SEQS])
    for _ in range(5):
        client.step()
    client.core.abort(["1", "4"])
    client.add(*everyone[SEQS:])
    client.run()
    kept = [str(index) for index in range(len(everyone)) if index not in (1, 4)]
    assert {name: client.tokens[name] for name in kept} == {name: expected[name] for name in kept}


@pytest.mark.slow
def test_a_steady_step_sends_nothing(checkpoint):
    client, worker = engine(checkpoint, QueuedPlatform(), "FULL_DECODE_ONLY")
    client.add(*requests(count=4, max_tokens=60))
    for _ in range(6):
        client.step()
    uploads = worker.runner.uploads
    counts = []
    for _ in range(32):
        before = uploads.num_uploads
        client.step()
        counts.append(uploads.num_uploads - before)
    # Each request takes a block every 16 steps, and all the others send nothing.
    assert sum(counts) <= 4 * 2
    assert counts.count(0) >= 24


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL"])
def test_requests_that_need_their_logits_changed_are_sampled_apart(checkpoint, mode):
    every = list(range(3, 320))
    tokens = {}
    for name, platform, ahead in (("waits", None, False), ("ahead", QueuedPlatform(), True)):
        client, _ = engine(checkpoint, platform, None if platform is None else mode, ahead, **WHOLE)
        client.add(*requests(count=3, stop_token_ids=every, min_tokens=4, max_tokens=20))
        client.run()
        tokens[name] = client.tokens
        assert {len(found) for found in client.tokens.values()} == {5}
    assert tokens["ahead"] == tokens["waits"]


@pytest.mark.slow
def test_a_prompt_of_one_token_decodes_from_the_start(checkpoint):
    tokens = []
    for platform in (None, QueuedPlatform()):
        client, _ = engine(checkpoint, platform, None if platform is None else "FULL_DECODE_ONLY", platform is not None)
        for name in "abc":
            client.add(core_request(name, [17], max_tokens=6, temperature=0))
            client.run()
        tokens.append(client.tokens)
    assert tokens[0] == tokens[1]
