"""Host time of a step that verifies drafts, where steps are queued on a device: engine core, worker and a tiny random
model on a CPU that behaves like a device.

    PYTHONPATH=. python benchmarks/host_drafts.py [--batches 1 32] [--methods ngram eagle3] [--steps 400] [--adaptive]
        [--profile]

`between`: from the arrival of a step's tokens to the start of the next step's graph; for so long a device would wait.
`step`: all that the host does of a step. What a device would compute (the replays) is left out of both. CPU time of the
thread, medians over steps. The texts are greedy, and soon repeat themselves. With a head, drafts are guessed behind the
step, and `between` ends with the first graph that is replayed.
"""

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from pagemill.model.kernels import native

LIBRARY = native.library()
os.environ["PAGEMILL_NATIVE_KERNELS"] = "0"  # a graph that is no device's records what torch is told
native.library.cache_clear()

from pagemill.catalog.attention import register_backend  # noqa: E402
from pagemill.config.arguments import EngineArgs  # noqa: E402
from pagemill.config.compilation import GraphLimits, complete  # noqa: E402
from pagemill.config.graph_config import CompilationSettings, GraphSettings  # noqa: E402
from pagemill.config.graph_mode import GraphMode  # noqa: E402
from pagemill.engine.core import EngineCore  # noqa: E402
from pagemill.engine.executor.uniproc import UniprocExecutor  # noqa: E402
from pagemill.launch import build_config  # noqa: E402
from pagemill.messages.engine_io import EngineCoreRequest  # noqa: E402
from pagemill.messages.sampling_params import SamplingParams  # noqa: E402
from pagemill.worker.forward.downloads import DownloadedTokens  # noqa: E402
from pagemill.worker.spec_decode import token_index  # noqa: E402
from pagemill.worker.worker import Worker  # noqa: E402
from tests.fakes.fake_graphs import FakeGraph  # noqa: E402
from tests.fakes.queued_platform import QueuedPlatform  # noqa: E402
from tests.fakes.tiny_checkpoint import make_checkpoint  # noqa: E402
from tests.fakes.tiny_heads import make_head  # noqa: E402

NUM_DRAFTS = 5
PROMPT_TOKENS = 40
WARM_UP_STEPS = 20


class Clock:
    """Adds up what is no work of the host, and times what is between tokens and the next replay."""

    def __init__(self) -> None:
        self.device_ns = 0
        self.between: list[int] = []
        self._there: int | None = None
        self.recorder: cProfile.Profile | None = None
        replay, result = FakeGraph.replay, DownloadedTokens.result

        def replayed(graph: FakeGraph) -> None:
            if self._there is not None:
                if self.recorder is not None:
                    self.recorder.disable()
                self.between.append(time.thread_time_ns() - self._there)
                self._there = None
            began = time.thread_time_ns()
            replay(graph)
            self.device_ns += time.thread_time_ns() - began

        def fetched(tokens: DownloadedTokens) -> Any:
            new = not tokens.fetched
            found = result(tokens)
            if new:
                self._there = time.thread_time_ns()
                if self.recorder is not None:
                    self.recorder.enable()
            return found

        FakeGraph.replay = replayed  # type: ignore[method-assign]
        DownloadedTokens.result = fetched  # type: ignore[method-assign]


def engine(checkpoint: Path, batch: int, drafts: dict[str, Any], length: int) -> EngineCore:
    """On such a device."""
    args: dict[str, Any] = {
        "max_model_len": length, "max_num_seqs": batch, "num_gpu_blocks_override": batch * (length // 16 + 2),
        "attention_backend": "CAPTURABLE", "dtype": "float32", "device": "cpu", "enable_prefix_caching": False,
        "max_num_batched_tokens": 512, "speculative_config": drafts,
    }  # fmt: skip
    config = build_config(EngineArgs(str(checkpoint), **args))
    asked = CompilationSettings(
        cudagraph_mode=GraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(batch, batch * (1 + NUM_DRAFTS))
    )
    limits = GraphLimits(batch, config.scheduler.max_num_batched_tokens, "cuda", True)
    compilation = complete(GraphSettings(compilation_config=asked), limits)
    graphs = config.graphs.__class__(**{**_fields(config.graphs), "compilation_config": compilation})
    config = config.__class__(**{**_fields(config), "graphs": graphs})
    return EngineCore(config, UniprocExecutor(Worker(config, platform=QueuedPlatform()), overlap=True))


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def measure(core: EngineCore, clock: Clock, batch: int, num_steps: int, profile: bool) -> dict[str, float]:
    """Milliseconds of the medium step, and tokens of a step and request."""
    while core.prepare_more():
        pass
    params = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)
    for index in range(batch):
        prompt = [(index * 31 + place * 7) % 97 + 3 for place in range(PROMPT_TOKENS)]
        named = {"request_id": f"request-{index}", "prompt_token_ids": prompt, "params": params}
        core.add(EngineCoreRequest(**named, arrival_time=time.monotonic()))
    for _ in range(WARM_UP_STEPS):
        core.step()
    gc.collect()
    gc.freeze()
    clock.between.clear()
    if profile:
        clock.recorder = cProfile.Profile(time.thread_time_ns, 1e-9)
    steps = []
    tokens = 0
    for _ in range(num_steps):
        began, device = time.thread_time_ns(), clock.device_ns
        outputs = core.step()
        steps.append(time.thread_time_ns() - began - (clock.device_ns - device))
        tokens += sum(len(one.request_ids) + sum(len(o.new_token_ids) for o in one.outputs) for one in outputs)
    gc.unfreeze()
    if clock.recorder is not None:
        clock.recorder.disable()
        pstats.Stats(clock.recorder).sort_stats("tottime").print_stats(50)
        clock.recorder = None
    found = {name: statistics.median(values) / 1e6 for name, values in (("between", clock.between), ("step", steps))}
    return found | {"tokens": tokens / num_steps / batch}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="requests that decode together")
    parser.add_argument("--methods", nargs="+", default=["ngram", "eagle3"])
    parser.add_argument("--steps", type=int, default=400, help="measured steps")
    parser.add_argument("--adaptive", action="store_true")
    parser.add_argument("--profile", action="store_true", help="what takes the time between")
    args = parser.parse_args()
    token_index.library = token_index.loaded_library = lambda: LIBRARY  # type: ignore[attr-defined,assignment]
    register_backend("CAPTURABLE", "tests.fakes.capturable_attention:CapturableBackend")
    clock = Clock()
    length = PROMPT_TOKENS + (WARM_UP_STEPS + args.steps + 10) * (1 + NUM_DRAFTS)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", "LlamaForCausalLM", max_position_embeddings=8192)
        head = make_head(Path(folder) / "head", "eagle3", max_position_embeddings=8192)
        for method in args.methods:
            for batch in args.batches:
                drafts = {"method": method, "num_speculative_tokens": NUM_DRAFTS, "adaptive": args.adaptive}
                core = engine(checkpoint, batch, drafts | ({"model": str(head)} if method == "eagle3" else {}), length)
                found = measure(core, clock, batch, args.steps, args.profile)
                core.shutdown()
                print(
                    f"{method} batch {batch:3}: between {found['between']:.3f} ms, step {found['step']:.3f} ms, "
                    f"{found['tokens']:.2f} tokens per step and request",
                    flush=True,
                )


if __name__ == "__main__":
    main()
