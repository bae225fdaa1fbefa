"""A worker that computes nothing: every slot that a step completes gets the next token of a fixed text. With it, the
server is all that costs time. BENCH_STEP_S: seconds that each step lasts."""

import os
import time

import numpy as np

from pagemill.config.engine_config import EngineConfig
from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from pagemill.messages.pending import Pending, Ready
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput

FIRST_TOKEN, NUM_TOKENS = 1000, 4096
"""Ordinary words of any vocabulary of some ten thousand tokens."""
KV_BYTES = 1 << 30


class IdleWorker:
    """Implements `WorkerApi`. Knows of a slot how many of its tokens are computed, and nothing else."""

    runs_ahead = False

    def __init__(self, config: EngineConfig, *_: object) -> None:
        size = config.scheduler.max_num_seqs
        self._known = np.zeros(size, np.int64)
        self._computed = np.zeros(size, np.int64)
        self._block_size = config.cache.block_size
        self._step_s = float(os.environ.get("BENCH_STEP_S", "0"))
        self._output: ModelRunnerOutput | None = None

    def load_model(self) -> None:
        """There is none."""

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {"layer.0": FullAttentionSpec(self._block_size, 1, 16, "float32")}

    def available_kv_bytes(self) -> int:
        return KV_BYTES

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Nothing is kept."""

    def warm_up(self) -> None:
        """Nothing is slow at first."""

    def prepare_more(self) -> bool:
        return False

    def execute_dummy_step(self) -> None:
        """No other replica waits."""

    def execute_model(self, step: SchedulerOutput) -> None:
        for new in step.new:
            self._known[new.slot] = len(new.token_ids)
            self._computed[new.slot] = new.num_computed_tokens
        self._computed[step.slots] += step.num_tokens
        done = step.slots[self._computed[step.slots] >= self._known[step.slots]]
        self._known[done] += 1
        tokens = FIRST_TOKEN + self._known[done] % NUM_TOKENS
        self._output = ModelRunnerOutput(step.step_id, done, tokens.astype(np.int32))
        time.sleep(self._step_s)

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        if self._output is None:
            raise RuntimeError("no step was executed")
        return Ready(self._output)

    def describe(self) -> dict[str, str | int]:
        return {"rank": 0, "device": "none", "free_bytes": 0}

    def start_profile(self, prefix: str) -> None:
        """There is nothing to record."""

    def stop_profile(self) -> str:
        return ""

    def shutdown(self) -> None:
        """Nothing is held."""
