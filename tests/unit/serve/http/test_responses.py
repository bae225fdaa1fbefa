"""Usage: answers say how many of their tokens were drafts, on every endpoint whose clients know a place for it."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.messages.stats import DraftCounts
from pagemill.tokenizers.fill_in import FillInTokens
from tests.fakes.engine import make_app, make_engine
from tests.fakes.engine_setup import engine_config
from tests.fakes.fake_core import FakeCore
from tests.fakes.fake_tokenizer import VOCAB_SIZE, ByteTokenizer
from tests.fakes.scripted_worker import ScriptedWorker

ASCII = 100
COUNTS = {"include_usage": True, "continuous_usage_stats": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


class Served:
    """A client of a server whose engine verifies drafts, up to `max_drafts` in a step."""

    def __init__(self, max_drafts: int = 4) -> None:
        config = engine_config(max_model_len=256, budget=256, num_blocks=256)
        config = replace(config, facts=replace(config.facts, vocab_size=VOCAB_SIZE))
        self.core = EngineCore(config, UniprocExecutor(ScriptedWorker(vocab_size=ASCII, max_drafts=max_drafts)))
        self.engine = make_engine(self.core)
        transport = httpx.ASGITransport(make_app(self.engine))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        answer = await self.client.post(path, json={"max_tokens": 60, "seed": 3} | body)
        assert answer.status_code == 200, answer.text
        return answer

    @property
    def counts(self) -> DraftCounts:
        found = self.core.stats().drafts
        assert found is not None
        return found


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    found = Served()
    yield found
    await found.client.aclose()
    await found.engine.shutdown()


def check(details: dict[str, Any], counts: DraftCounts) -> None:
    """Nothing was counted twice, or left out but drafts behind the last token."""
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert accepted + rejected == counts.num_draft_tokens
    assert counts.num_accepted_tokens - 2 * 4 <= accepted <= counts.num_accepted_tokens
    assert accepted > 0 and rejected > 0


@pytest.mark.parametrize("path", BODIES)
async def test_whole_answers_count_drafts(served: Served, path: str) -> None:
    usage = (await served.post(path, BODIES[path])).json()["usage"]
    check(usage["completion_tokens_details"], served.counts)
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] < usage["completion_tokens"]


@pytest.mark.parametrize("path", BODIES)
async def test_events_count_drafts_so_far(served: Served, path: str) -> None:
    answer = await served.post(path, BODIES[path] | {"stream": True, "stream_options": COUNTS})
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    found = [event["usage"].get("completion_tokens_details", {}) for event in events]
    accepted = [details.get("accepted_prediction_tokens", 0) for details in found]
    tokens = [event["usage"]["completion_tokens"] for event in events]
    assert accepted == sorted(accepted) and accepted[0] == 0 < accepted[len(accepted) // 2] < accepted[-1]
    assert all(num_accepted < num for num_accepted, num in zip(accepted, tokens, strict=True))
    check(found[-1], served.counts)


async def test_clients_of_llama_cpp_are_told_in_timings(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "fill_in", FillInTokens(90, 91, 92, None, None, (93,)))
    body = {"input_prefix": "a(", "input_suffix": ")", "n_predict": 60}
    timings = (await served.post("/infill", body)).json()["timings"]
    assert timings["draft_n"] == served.counts.num_draft_tokens
    assert 0 < timings["draft_n_accepted"] <= served.counts.num_accepted_tokens


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_is_said_where_nothing_was_drafted(path: str) -> None:
    engine = make_engine(FakeCore())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(make_app(engine)), base_url="http://localhost"
    ) as client:
        usage = (await client.post(path, json=BODIES[path] | {"max_tokens": 9})).json()["usage"]
    await engine.shutdown()
    assert usage["completion_tokens"] > 8
    assert "completion_tokens_details" not in usage
