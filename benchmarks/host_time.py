"""Host time of a steady decode step, and of a short prompt: the real engine core and worker runner around a model that
does nothing.

    PYTHONPATH=. python benchmarks/host_time.py [--batches 1 1024] [--steps 300] [--json]

Everything of a step runs but the network: scheduling, the batch, plans of attention for a model of 30 layers, greedy
choice from logits, and the update. The logits are of a vocabulary of 256 tokens: reading many is the device's work. The
garbage collector is on; what was there before the measured steps is frozen, as a server does.
"""

import argparse
import gc
import json
import statistics
import time

import torch
from torch import Tensor, nn

from pagemill.config.arguments import EngineArgs
from pagemill.config.engine_config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.sampling_params import SamplingParams
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import CacheLayer
from pagemill.model.attention.layer import Attention
from pagemill.model.attention.selector import choose
from pagemill.platforms.cpu import CpuPlatform
from pagemill.worker.worker import Worker

NUM_LAYERS = 30
VOCAB_SIZE = 256
HIDDEN_SIZE = 64
PROMPT_TOKENS = 32
SHORT_PROMPT = 128
KV_BYTES_PER_TOKEN = NUM_LAYERS * 2 * 64 * 2
WARM_UP_STEPS = 20
MOST_OTHER_STEPS = 120
"""Until the last request decodes, and the warm-up."""


class NullModel(nn.Module):
    """Layers that keep keys and values and are never run; every token is as likely as any other but one."""

    is_first = is_last = True
    hidden_size = HIDDEN_SIZE
    vocab_size = VOCAB_SIZE

    def __init__(self, dtype: str, max_num_seqs: int) -> None:
        super().__init__()
        self.dtype = getattr(torch, dtype)
        spec = AttentionLayerSpec(4, 1, 64, 0.125)
        platform = CpuPlatform()
        backend = choose(
            spec, device=platform.torch_device(), dtype=dtype, requested=None, order=platform.attention_order()
        )
        self._layers = {
            f"layer {index}": Attention(spec, name=f"layer {index}", backend=backend) for index in range(NUM_LAYERS)
        }
        self._hidden = torch.zeros(1, HIDDEN_SIZE, dtype=self.dtype)
        self._logits = torch.zeros(max_num_seqs, VOCAB_SIZE)
        self._logits[:, 7] = 1

    def cache_layers(self) -> dict[str, CacheLayer]:
        """As those of a model."""
        return dict(self._layers)

    def forward(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """[T] -> [T, E], nothing computed."""
        return self._hidden.expand(len(inputs), -1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, E] -> [L, V]."""
        return self._logits[: len(hidden)]


class NullWorker(Worker):
    """A worker whose model is a null model."""

    def load_model(self) -> None:
        """Make it."""
        self._loaded = NullModel(self._config.model.dtype, self._config.scheduler.max_num_seqs)


def step_ms(config: EngineConfig, batch: int, num_steps: int) -> list[float]:
    """Milliseconds of each of `num_steps` steps that decode `batch` requests."""
    core = EngineCore(config, UniprocExecutor(NullWorker(config)))
    params = SamplingParams(temperature=0, seed=0, max_tokens=num_steps + MOST_OTHER_STEPS, ignore_eos=True)
    for index in range(batch):
        prompt = [(index * 31 + place * 7) % VOCAB_SIZE for place in range(PROMPT_TOKENS)]
        core.add(
            EngineCoreRequest(
                request_id=f"request-{index}", prompt_token_ids=prompt, params=params, arrival_time=time.monotonic()
            )
        )
    while _num_sampled(core) < batch:
        if core.num_executed > MOST_OTHER_STEPS - WARM_UP_STEPS:
            raise RuntimeError(f"{batch} requests do not decode together after {core.num_executed} steps")
    for _ in range(WARM_UP_STEPS):
        core.step()
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        core.step()
        times.append((time.perf_counter() - start) * 1e3)
    gc.unfreeze()
    core.shutdown()
    return times


def first_token_ms(config: EngineConfig, num_requests: int) -> list[float]:
    """Milliseconds from a request's arrival at the core to its one token, one request of `SHORT_PROMPT` after the
    other."""
    core = EngineCore(config, UniprocExecutor(NullWorker(config)))
    params = SamplingParams(temperature=0, seed=0, max_tokens=1, ignore_eos=True)
    times = []
    for index in range(WARM_UP_STEPS + num_requests):
        prompt = [(index + place * 7) % VOCAB_SIZE for place in range(SHORT_PROMPT)]
        start = time.perf_counter()
        core.add(
            EngineCoreRequest(
                request_id=f"request-{index}", prompt_token_ids=prompt, params=params, arrival_time=time.monotonic()
            )
        )
        while core.has_work():
            core.step()
        times.append((time.perf_counter() - start) * 1e3)
    core.shutdown()
    return times[WARM_UP_STEPS:]


def _num_sampled(core: EngineCore) -> int:
    """Requests that got a token in one more step."""
    return sum(len(outputs.request_ids) + len(outputs.outputs) for outputs in core.step())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 1024], help="requests that decode together")
    parser.add_argument("--steps", type=int, default=300, help="measured steps")
    parser.add_argument("--json", action="store_true", help="medians only, as one JSON object")
    args = parser.parse_args()
    most = max(args.batches)
    settings = {
        "max_model_len": 2048,
        "max_num_seqs": most,
        "kv_cache_memory_bytes": most * (PROMPT_TOKENS + args.steps + MOST_OTHER_STEPS + 16) * KV_BYTES_PER_TOKEN,
    }
    config = build_config(EngineArgs("smollm2", dtype="bfloat16", **settings))
    medians = {}
    for batch in args.batches:
        times = step_ms(config, batch, args.steps)
        medians[f"batch_{batch}_ms"] = statistics.median(times)
        if not args.json:
            p99 = sorted(times)[int(len(times) * 0.99)]
            print(
                f"batch {batch:5}: {statistics.median(times):.3f} ms (mean {statistics.mean(times):.3f}, p99 {p99:.3f})"
            )
    medians["first_token_ms"] = statistics.median(first_token_ms(config, args.steps))
    if args.json:
        print(json.dumps(medians))
    else:
        print(f"first token after {SHORT_PROMPT}: {medians['first_token_ms']:.3f} ms")


if __name__ == "__main__":
    main()
