"""A helper process of an API server: prepares one large body after another.

Gets plain data through a pipe when it is started, bodies over a socket, and answers with parts. It ends with its
parent, or when its memory has grown: what was parsed of a hostile body is not given back to the system otherwise.
"""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pagemill.config.facts import ModelFacts
from pagemill.config.model_names import ModelNames
from pagemill.config.sections import ModelConfig, SchedulerConfig
from pagemill.errors import ModelNotFoundError, PagemillError, RequestError
from pagemill.log import get_logger, name_process
from pagemill.messages.engine_io import EngineReady
from pagemill.serve.http.preparer import NO_PARSERS, AnswerForm, PreparedPrompt, Preparer, Tokens
from pagemill.serve.http.responses import ServedModel
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.serve.preparation import Preparation
from pagemill.tokenizers.load import tokenizer_of
from pagemill.transport.stream_frames import receive_frame, send_frame
from pagemill.utils.gc_pause import gc_paused
from pagemill.utils.processes import Report

logger = get_logger(__name__)

MAX_RESIDENT_BYTES = 512 << 20
"""A helper that holds more after a body ends, and is started again for the next one."""


class HelperSpec(msgspec.Struct, frozen=True):
    """What a helper is given."""

    model: ModelConfig
    facts: ModelFacts
    scheduler: SchedulerConfig
    ready: EngineReady
    num_engines: int
    model_names: ModelNames
    parsers: ParserSettings = NO_PARSERS
    socket_fd: int = -1


class Job(msgspec.Struct, frozen=True):
    """What the parent says of a body, which is the next frame."""

    kind: str
    """See preparer.py."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The body is at fault."""

    message: str
    field: str | None
    model_not_found: bool = False

    def error(self) -> RequestError:
        """To be raised where the request came in."""
        return (ModelNotFoundError if self.model_not_found else RequestError)(self.message, self.field)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The helper is at fault; it has logged why."""


class Unready(msgspec.Struct, frozen=True, tag="unready"):
    """The helper cannot prepare anything: files of the model are gone or damaged since the server was started. It has
    logged which, and ends."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All parts were sent."""

    ends: bool = False
    """Whether the helper ends now."""


Answer = AnswerForm | PreparedPrompt | Tokens | Refused | Failed | Unready | Done


def run(payload: bytes, report: Report) -> None:
    """Entry (utils/processes.py)."""
    spec = msgspec.msgpack.decode(payload, type=HelperSpec)
    name_process("preparer")
    with socket.socket(fileno=spec.socket_fd) as sock:
        try:
            preparer = _make_preparer(spec)
        except PagemillError as error:
            logger.error("large requests cannot be prepared: %s", error)
            _answer_unready(sock)
        else:
            serve(sock, preparer)


def _make_preparer(spec: HelperSpec) -> Preparer:
    spec.parsers.load_plugins()
    with gc_paused():
        pooler = spec.model.pooler_config if spec.model.pools else None
        tokenizer = tokenizer_of(spec.model, spec.facts)
        preparation = Preparation(tokenizer, spec.facts, spec.ready, spec.scheduler, pooler, spec.num_engines)
    return Preparer(preparation, ServedModel.of(spec.model_names, created=0), spec.parsers)


def _answer_unready(sock: socket.socket) -> None:
    """In answer to the first body, which is read: the other end may be writing it."""
    with contextlib.suppress(EOFError, OSError):
        receive_frame(sock)
        receive_frame(sock)
        for answer in (Unready(), Done(ends=True)):
            send_frame(sock, msgspec.msgpack.encode(answer))


def serve(sock: socket.socket, preparer: Preparer) -> None:
    """Answer until the other end is gone, or memory has grown."""
    encode = msgspec.msgpack.Encoder().encode
    jobs = msgspec.msgpack.Decoder(Job)
    ends = False
    while not ends:
        try:
            job = jobs.decode(receive_frame(sock))
            raw = receive_frame(sock)
            for answer in _answers(preparer, job, raw):
                send_frame(sock, encode(answer))
            del raw
            ends = _resident_bytes() > MAX_RESIDENT_BYTES
            send_frame(sock, encode(Done(ends)))
        except (EOFError, OSError):
            return


def _answers(preparer: Preparer, job: Job, raw: bytes) -> Iterator[Answer]:
    try:
        parts = list(preparer.parts(job.kind, raw))  # all of them first: of what is refused, the parent gets nothing
    except RequestError as error:
        yield Refused(str(error), error.field, isinstance(error, ModelNotFoundError))
    except Exception:
        logger.exception("a body of %d bytes could not be prepared", len(raw))
        yield Failed()
    else:
        yield from parts


def _resident_bytes() -> int:
    """What this process holds in memory; 0 where that cannot be read."""
    try:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), 0)
