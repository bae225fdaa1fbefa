"""`SharedMetrics`: the metrics of one of several front ends, which answers for all of them.

Does not know how counts travel to where they are added up, nor how totals come back.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable

from pagemill.errors import UnavailableError
from pagemill.messages.metrics import FrontEndCounts, MetricsTotals
from pagemill.observability.serving_metrics import ServingMetrics

REPORT_S = 0.5
"""At most so much of what was counted, and never shown, is lost when a front end is killed."""
ANSWER_S = 2.0


class SharedMetrics:
    """Sends what was counted from time to time, and for every scrape; `text` waits for totals that include it.

    Used on one event loop, except for `take`, which is for any thread. `send` may block: it is called on a thread of
    its own.
    """

    def __init__(self, metrics: ServingMetrics, index: int, send: Callable[[FrontEndCounts], None]) -> None:
        self._metrics = metrics
        self._index = index
        self._send = send
        self._unsent: queue.Queue[FrontEndCounts | None] = queue.Queue(1)
        self._latest: FrontEndCounts | None = None
        self._totals: MetricsTotals | None = None
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sends while the body runs."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._send_all, name="pagemill-metrics", daemon=True).start()
        task = self._loop.create_task(self._report(), name="pagemill-metrics")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._replace_unsent(None)

    def take(self, totals: MetricsTotals) -> None:
        """Totals were published. Those that nobody here asked for are as good."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(self._take, totals)

    async def text(self) -> bytes:
        """What all front ends have counted, in the exposition format. Raises UnavailableError when no totals come: an
        older page, or one of this front end alone, would make counters shrink."""
        try:
            async with asyncio.timeout(ANSWER_S):
                totals = await self._totals_with(self._push(asks=True))
        except TimeoutError:
            raise UnavailableError(f"the counts of all API servers did not come within {ANSWER_S:g} s") from None
        return self._metrics.text_of(totals)

    async def _totals_with(self, mine: int) -> MetricsTotals:
        """The first ones that include what was taken here at `mine`."""
        while self._totals is None or self._totals.included.get(self._index, 0) < mine:
            self._changed.clear()
            await self._changed.wait()
        return self._totals

    def _take(self, totals: MetricsTotals) -> None:
        self._totals = totals
        self._changed.set()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            known = self._latest
            if known is None or self._metrics.counts(known.taken_at_ns, asks=known.asks) != known:
                self._push(asks=False)

    def _push(self, *, asks: bool) -> int:
        """Have the present counts sent; when they are from, which is later than all before."""
        now = time.monotonic_ns() if self._latest is None else max(time.monotonic_ns(), self._latest.taken_at_ns + 1)
        self._latest = self._metrics.counts(now, asks=asks)
        self._replace_unsent(self._latest)
        return now

    def _replace_unsent(self, counts: FrontEndCounts | None) -> None:
        """What was not sent yet is outdated, but its question stays."""
        with contextlib.suppress(queue.Empty):
            unsent = self._unsent.get_nowait()
            if unsent is not None and counts is not None and unsent.asks and not counts.asks:
                counts = FrontEndCounts(counts.taken_at_ns, True, counts.engines, counts.num_rejected)
        self._unsent.put_nowait(counts)  # there is room: the sender only takes

    def _send_all(self) -> None:
        while (counts := self._unsent.get()) is not None:
            self._send(counts)
