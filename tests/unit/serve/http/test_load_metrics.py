import json

import pytest

from pagemill.messages.stats import SchedulerStats
from pagemill.serve.http.load_metrics import load_headers
from tests.fakes.fake_core import FakeCore
from tests.unit.serve.http.conftest import Connect

STATS = {
    0: SchedulerStats(num_running=2, num_waiting=1, kv_cache_usage=0.5),
    1: SchedulerStats(num_running=1, kv_cache_usage=0.25),
}
NAMED = {"kv_cache_usage_perc": 0.375, "num_requests_running": 3, "num_requests_waiting": 1}


def test_all_engines_together() -> None:
    text = "TEXT named_metrics.kv_cache_usage_perc=0.375, named_metrics.num_requests_running=3, "
    assert load_headers("text", STATS) == {"endpoint-load-metrics": text + "named_metrics.num_requests_waiting=1"}
    told = load_headers("JSON", STATS)["endpoint-load-metrics"]
    assert json.loads(told.removeprefix("JSON ")) == {"named_metrics": NAMED}


@pytest.mark.parametrize("asked", [None, "", "BIN", "x" * 1000])
def test_nothing_is_told_that_was_not_asked_for(asked: str | None) -> None:
    assert load_headers(asked, STATS) == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_have_it(connect: Connect, stream: bool) -> None:
    client = await connect(FakeCore())
    body = {"prompt": "a", "max_tokens": 2, "stream": stream}
    asked = await client.post("/v1/completions", json=body, headers={"endpoint-load-metrics-format": "TEXT"})
    assert asked.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.kv_cache_usage_perc=")
    assert "endpoint-load-metrics" not in (await client.post("/v1/completions", json=body)).headers
