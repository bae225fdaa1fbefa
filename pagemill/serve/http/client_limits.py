"""`ClientLimits`: what each API key may ask for in a minute, and the places in the queue that are kept for each.
Without keys, all clients are one. Counts for all API servers of a machine; does not know what requests ask for."""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol

from pagemill.errors import PagemillError
from pagemill.serve.load_gate import LoadLimits
from pagemill.transport.shm_load import Load, Remainder, SharedLoad

MINUTE_S: Final = 60.0
NOTHING: Final = Load(0, 0)


class RateLimitedError(PagemillError):
    """A client has used up what it may; `retry_after_s` says when there is more."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientTable(Protocol):
    """Where API servers write down what their clients have in flight, and have left of what they may use."""

    def lock(self) -> AbstractContextManager[object]:
        """The others wait with looking and writing."""

    def set(self, client: int, load: Load) -> None:
        """What a client has in flight here."""

    def total(self, client: int) -> Load:
        """What it has in flight in all API servers."""

    def remainder(self, client: int, which: int) -> Remainder:
        """What is left of one of its allowances."""

    def set_remainder(self, client: int, which: int, remainder: Remainder) -> None:
        """What is left now."""


class OwnClients:
    """Of the only API server."""

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}
        self._remainders: dict[tuple[int, int], Remainder] = {}

    def lock(self) -> AbstractContextManager[object]:
        return nullcontext()

    def set(self, client: int, load: Load) -> None:
        self._loads[client] = load

    def total(self, client: int) -> Load:
        return self._loads.get(client, NOTHING)

    def remainder(self, client: int, which: int) -> Remainder:
        return self._remainders.get((client, which), Remainder(0.0, 0.0))

    def set_remainder(self, client: int, which: int, remainder: Remainder) -> None:
        self._remainders[client, which] = remainder


class ClientRows:
    """Of one API server among several on this machine."""

    def __init__(self, shared: SharedLoad, row: int) -> None:
        self._shared = shared
        self._row = row
        self.lock = shared.lock
        self.total = shared.client
        self.remainder = shared.remainder
        self.set_remainder = shared.set_remainder

    def set(self, client: int, load: Load) -> None:
        self._shared.set_client(self._row, client, load)


class Allowance:
    """What each client may use in a minute: it grows all the time, up to a minute's worth. May be overdrawn, by what
    was not known beforehand; nothing more is given until that has grown again."""

    def __init__(self, table: ClientTable, which: int, per_minute: int | None, clock: Callable[[], float]) -> None:
        """`which`: its place in the table. `per_minute`: None: as much as they like."""
        self.per_minute = per_minute
        self._table = table
        self._which = which
        self._clock = clock

    def wait_s(self, client: int, amount: int) -> float:
        """Seconds until so much is there; 0: now. What is more than a minute's worth needs a whole one."""
        if self.per_minute is None:
            return 0.0
        missing = min(amount, self.per_minute) - self._left(client, self.per_minute, self._clock())
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def use(self, client: int, amount: int) -> None:
        """Take it, whether it is there or not. Called with the table's lock."""
        if self.per_minute is not None:
            now = self._clock()
            left = self._left(client, self.per_minute, now) - amount
            self._table.set_remainder(client, self._which, Remainder(left, now))

    def _left(self, client: int, per_minute: int, now: float) -> float:
        left, at = self._table.remainder(client, self._which)
        return float(per_minute) if at == 0 else min(per_minute, left + (now - at) * per_minute / MINUTE_S)


