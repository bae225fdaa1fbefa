"""What an executor and its worker processes say to each other, over the queues of shm_queue.py and a report pipe.

Knows neither of the two. Commands go to all workers in one order; every worker executes them in that order.
"""

from typing import Any

import msgspec

import pagemill.errors
from pagemill.catalog.step_extensions import STEP_EXTENSIONS
from pagemill.errors import PagemillError
from pagemill.messages.extensions import SamplingPayloads, StepAnswers, StepPayloads
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.messages.worker_api import WorkerApi
from pagemill.messages.worker_rank import WorkerRank
from pagemill.transport.call_codec import CallCodec
from pagemill.transport.codec import Codec
from pagemill.transport.shm_queue import QueueEnd


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is started with."""

    worker: str
    """"module:callable": called with the configuration and the rank, returns a WorkerApi."""
    config: bytes
    """The EngineConfig as msgpack."""
    rank: WorkerRank
    index: int
    """Number in the process's title."""
    commands: QueueEnd
    results: QueueEnd


class ExecuteModel(msgspec.Struct, frozen=True, array_like=True, tag="execute"):
    """Run the forward pass of a step. No answer."""

    step: SchedulerOutput


class SampleTokens(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """Sample from the last step. The rank that returns the engine's output answers with Sampled."""

    payloads: SamplingPayloads | None = None


class CallMethod(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Call a WorkerApi method. Every rank answers with Returned or CallFailed."""

    method: str
    args: list[Any]


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Shut the worker down and end the process. No answer."""


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag="sampled"):
    """The tokens of a step."""

    output: ModelRunnerOutput


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    """What a method returned."""

    value: Any


class CallFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A method raised an error that is the caller's to mend; the worker goes on."""

    kind: str
    """Name of an exception class of pagemill.errors."""
    message: str


class WorkerPulse(msgspec.Struct, frozen=True, tag="pulse"):
    """Over the report pipe, every second, from a thread that does nothing else: absent when the process is stopped."""


class WorkerCrashed(msgspec.Struct, frozen=True, tag="crashed"):
    """Over the report pipe: the worker cannot go on, and its process ends after this."""

    kind: str
    message: str
    traceback: str


Command = ExecuteModel | SampleTokens | CallMethod | Stop
Result = Sampled | Returned | CallFailed
WorkerReport = WorkerPulse | WorkerCrashed

CALLS = CallCodec(WorkerApi, excluded=("execute_model", "sample_tokens", "shutdown"))


def command_codec() -> Codec[Command]:
    """Both sides of the command queue."""
    return Codec(
        Command,
        named={
            StepPayloads: lambda name: STEP_EXTENSIONS.resolve(name).payload,
            SamplingPayloads: lambda name: STEP_EXTENSIONS.resolve(name).sampling_payload,
        },
    )


def result_codec() -> Codec[Result]:
    """Both sides of the result queues."""
    return Codec(Result, named={StepAnswers: lambda name: STEP_EXTENSIONS.resolve(name).answer})


def error_of(failed: CallFailed) -> PagemillError:
    """The error that a method raised, as this side raises it."""
    kind = getattr(pagemill.errors, failed.kind, PagemillError)
    known = isinstance(kind, type) and issubclass(kind, PagemillError)
    return kind(failed.message) if known else PagemillError(failed.message)
