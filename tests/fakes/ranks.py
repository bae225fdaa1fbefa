"""Runs a function in several processes, one per rank, and a recorded engine run on the workers of each."""

import dataclasses
import faulthandler
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.engine.scheduler.scheduler import GrammarOf, no_grammar
from pagemill.launch import build_config
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.kv_spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    SlidingWindowSpec,
)
from pagemill.messages.pending import Pending
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.messages.worker_rank import WorkerRank
from pagemill.model.attention.layer import Attention
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.quantization.experts import SeparateExperts
from pagemill.model.quantization.panels import PanelWeight
from pagemill.worker.worker import Worker
from tests.fakes.configs import parallel_config
from tests.fakes.engine_setup import Client

TIMEOUT_S = 300
"""After which ranks that wait for each other are ended: all cases of a file take a minute on a slow machine."""


def run_ranks(world_size: int, folder: Path, function: Callable[..., object], *args: Any) -> list[Any]:
    """`function(rank, save, *args)` in `world_size` fresh processes; what each handed to `save`, in order of rank.

    They are forked from a server that has imported torch and computed nothing: a start costs little.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    files = [folder / f"rank{rank}.pkl" for rank in range(world_size)]
    # As bytes: multiprocessing would share every tensor by a file descriptor, of which it has only 256.
    arguments = pickle.dumps(args)
    processes = [
        context.Process(target=_run, args=(rank, files[rank], function, arguments), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
    results = [pickle.loads(file.read_bytes()) if file.exists() else "no result" for file in files]
    failed = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, str)]
    assert not failed, "\n".join(failed)
    return results


def _run(rank: int, file: Path, function: Callable[..., object], arguments: bytes) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT_S / 2)
    try:
        function(rank, lambda result: file.write_bytes(pickle.dumps(result)), *pickle.loads(arguments))
    except BaseException:
        file.write_bytes(pickle.dumps(traceback.format_exc()))


@dataclasses.dataclass
class Recording:
    """An engine's run on one worker."""

    path: str
    settings: dict[str, Any]
    plan: KVCacheConfig | None = None
    steps: list[SchedulerOutput] = dataclasses.field(default_factory=list)
    payloads: list[SamplingPayloads | None] = dataclasses.field(default_factory=list)
    outputs: list[ModelRunnerOutput] = dataclasses.field(default_factory=list)
    logits: list[Tensor] = dataclasses.field(default_factory=list)
    tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """By request."""
    weight_bytes: int = 0


class RecordingExecutor(UniprocExecutor):
    """One worker, whose every step is kept."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.worker = Worker(build_config(EngineArgs(recording.path, **recording.settings)))
        super().__init__(self.worker)
        recording.logits = logits_of(self.worker.model)
        recording.weight_bytes = weight_bytes(self.worker.model)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self.recording.plan = config
        super().initialize_kv_cache(config)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        done = super().call_all(method, *args)
        self.recording.logits.clear()
        return done

    def execute_model(self, step: SchedulerOutput) -> None:
        self.recording.steps.append(step)
        super().execute_model(step)

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        self.recording.payloads.append(payloads)
        pending = super().sample_tokens(payloads)
        self.recording.outputs.append(pending.result())
        return pending


def record(
    path: Path,
    requests: Iterable[EngineCoreRequest],
    *,
    depth: int = 1,
    grammar_of: GrammarOf = no_grammar,
    **settings: Any,
) -> Recording:
    """Run requests through an engine; what its worker was told, and what it answered."""
    settings = {"dtype": "float32", "max_model_len": 96, "num_gpu_blocks_override": 32, "cpu_threads": 1} | settings
    executor = RecordingExecutor(Recording(str(path), settings))
    client = Client(EngineCore(executor.worker._config, executor, depth=depth, grammar_of=grammar_of))
    client.add(*requests)
    client.run()
    executor.recording.tokens = client.tokens
    return executor.recording


@dataclasses.dataclass
class Replay:
    """What one rank made of a recording."""

    stage: int
    outputs: list[ModelRunnerOutput]
    logits: list[Tensor]
    weight_bytes: int
    num_kv_heads: int
    layers: list[str]
    kv_bytes: int


def replay(
    recording: Recording, rank: WorkerRank, *, expert_parallel: bool = False, num_dummy_steps: int = 0
) -> Replay:
    """The recorded steps on one rank's worker, then others of no request; all ranks must replay at the same time."""
    config = build_config(EngineArgs(recording.path, **recording.settings))
    sizes = parallel_config(
        tensor_parallel_size=rank.tensor_parallel_size,
        pipeline_parallel_size=rank.pipeline_parallel_size,
        enable_expert_parallel=expert_parallel,
    )
    worker = Worker(dataclasses.replace(config, parallel=sizes), rank)
    worker.load_model()
    layers = worker.model.cache_layers()
    specs, num_bytes = worker.kv_cache_specs(), weight_bytes(worker.model)
    assert recording.plan is not None
    split = rank.tensor_parallel_size > 1
    kept = {name: layer.spec.num_kv_heads for name, layer in layers.items() if isinstance(layer, Attention)}
    num_kv_heads = max(kept.values(), default=0)
    worker.initialize_kv_cache(split_plan(recording.plan, kept) if split else recording.plan)
    logits = logits_of(worker.model)
    worker.warm_up()
    logits.clear()
    outputs = []
    for step, payloads in zip(recording.steps, recording.payloads, strict=True):
        worker.execute_model(step)
        outputs.append(worker.sample_tokens(payloads).result())
    num_logits = len(logits)
    for _ in range(num_dummy_steps):
        worker.execute_dummy_step()
    del logits[num_logits:]
    kv_bytes = sum(spec.page_bytes() for spec in specs.values())
    result = Replay(rank.stage, outputs, logits, num_bytes, num_kv_heads, list(layers), kv_bytes)
    worker.shutdown()
    return result


def split_plan(plan: KVCacheConfig, num_kv_heads: dict[str, int]) -> KVCacheConfig:
    """The plan of a rank that keeps so many of the heads of each of its layers; other stages have the others."""

    def split(group: KVCacheGroup) -> KVCacheSpec:
        spec = group.spec
        assert isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalSpec)
        held = [num_kv_heads[name] for name in group.layers if name in num_kv_heads]
        return dataclasses.replace(spec, num_kv_heads=held[0] if held else max(num_kv_heads.values()))

    groups = tuple(dataclasses.replace(group, spec=split(group)) for group in plan.groups)
    return dataclasses.replace(plan, groups=groups)


def logits_of(model: CausalLM) -> list[Tensor]:
    """Collects copies of all logits from now on."""
    collected: list[Tensor] = []
    compute = model.compute_logits

    def kept(hidden: Tensor) -> Tensor:
        logits = compute(hidden)
        collected.append(logits.clone())
        return logits

    model.compute_logits = kept  # type: ignore[method-assign]
    return collected


def weight_bytes(model: CausalLM) -> int:
    """Bytes of all weights that a model without a KV cache holds; shared ones count once."""
    found = {}
    for module in model.modules():
        held = getattr(module, "weights", None)
        experts = [*held.gate_up.values(), *held.down.values()] if isinstance(held, SeparateExperts) else []
        for value in (*vars(module).values(), *experts):
            panels = isinstance(value, PanelWeight)
            tensors = value.native(None).tensors if panels else (getattr(value, "weight", value),)
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.dim():
                    found[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(found.values())