class ClientLimits:
    """Of all keys, which are few: as many as the server was started with. They hold for all API servers together."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        keys: Sequence[Hashable] = (),
        shared: LoadLimits | None = None,
        total: Callable[[], Load] = lambda: NOTHING,
        clock: Callable[[], float] = time.monotonic,
        table: ClientTable | None = None,
    ) -> None:
        """`keys`: that the server has; with several, each has an equal part of the queue to itself. `shared`: what
        may run and wait in all; `total`: what does. `table`: of all API servers; None: there are no others."""
        self._numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        self._shared = shared or LoadLimits()
        self._total = total
        self._table = table or OwnClients()
        self._requests = Allowance(self._table, 0, requests_per_minute, clock)
        self._tokens = Allowance(self._table, 1, tokens_per_minute, clock)
        self._own: dict[int, Load] = {}

    def check(self, key: Hashable) -> None:
        """A request came. Raises RateLimitedError where its client has sent too many, or used too many tokens."""
        if self._tokens.per_minute is None and self._requests.per_minute is None:
            return
        client = self._number(key)
        with self._table.lock():
            if wait_s := self._tokens.wait_s(client, 1):
                raise _limited("tokens", self._tokens.per_minute, "--rate-limit-tokens", wait_s)
            if wait_s := self._requests.wait_s(client, 1):
                raise _limited("requests", self._requests.per_minute, "--rate-limit-requests", wait_s)
            self._requests.use(client, 1)

    def use_tokens(self, key: Hashable, num_tokens: int) -> None:
        """Count tokens of a prompt that is about to run. Raises RateLimitedError where there are too few left."""
        if self._tokens.per_minute is None:
            return
        client = self._number(key)
        with self._table.lock():
            if wait_s := self._tokens.wait_s(client, num_tokens):
                raise _limited("tokens", self._tokens.per_minute, "--rate-limit-tokens", wait_s)
            self._tokens.use(client, num_tokens)

    @contextmanager
    def running(self, key: Hashable, load: Load) -> Iterator["Running"]:
        """In the body, a request of the client runs or waits. Raises RateLimitedError where it would take places that
        are kept for other keys."""
        running = Running(self, self._number(key))
        try:
            self._admit(running, load)
            yield running
        finally:
            running.end()

    def move(self, client: int, before: Load, after: Load) -> None:
        """What a request of a client has in flight has changed. Not counted where there is nobody to share with."""
        if len(self._numbers) > 1:
            own = self._own.get(client, NOTHING)
            self._own[client] = own = Load(*(a + b - c for a, b, c in zip(own, after, before, strict=True)))
            self._table.set(client, own)

    def use_generated(self, client: int, num_tokens: int) -> None:
        """Count tokens of an answer."""
        if self._tokens.per_minute is not None:
            with self._table.lock():
                self._tokens.use(client, num_tokens)

    def _number(self, key: Hashable) -> int:
        """Without keys, all clients are the first."""
        return self._numbers.get(key, 0)

    def _admit(self, running: "Running", load: Load) -> None:
        """First it is written down, then the others are counted, as in the load gate: so the limits hold also where the
        lock could not be had in time."""
        if len(self._numbers) < 2:
            return
        with self._table.lock():
            running.set(load)
            self._check_share(running.client, load)

    def _check_share(self, client: int, more: Load) -> None:
        """A key may use all that is free, but for what the others have not used of their parts. `more` is written down
        already; what the engines' front ends have written down may lag behind."""
        loads = [self._table.total(number) for number in range(len(self._numbers))]
        total = self._total()
        limits = (self._shared.num_requests, self._shared.num_queued_tokens)
        for place, (what, limit) in enumerate(zip(("requests", "prompt tokens"), limits, strict=True)):
            if limit is None:
                continue
            asked = more[place]
            own = loads[client][place] - asked
            used = max(total[place], sum(load[place] for load in loads) - asked)
            part = limit // len(loads)
            kept = sum(max(0, part - load[place]) for number, load in enumerate(loads) if number != client)
            if own and own + asked > part and used + asked > limit - kept:
                raise RateLimitedError(
                    f"{own} {what} of this key run or wait already, and it asks for {asked} more: what is left is kept "
                    "for other keys; try again later"
                )


class Running:
    """A request of a client, on its way."""

    def __init__(self, limits: ClientLimits, client: int) -> None:
        self.client = client
        self._limits = limits
        self._load = NOTHING

    def set(self, load: Load) -> None:
        """So much of it runs or waits."""
        self._limits.move(self.client, self._load, load)
        self._load = load

    def begun(self, num_tokens: int) -> None:
        """So many tokens of its prompts wait no longer."""
        if self._load is not NOTHING:
            self.set(Load(self._load.num_requests, self._load.num_queued_tokens - num_tokens))

    def generated(self, num_tokens: int) -> None:
        """Count tokens of its answer."""
        self._limits.use_generated(self.client, num_tokens)

    def end(self) -> None:
        """It is over."""
        self.set(NOTHING)


def _limited(what: str, limit: int | None, flag: str, wait_s: float) -> RateLimitedError:
    return RateLimitedError(
        f"this key has used its {what} of a minute: at most {limit} ({flag}); try again later", math.ceil(wait_s)
    )
