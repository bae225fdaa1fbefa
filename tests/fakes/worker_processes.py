"""Scripted workers for processes of their own: entries that an executor names, and what each does wrong.

A `download_dir` in the configuration, which scripted workers have no use for, is where they leave notes.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pagemill.config.engine_config import EngineConfig
from pagemill.errors import ConfigError, ModelError
from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.pending import Pending, Ready
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.messages.worker_rank import WorkerRank
from tests.fakes.engine_setup import engine_config
from tests.fakes.scripted_worker import ScriptedWorker

HERE = "tests.fakes.worker_processes"
HANG_PROMPT, CRASH_PROMPT, KILL_PROMPT = 1001, 1002, 1003
"""A step with this token id in a new request's prompt hangs, raises, or kills the process."""


class ProcessWorker(ScriptedWorker):
    """A rank of a replica; every rank computes everything, the one that returns outputs tells them."""

    def __init__(self, config: EngineConfig, rank: WorkerRank) -> None:
        super().__init__()
        self.rank = rank

    def available_kv_bytes(self) -> int:
        return (1 << 30) + self.rank.rank

    def warm_up(self) -> None:
        print(f"warm\nworker {self.rank.rank}")
        print("to stderr", file=sys.stderr)

    def execute_model(self, step: SchedulerOutput) -> None:
        prompts = {token for new in step.new for token in new.token_ids}
        if HANG_PROMPT in prompts:
            time.sleep(60)
        if CRASH_PROMPT in prompts and self.rank.rank == self.rank.world_size - 1:
            raise RuntimeError("the device caught fire")
        if KILL_PROMPT in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        super().execute_model(step)


class Ahead(ProcessWorker):
    """Its tokens are there a moment after they are asked for."""

    runs_ahead = True

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        output, due = super().sample_tokens(payloads).result(), time.monotonic() + 0.002

        class Soon:
            def ready(self) -> bool:
                return time.monotonic() >= due

            def result(self) -> ModelRunnerOutput:
                time.sleep(max(0.0, due - time.monotonic()))
                return output

        return Soon()


class Counting(ProcessWorker):
    """Samples how many tokens arrived, in the request and in the batch."""

    def execute_model(self, step: SchedulerOutput) -> None:
        counts = [len(step.new[0].token_ids), len(step.slots)]
        self.results.append(ModelRunnerOutput(step.step_id, np.array([0, 1], np.int32), np.array(counts, np.int32)))


class BrokenModel(ProcessWorker):
    """Cannot load, on the last rank; the others wait for it."""

    def load_model(self) -> None:
        if self.rank.rank == self.rank.world_size - 1:
            raise ModelError("the weights are damaged")


class BrokenSettings(ProcessWorker):
    """Cannot be built."""

    def __init__(self, config: EngineConfig, rank: WorkerRank) -> None:
        raise ConfigError("these settings cannot work")


class BrokenWarmUp(ProcessWorker):
    """Raises an error that is the caller's to mend on every rank."""

    def warm_up(self) -> None:
        raise ConfigError("too much to warm up")


class DiesLoading(ProcessWorker):
    """Ends without a word."""

    def load_model(self) -> None:
        os._exit(3)


class Stubborn(ProcessWorker):
    """Ignores SIGTERM and takes long to shut down."""

    def load_model(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def shutdown(self) -> None:
        time.sleep(60)


class Tidy(ProcessWorker):
    """Leaves a note when it is shut down."""

    def __init__(self, config: EngineConfig, rank: WorkerRank) -> None:
        super().__init__(config, rank)
        self.folder = Path(str(config.model.download_dir))

    def shutdown(self) -> None:
        (self.folder / str(self.rank.rank)).write_text("done")


def config(**settings: Any) -> EngineConfig:
    return engine_config(**settings)


def solo() -> ScriptedWorker:
    """A worker for an executor that gives none of its arguments."""
    return ScriptedWorker()


class Null(ProcessWorker):
    """Does nothing, quickly."""

    def execute_model(self, step: SchedulerOutput) -> None:
        self.step = step

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        return Ready(ModelRunnerOutput(self.step.step_id, self.step.slots, self.step.num_tokens))
