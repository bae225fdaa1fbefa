"""POST /v2/embed: forms of the vectors, texts that do not fit, and what is refused."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from pagemill.config.pooler_config import PoolerConfig
from tests.fakes.engine import make_app, make_engine
from tests.fakes.fake_core import FakeCore, vector_of
from tests.fakes.fake_tokenizer import BOS
from tests.unit.serve.http.conftest import Connect

PATH = "/v2/embed"
NUM_FIT = 8


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    pooler = PoolerConfig(pooling_type="LAST", normalize=False)
    engine = make_engine(FakeCore(max_model_len=NUM_FIT), pooler=pooler)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://test") as client:
        yield client
    await engine.shutdown()


async def ask(client: httpx.AsyncClient, *texts: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={"model": "fake", "texts": texts} | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_every_form(client: httpx.AsyncClient) -> None:
    kinds = ["float", "base64", "binary", "ubinary"]
    body = await ask(client, "a", "bc", embedding_types=[*kinds, "float"], input_type="search_document")
    expected = [vector_of([BOS, *text]) for text in (b"a", b"bc")]
    found = body["embeddings"]
    assert list(found) == kinds
    for number, vector in enumerate(expected):
        assert found["float"][number] == vector.tolist()
        assert base64.b64decode(found["base64"][number]) == vector.astype("<f4").tobytes()
        bits = np.unpackbits(np.array(found["ubinary"][number], np.uint8))[: len(vector)]
        assert bits.astype(bool).tolist() == (vector > 0).tolist()
        assert [byte + 128 for byte in found["binary"][number]] == found["ubinary"][number]
    assert (body["texts"], body["response_type"], body["id"][:5]) == (["a", "bc"], "embeddings_by_type", "embd-")
    assert body["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 5}}


async def test_by_default_numbers_of_all_dimensions(client: httpx.AsyncClient) -> None:
    vector = vector_of([BOS, *b"a"])
    assert (await ask(client, "a"))["embeddings"] == {"float": [vector.tolist()]}
    assert (await ask(client, "a", output_dimension=3))["embeddings"] == {"float": [vector[:3].tolist()]}


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ({}, b"0123456"),
        ({"truncate": "END"}, b"0123456"),
        ({"truncate": "START"}, b"3456789"),
        ({"truncate": "START", "max_tokens": 4}, b"789"),
        ({"max_tokens": 100}, b"0123456"),
        ({"max_tokens": 1}, b""),
    ],
)
async def test_what_does_not_fit_is_cut(client: httpx.AsyncClient, body: dict[str, Any], kept: bytes) -> None:
    """Around what is kept of it, the text has its special tokens."""
    found = (await ask(client, "0123456789", **body))["embeddings"]["float"]
    assert found == [vector_of([BOS, *kept]).tolist()]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"texts": []}, "texts"),
        ({"texts": "a"}, "texts"),
        ({"texts": ["a", ""]}, "texts"),
        ({"texts": ["a"] * 1025}, "texts"),
        ({"texts": ["0123456789"], "truncate": "NONE"}, "texts"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["a"], "output_dimension": 99}, "output_dimension"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"texts": ["a"], "images": ["data:image/png;base64,AAAA"]}, "images"),
        ({"inputs": [{"content": []}]}, "texts"),
    ],
)
async def test_refused(client: httpx.AsyncClient, body: dict[str, Any], field: str) -> None:
    answer = await client.post(PATH, json={"model": "fake"} | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].partition(".")[0].partition("[")[0] == field, answer.text


async def test_a_field_without_effect_is_named(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json={"model": "fake", "texts": ["a"], "input_type": "search_query"})
    assert answer.headers["x-pagemill-ignored-fields"] == "input_type"


async def test_a_model_that_makes_a_vector_of_each_token_makes_none_of_texts() -> None:
    engine = make_engine(pooler=PoolerConfig(pooling_type="ALL", normalize=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://test") as client:
        answer = await client.post(PATH, json={"model": "fake", "texts": ["a"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_supported")
    await engine.shutdown()


async def test_a_model_that_generates_text_makes_no_vectors(connect: Connect) -> None:
    answer = await (await connect()).post(PATH, json={"model": "fake", "texts": ["a"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_supported")
