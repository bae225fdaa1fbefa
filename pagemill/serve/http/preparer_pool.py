"""`PreparerPool`: the helper processes of an API server, started when the first large body comes, and again when one
dies. Does not know what a body is."""

import asyncio
import contextlib
import socket
from collections import deque
from dataclasses import dataclass, field

import msgspec

from pagemill.errors import EngineOverloadedError, TransportError, UnavailableError
from pagemill.log import get_logger
from pagemill.serve.http.errors import GenerationFailedError
from pagemill.serve.http.preparer import AnswerForm, Part, PreparedPrompt, Tokens
from pagemill.serve.http.preparer_process import Answer, Done, HelperSpec, Job, Refused, Unready
from pagemill.transport.stream_frames import read_frame, write_frame
from pagemill.utils.pacer import Pacer
from pagemill.utils.processes import Child, describe_exit

logger = get_logger(__name__)

ENTRY = "pagemill.serve.http.preparer_process:run"
MAX_HELPERS = 2
MAX_JOBS = 64
MAX_JOB_BYTES = 128 << 20
"""Of all bodies that are being prepared or wait for it."""
JOB_S = 60.0
JOB_S_PER_MIB = 15.0
"""What a helper gets for one body, start-up included; then it is killed. On a quiet machine a MiB takes 0.2 s."""


@dataclass(eq=False)
class _Job:
    kind: str
    raw: bytes = field(repr=False)
    result: asyncio.Future[list[Part]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Helper:
    """One helper process and the socket to it."""

    def __init__(self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.child = child
        self._reader = reader
        self._writer = writer
        self._answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

    @classmethod
    async def start(cls, entry: str, spec: HelperSpec) -> "_Helper":
        here, there = socket.socketpair()
        with there:
            payload = msgspec.msgpack.encode(msgspec.structs.replace(spec, socket_fd=there.fileno()))
            child = Child(entry, "pagemill: preparer", payload, pass_fds=[there.fileno()])
        try:
            return cls(child, *await asyncio.open_unix_connection(sock=here))
        except BaseException:
            child.kill()
            raise

    async def prepare(self, job: _Job) -> tuple[list[Part] | Exception, bool]:
        """The parts of a body, or what is wrong with it; and whether the helper ends now. Raises EOFError, OSError,
        TransportError and msgspec.DecodeError when it died or makes no sense."""
        await write_frame(self._writer, msgspec.msgpack.encode(Job(job.kind)))
        await write_frame(self._writer, job.raw)
        pacer = Pacer()
        parts = list[Part]()
        result: list[Part] | Exception = parts
        while True:
            match self._answers.decode(await read_frame(self._reader)):
                case AnswerForm() | PreparedPrompt() | Tokens() as part:
                    parts.append(part)
                case Refused() as refused:
                    result = refused.error()
                case Unready():
                    result = UnavailableError(
                        "requests of this size cannot be prepared for now: files of the model cannot be read by the "
                        "server, whose log says which; try again later"
                    )
                case Done(ends):
                    return result, ends
                case _:
                    result = GenerationFailedError("the server failed to prepare this request")
            await pacer.pause()

    async def stop(self) -> int:
        """End it now; its exit status."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        return await asyncio.to_thread(self.child.kill)


class PreparerPool:
    """At most MAX_HELPERS processes, each with one body at a time, and a bounded queue in front of them. Used from one
    event loop."""

    def __init__(self, spec: HelperSpec, entry: str = ENTRY, *, max_helpers: int = MAX_HELPERS) -> None:
        self._spec = spec
        self._entry = entry
        self._max_helpers = max_helpers
        self._waiting: deque[_Job] = deque()
        self._num_jobs = 0
        self._num_bytes = 0
        self._workers: set[asyncio.Task[None]] = set()
        self._idle: list[_Helper] = []
        self._closed = False

    async def prepare(self, kind: str, raw: bytes) -> list[Part]:
        """The parts of a body, made in a helper process. Raises RequestError, EngineOverloadedError when too much is
        being prepared, GenerationFailedError when the helper died of it."""
        if self._closed:
            raise UnavailableError("the server is shutting down and takes no new requests")
        if self._num_jobs >= MAX_JOBS or self._num_bytes + len(raw) > MAX_JOB_BYTES:
            raise EngineOverloadedError(
                f"{self._num_jobs} large requests ({self._num_bytes >> 20} MiB) are being prepared already; "
                "try again later"
            )
        job = _Job(kind, raw)
        self._num_jobs += 1
        self._num_bytes += len(raw)
        self._waiting.append(job)
        if len(self._workers) < self._max_helpers:
            worker = asyncio.get_running_loop().create_task(self._work(), name="pagemill-preparer")
            self._workers.add(worker)
        try:
            return await job.result
        finally:
            if job in self._waiting:  # who waited for it is gone before its turn
                self._waiting.remove(job)
            del job  # what it failed of refers to this frame
            self._num_jobs -= 1
            self._num_bytes -= len(raw)

    async def close(self) -> None:
        """End the helpers; who still waits gets UnavailableError."""
        self._closed = True
        workers = list(self._workers)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for job in self._waiting:
            _settle(job, UnavailableError("the server shut down before the request was finished"))
        self._waiting.clear()
        await asyncio.gather(*(helper.stop() for helper in self._idle))
        self._idle.clear()

    async def _work(self) -> None:
        """Take jobs while there are any."""
        helper: _Helper | None = None
        try:
            while self._waiting:
                job = self._waiting.popleft()
                if job.result.cancelled():
                    continue
                if helper is None and self._idle:
                    helper = self._idle.pop()
                helper = await self._prepare(helper, job)
        finally:
            # Here, and not when the task is seen to be done: until then, another job would count on this worker.
            self._workers = {worker for worker in self._workers if worker is not asyncio.current_task()}
        if helper is not None:
            self._idle.append(helper)

    async def _prepare(self, helper: _Helper | None, job: _Job) -> _Helper | None:
        """Settle a job; the helper that may have the next one."""
        try:
            async with asyncio.timeout(_time_limit_s(job)):
                if helper is not None and helper.child.exit_status is not None:  # it died while it had nothing to do
                    await helper.stop()
                    helper = None
                helper = helper or await _Helper.start(self._entry, self._spec)
                result, ends = await helper.prepare(job)
        except asyncio.CancelledError:
            _settle(job, UnavailableError("the server shut down before the request was finished"))
            if helper is not None:
                await helper.stop()
            raise
        except (EOFError, OSError, TimeoutError, TransportError, msgspec.DecodeError) as error:
            status = "it could not be started" if helper is None else describe_exit(await helper.stop())
            logger.error("a helper failed on a body of %d bytes: %r, %s", len(job.raw), error, status)
            _settle(job, GenerationFailedError(_reason(job, error)))
            return None
        _settle(job, result)
        if ends:
            await helper.stop()
            return None
        return helper


def _time_limit_s(job: _Job) -> float:
    return JOB_S + JOB_S_PER_MIB * (len(job.raw) >> 20)


def _reason(job: _Job, error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"preparing this request took longer than {_time_limit_s(job):g} s"
    return "the process that prepares large requests died of this one; it is started again for the next"


def _settle(job: _Job, result: list[Part] | Exception) -> None:
    if job.result.done():
        return
    if isinstance(result, Exception):
        job.result.set_exception(result)
    else:
        job.result.set_result(result)
