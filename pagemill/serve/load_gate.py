"""`LoadGate`: whether a new request may come in now. Does not know what requests ask for."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pagemill.config.sections import SchedulerConfig
from pagemill.errors import EngineOverloadedError, RequestError, UnavailableError
from pagemill.observability.serving_metrics import QUEUE_FULL, QUEUED_TOKENS, ServingMetrics
from pagemill.serve.processing.output_processor import OutputProcessor
from pagemill.transport.shm_load import Load, SharedLoad

ANY_REQUEST = Load(1, 0)
"""As little as a request may be."""


class LoadTable(Protocol):
    """Where front ends write down what they have in flight."""

    def set(self, load: Load) -> None:
        """What this one has."""

    def total(self) -> Load:
        """What all of them have."""

    def lock(self) -> contextlib.AbstractContextManager[object]:
        """The others wait with looking and writing."""


class OwnLoad:
    """Of the only front end of its engines."""

    def __init__(self) -> None:
        self._load = Load(0, 0)

    def set(self, load: Load) -> None:
        self._load = load

    def total(self) -> Load:
        return self._load

    def lock(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


class LoadRow:
    """Of one front end among several on this machine."""

    def __init__(self, shared: SharedLoad, row: int) -> None:
        self._shared = shared
        self._row = row
        self.total = shared.total
        self.lock = shared.lock

    def set(self, load: Load) -> None:
        self._shared.set(self._row, load)


@dataclass(frozen=True)
class LoadLimits:
    """How much may be in flight in a whole deployment. None: any number."""

    num_requests: int | None = None
    """Completions that run or wait."""
    num_queued_tokens: int | None = None
    """Prompt tokens of those that wait."""

    @classmethod
    def of(cls, scheduler: SchedulerConfig, num_engines: int) -> "LoadLimits":
        """As the settings say: every engine runs so many, and as many wait altogether."""
        slots = scheduler.max_num_seqs * num_engines
        queued = scheduler.max_num_queued_reqs
        return cls(slots + queued if queued else None, scheduler.max_num_queued_tokens or None)


class Reservation:
    """Room for the completions of a request, until they are known as in flight."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def use(self, num_requests: int, num_tokens: int) -> None:
        """Some of them are in flight now."""
        self.load = Load(self.load.num_requests - num_requests, self.load.num_queued_tokens - num_tokens)


class LoadGate:
    """Compares what runs and waits in the whole deployment with the limits, and closes when the server drains. Tells
    the other front ends what is in flight here."""

    def __init__(self, limits: LoadLimits, outputs: OutputProcessor, metrics: ServingMetrics) -> None:
        self.draining = False
        """Whether no new request is taken any more."""
        self.holds_off = False
        """Whether none is taken until an operator says so. Set from any thread."""
        self._limits = limits
        self._outputs = outputs
        self._metrics = metrics
        self._table: LoadTable = OwnLoad()
        self._reserved: set[Reservation] = set()
        outputs.on_change = self._publish

    def share(self, table: LoadTable) -> None:
        """Count together with other front ends, from now on."""
        self._table = table
        self._publish()

    def total(self) -> Load:
        """What is in flight in all front ends."""
        return self._table.total()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    def check(self, more: Load = ANY_REQUEST) -> None:
        """Raises EngineOverloadedError when `more` is more than the limits allow now, RequestError when they never
        will, UnavailableError after `drain`."""
        self._check(more, self._table.total())

    def _check(self, more: Load, total: Load) -> None:
        """The same, with so much in flight."""
        if self.draining:
            raise UnavailableError("the server is shutting down and takes no new requests")
        if self.holds_off:
            raise UnavailableError("an operator has this server take no new requests now (/drain)")
        limits = self._limits
        most = limits.num_requests
        if most is not None and more.num_requests > most:
            raise RequestError(
                f"{more.num_requests} completions (prompts x n) are more than this server takes at once: at most "
                f"{most} (--max-num-seqs of each engine plus --max-num-queued-reqs)",
                "n",
            )
        if most is not None and total.num_requests + more.num_requests > most:
            self._refuse(
                QUEUE_FULL,
                f"{total.num_requests} requests run and wait already, and this one asks for {more.num_requests} more "
                f"completions; the limit is {most} (--max-num-seqs of each engine plus --max-num-queued-reqs)",
            )
        most, queued = limits.num_queued_tokens, total.num_queued_tokens
        if most is not None and queued and queued + max(more.num_queued_tokens, 1) > most:
            self._refuse(
                QUEUED_TOKENS,
                f"{queued} prompt tokens wait already, and this request has {more.num_queued_tokens} more; the limit "
                f"is {most} (--max-num-queued-tokens)",
            )

    @contextlib.contextmanager
    def reserve(self, load: Load, limited: bool) -> Iterator[Reservation]:
        """Room for a request in the body; what is in flight at its end counts by itself. `limited`: only if there is
        room, otherwise raises as `check`."""
        reservation = Reservation(load)
        with self._table.lock() if limited else contextlib.nullcontext():
            # First it is written down, then the others are counted: of two front ends, one of which could not have the
            # lock in time, at least one sees the other, and there is never more in flight than the limits allow.
            self._reserved.add(reservation)
            self._publish()
            if limited:
                try:
                    total = self._table.total()
                    others = Load(
                        total.num_requests - load.num_requests, total.num_queued_tokens - load.num_queued_tokens
                    )
                    self._check(load, others)
                except BaseException:
                    self._reserved.discard(reservation)
                    self._publish()
                    raise
        try:
            yield reservation
        finally:
            self._reserved.discard(reservation)
            self._publish()

    def _publish(self) -> None:
        outputs = self._outputs
        num_requests = outputs.num_in_flight
        num_queued_tokens = outputs.num_queued_tokens
        for reservation in self._reserved:
            num_requests += reservation.load.num_requests
            num_queued_tokens += reservation.load.num_queued_tokens
        self._table.set(Load(num_requests, num_queued_tokens))

    def _refuse(self, reason: str, message: str) -> None:
        self._metrics.rejected(reason)
        raise EngineOverloadedError(f"{message}; try again later")
