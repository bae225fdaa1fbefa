"""POST /score and /rerank."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from pagemill.config.pooler_config import PoolerConfig
from pagemill.messages.pooling_params import PoolingTask
from tests.fakes.engine import make_app, make_engine
from tests.fakes.fake_core import FakeCore, vector_of
from tests.fakes.fake_tokenizer import BOS
from tests.unit.serve.http.conftest import Connect

# Vectors of FakeCore differ in length only, so that every likeness is 1 unless a core says otherwise.


class TwoWays(FakeCore):
    """Texts that begin alike are alike."""

    def step(self) -> Any:
        outputs = super().step()
        for batch in outputs:
            for output in batch.outputs:
                first = next(r for r in self.seen if r.request_id == output.request_id).prompt_token_ids[1]
                angle = first / 100
                assert output.pooled is not None
                output.pooled[:] = 0
                output.pooled[:2] = np.cos(angle), np.sin(angle)
        return outputs


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    engine = make_engine(TwoWays(), pooler=PoolerConfig(pooling_type="LAST", normalize=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://test") as client:
        yield client
    await engine.shutdown()


def likeness(first: str, second: str) -> float:
    return float(np.cos((ord(first[0]) - ord(second[0])) / 100))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(("first", "second", "pairs"), [
    ("a", "b", [("a", "b")]), ("a", ["b", "z"], [("a", "b"), ("a", "z")]),
    (["a", "m"], ["b", "z"], [("a", "b"), ("m", "z")]),
])  # fmt: skip
async def test_scores(
    client: httpx.AsyncClient, path: str, first: Any, second: Any, pairs: list[tuple[str, str]]
) -> None:
    answer = (await client.post(path, json={"model": "fake", "text_1": first, "text_2": second})).json()
    assert [item["index"] for item in answer["data"]] == list(range(len(pairs)))
    assert [item["score"] for item in answer["data"]] == pytest.approx([likeness(*pair) for pair in pairs])
    texts = [first] if isinstance(first, str) else first
    num_tokens = sum(2 for _ in [*texts, *([second] if isinstance(second, str) else second)])
    assert answer["usage"]["total_tokens"] == num_tokens


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
async def test_the_two_sides_under_other_names(client: httpx.AsyncClient, names: tuple[str, str]) -> None:
    answer = await client.post("/score", json=dict(zip(names, ("a", ["b", "z"]), strict=True)))
    assert answer.status_code == 200, answer.text
    scores = [item["score"] for item in answer.json()["data"]]
    assert scores == pytest.approx([likeness("a", "b"), likeness("a", "z")])
    wrong = await client.post("/score", json=dict(zip(names, ("a", ["b", ""]), strict=True)))
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, names[1])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_put_in_order(client: httpx.AsyncClient, path: str) -> None:
    body = {"query": "m", "documents": ["z", {"text": "n"}, "a", "m"]}
    results = (await client.post(path, json=body)).json()["results"]
    assert [(item["index"], item["document"]["text"]) for item in results] == [(3, "m"), (1, "n"), (2, "a"), (0, "z")]
    assert [item["relevance_score"] for item in results] == pytest.approx([likeness("m", x) for x in "mnaz"])
    for top_n, count in ((2, 2), (9, 4), (0, 4)):
        assert len((await client.post(path, json=body | {"top_n": top_n})).json()["results"]) == count


@pytest.mark.parametrize(("cut", "num_tokens"), [
    ({"truncate_prompt_tokens": 4}, 4 + 4), ({"truncate_prompt_tokens": -1}, 9 + 256),
    ({"max_tokens_per_doc": 3}, 9 + 4), ({"max_tokens_per_query": 2, "max_tokens_per_doc": 5}, 3 + 6),
    ({"max_tokens_per_query": 5, "max_tokens_per_doc": 5, "truncate_prompt_tokens": 3}, 3 + 3),
])  # fmt: skip
async def test_texts_that_are_cut(client: httpx.AsyncClient, cut: dict[str, Any], num_tokens: int) -> None:
    body = {"query": "m" * 8, "documents": ["z" * 1000]}
    assert (await client.post("/rerank", json=body)).status_code == 400
    answer = (await client.post("/rerank", json=body | cut)).json()
    assert answer["usage"]["total_tokens"] == num_tokens
    assert answer["results"][0]["document"]["text"] == "z" * 1000


@pytest.mark.parametrize(("path", "body", "field"), [
    ("/score", {"text_1": "a"}, "text_2"), ("/score", {"text_1": 5, "text_2": "a"}, "text_1"),
    ("/score", {}, "text_1"), ("/score", {"queries": "a"}, "documents"), ("/score", {"items": "a"}, "queries"),
    ("/score", {"text_1": "a", "text_2": "b", "items": "c"}, "items"),
    ("/score", {"data_1": ["a", "b"], "data_2": ["a", "b", "c"]}, "data_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2"), ("/score", {"text_1": "a", "text_2": ["a"] * 1025}, "text_2"),
    ("/score", {"text_1": "", "text_2": "a"}, "text_1"), ("/score", {"text_1": "a", "text_2": "a" * 500}, "text_2"),
    ("/rerank", {"query": "a"}, "documents"), ("/rerank", {"query": ["a"], "documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": [{}]}, "documents"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "a", "documents": ["a"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/rerank", {"query": "a", "documents": ["a"], "truncation_side": "top"}, "truncation_side"),
    ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ("/rerank", {"query": "a", "documents": ["a"], "instruction": "find"}, "instruction"),
])  # fmt: skip
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, path: str, body: dict[str, Any], field: str) -> None:
    answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


@pytest.mark.parametrize(("path", "names"), [
    ("/score", ("text_1", "text_2")), ("/rerank", ("query", "documents")),
])  # fmt: skip
async def test_what_is_wrong_with_a_pair_is_named_as_it_was_sent(path: str, names: tuple[str, str]) -> None:
    pooler = PoolerConfig(pooling_type="CLS", normalize=False, task=PoolingTask.CLASSIFY, pairs=True)
    engine = make_engine(FakeCore(), pooler=pooler)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://test") as client:
        for wrong in names:
            answer = await client.post(path, json=dict.fromkeys(names, "a") | {wrong: ""})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, wrong), answer.text
    await engine.shutdown()


async def test_a_model_that_generates_text_has_none(connect: Connect) -> None:
    for path in ("/score", "/v2/rerank"):
        answer = await (await connect()).post(path, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_supported")
        assert "--runner pooling" in answer.json()["error"]["message"]


def test_the_vectors_of_the_core_are_what_the_comment_says() -> None:
    one = vector_of([BOS, 97])
    two = vector_of([BOS, 122])
    assert float(one @ two) == pytest.approx(float(np.linalg.norm(one) * np.linalg.norm(two)))
