"""`ClientLimits`: what each API key may ask for in a minute, and the places in the queue that are kept for each.
Without keys, all clients are one. Counts for one API server; does not know what requests ask for."""

import math
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final

from pagemill.errors import PagemillError
from pagemill.serve.load_gate import LoadLimits
from pagemill.transport.shm_load import Load

MINUTE_S: Final = 60.0
NOTHING: Final = Load(0, 0)


class RateLimitedError(PagemillError):
    """A client has used up what it may; `retry_after_s` says when there is more."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Allowance:
    """What may be used in a minute: it grows all the time, up to a minute's worth. May be overdrawn, by what was not
    known beforehand; nothing more is given until that has grown again."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until so much is there; 0: now. What is more than a minute's worth needs a whole one."""
        self._left = min(self._per_minute, self._left + (now - self._at) * self._per_minute / MINUTE_S)
        self._at = now
        missing = min(amount, self._per_minute) - self._left
        return max(0.0, missing * MINUTE_S / self._per_minute)

    def use(self, amount: int) -> None:
        """Take it, whether it is there or not."""
        self._left -= amount


class _Client:
    """One key."""

    def __init__(self, requests: Allowance | None, tokens: Allowance | None) -> None:
        self.requests = requests
        self.tokens = tokens
        self.load = NOTHING


class ClientLimits:
    """Of all keys, which are few: as many as the server was started with."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        num_keys: int = 0,
        shared: LoadLimits | None = None,
        total: Callable[[], Load] = lambda: NOTHING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_keys`: that the server has; with several, each has an equal part of the queue to itself. `shared`: what
        may run and wait in all; `total`: what does."""
        self._requests_per_minute = requests_per_minute
        self._tokens_per_minute = tokens_per_minute
        self._num_keys = num_keys
        self._shared = shared or LoadLimits()
        self._total = total
        self._clock = clock
        self._clients: dict[Hashable, _Client] = {}

    def check(self, key: Hashable) -> None:
        """A request came. Raises RateLimitedError where its client has sent too many, or used too many tokens."""
        client = self._client(key)
        now = self._clock()
        if client.tokens is not None and (wait_s := client.tokens.wait_s(1, now)):
            raise _limited("tokens", self._tokens_per_minute, "--rate-limit-tokens", wait_s)
        if client.requests is not None:
            if wait_s := client.requests.wait_s(1, now):
                raise _limited("requests", self._requests_per_minute, "--rate-limit-requests", wait_s)
            client.requests.use(1)

    def use_tokens(self, key: Hashable, num_tokens: int) -> None:
        """Count tokens of a prompt that is about to run. Raises RateLimitedError where there are too few left."""
        allowance = self._client(key).tokens
        if allowance is None:
            return
        if wait_s := allowance.wait_s(num_tokens, self._clock()):
            raise _limited("tokens", self._tokens_per_minute, "--rate-limit-tokens", wait_s)
        allowance.use(num_tokens)

    @contextmanager
    def running(self, key: Hashable, load: Load) -> Iterator["Running"]:
        """In the body, a request of the client runs or waits. Raises RateLimitedError where it would take places that
        are kept for other keys."""
        client = self._client(key)
        self._check_share(key, client, load)
        running = Running(client, load)
        try:
            yield running
        finally:
            running.end()

    def _client(self, key: Hashable) -> _Client:
        client = self._clients.get(key)
        if client is None:
            now = self._clock()
            client = self._clients[key] = _Client(
                *(None if limit is None else Allowance(limit, now)
                  for limit in (self._requests_per_minute, self._tokens_per_minute))
            )  # fmt: skip
        return client

    def _check_share(self, key: Hashable, client: _Client, more: Load) -> None:
        """A key may use all that is free, but for what the others have not used of their parts."""
        if self._num_keys < 2:
            return
        total = self._total()
        limits = (self._shared.num_requests, self._shared.num_queued_tokens)
        for what, limit, used, own, asked, place in zip(
            ("requests", "prompt tokens"), limits, total, client.load, more, range(2), strict=True
        ):
            if limit is None:
                continue
            part = limit // self._num_keys
            others = [other.load[place] for name, other in self._clients.items() if name != key]
            others += [0] * (self._num_keys - 1 - len(others))
            kept = sum(max(0, part - load) for load in others)
            if own and own + asked > part and used + asked > limit - kept:
                raise RateLimitedError(
                    f"{own} {what} of this key run or wait already, and it asks for {asked} more: what is left is kept "
                    "for other keys; try again later"
                )


class Running:
    """A request of a client, on its way."""

    def __init__(self, client: _Client, load: Load) -> None:
        self._client = client
        self._load = NOTHING
        self._set(load)

    def begun(self, num_tokens: int) -> None:
        """So many tokens of its prompts wait no longer."""
        self._set(Load(self._load.num_requests, self._load.num_queued_tokens - num_tokens))

    def generated(self, num_tokens: int) -> None:
        """Count tokens of its answer."""
        if self._client.tokens is not None:
            self._client.tokens.use(num_tokens)

    def end(self) -> None:
        """It is over."""
        self._set(NOTHING)

    def _set(self, load: Load) -> None:
        of_client = self._client.load
        self._client.load = Load(
            of_client.num_requests + load.num_requests - self._load.num_requests,
            of_client.num_queued_tokens + load.num_queued_tokens - self._load.num_queued_tokens,
        )
        self._load = load


def _limited(what: str, limit: int | None, flag: str, wait_s: float) -> RateLimitedError:
    return RateLimitedError(
        f"this key has used its {what} of a minute: at most {limit} ({flag}); try again later", math.ceil(wait_s)
    )
