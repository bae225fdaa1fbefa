"""A front end that answers for several: it waits for totals that include its own counts."""

import asyncio
import threading

import pytest

from pagemill.errors import UnavailableError
from pagemill.messages.stats import SchedulerStats
from pagemill.observability import shared_metrics
from pagemill.observability.metrics_pool import MetricsPool
from pagemill.observability.serving_metrics import QUEUE_FULL, ServingMetrics
from pagemill.observability.shared_metrics import SharedMetrics
from tests.fakes.wire_metrics import wire_values


def own(tokens):
    metrics = ServingMetrics("m", 100, {}, lambda: {0: SchedulerStats()})
    metrics.of_engine(0).num_generation_tokens += tokens
    return metrics


class Two:
    """Two front ends and a pool, without processes between them."""

    def __init__(self):
        self.sent = []
        self.metrics = [own(5), own(7)]
        self.pool = MetricsPool(1, self._publish)
        self.shared = [SharedMetrics(metrics, index, self._sender(index)) for index, metrics in enumerate(self.metrics)]

    def _sender(self, index):
        def send(counts):
            self.sent.append((index, counts))
            self.pool.take(index, counts)

        return send

    def _publish(self, totals):
        for shared in self.shared:
            shared.take(totals)

    async def tokens(self, index):
        return wire_values(await self.shared[index].text())["vllm:generation_tokens_total"]


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """On a busy machine a thread may wait for its turn for longer than anybody who asks for metrics should."""
    monkeypatch.setattr(shared_metrics, "ANSWER_S", 120.0)


async def test_both_say_the_same_and_what_is_new_is_in_it():
    two = Two()
    async with two.shared[0].running(), two.shared[1].running():
        assert await two.tokens(0) == 5
        assert await two.tokens(1) == 12
        assert await two.tokens(0) == 12
        two.metrics[0].of_engine(0).num_generation_tokens += 100
        assert await two.tokens(0) == 112
        assert await two.tokens(1) == 112
        assert await asyncio.gather(*(two.tokens(index % 2) for index in range(20))) == [112] * 20


@pytest.mark.slow
async def test_what_nobody_asked_for_is_sent_from_time_to_time(monkeypatch):
    monkeypatch.setattr(shared_metrics, "REPORT_S", 0.01)
    two = Two()
    async with two.shared[0].running():
        await asyncio.sleep(0.1)
        assert len(two.sent) == 1, "nothing changed since"
        two.metrics[0].rejected()
        await asyncio.sleep(0.1)
    assert [counts.num_rejected[QUEUE_FULL] for _, counts in two.sent] == [0, 1]
    assert not any(counts.asks for _, counts in two.sent)


async def test_without_totals_in_time_it_says_so(monkeypatch):
    monkeypatch.setattr(shared_metrics, "ANSWER_S", 0.05)
    shared = SharedMetrics(own(5), 0, lambda counts: None)
    async with shared.running():
        with pytest.raises(UnavailableError, match="API servers"):
            await shared.text()


async def test_a_sender_that_blocks_holds_up_nobody_and_loses_no_question():
    """The pipe is full: what waits is replaced by what is newer, and the question in it stays."""
    two = Two()
    free, first = threading.Event(), threading.Event()

    def blocked(counts):
        first.set()
        free.wait(60)
        two.sent.append((0, counts))
        two.pool.take(0, counts)

    shared = two.shared[0] = SharedMetrics(two.metrics[0], 0, blocked)
    async with shared.running():
        shared._push(asks=False)
        await asyncio.to_thread(first.wait, 10)
        question = asyncio.ensure_future(shared.text())
        await asyncio.sleep(0)
        for _ in range(5):
            shared._push(asks=False)
        free.set()
        assert wire_values(await question)["vllm:generation_tokens_total"] == 5
    assert [counts.asks for _, counts in two.sent][:2] == [False, True]
    assert len(two.sent) == 2
