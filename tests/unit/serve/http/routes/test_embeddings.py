"""POST /v1/embeddings: forms of the input and of the vectors, and what is refused."""

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from pagemill.config.pooler_config import PoolerConfig
from pagemill.messages.engine_io import EngineCoreOutputs
from pagemill.messages.pooling_params import PoolingTask
from pagemill.serve.processing.conversation import parse_conversation
from tests.fakes.engine import make_app, make_engine
from tests.fakes.fake_core import FakeCore, vector_of
from tests.fakes.fake_tokenizer import BOS, ByteTokenizer
from tests.fakes.wire_metrics import wire_values
from tests.unit.serve.http.conftest import Connect

PATH = "/v1/embeddings"
POOLER = PoolerConfig(pooling_type="LAST", normalize=False)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    engine = make_engine(pooler=POOLER, scheduling_policy="priority")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://test") as client:
        yield client
    await engine.shutdown()


async def ask(client: httpx.AsyncClient, given: Any = "ab", **body: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={"input": given} | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


A, B = [*b"ab"], [*b"cde"]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("ab", [[BOS, *A]]), (["ab", "cde"], [[BOS, *A], [BOS, *B]]), (A, [A]), ([A, B], [A, B])],
)
async def test_forms_of_the_input(client: httpx.AsyncClient, given: Any, prompts: list[list[int]]) -> None:
    body = await ask(client, given)
    assert (body["object"], body["model"], body["id"][:5]) == ("list", "fake", "embd-")
    for number, (item, prompt) in enumerate(zip(body["data"], prompts, strict=True)):
        assert (item["object"], item["index"]) == ("embedding", number)
        assert item["embedding"] == vector_of(prompt).tolist()
    num_tokens = sum(map(len, prompts))
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"], usage["completion_tokens"]) == (num_tokens, num_tokens, 0)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "less than a block"


async def test_a_conversation(client: httpx.AsyncClient) -> None:
    """As its template writes it, without the beginning of an answer unless that is asked for."""
    for more in ({}, {"add_generation_prompt": True}):
        answer = await client.post(PATH, json={"messages": CHAT} | more)
        assert answer.status_code == 200, answer.text
        assert "x-pagemill-ignored-fields" not in answer.headers
        text = ByteTokenizer().render_chat(parse_conversation(CHAT), add_generation_prompt=bool(more))
        prompt = ByteTokenizer().encode(text, add_special_tokens=False, rendered=True)
        assert answer.json()["data"][0]["embedding"] == vector_of(prompt).tolist()
        assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
    pooled = (await client.post("/pooling", json={"messages": CHAT})).json()
    assert pooled["usage"]["prompt_tokens"] < len(prompt)


async def test_the_same_under_the_names_of_pooling(client: httpx.AsyncClient) -> None:
    body = (await client.post("/pooling", json={"input": ["ab", "cde"]})).json()
    vectors = [item["embedding"] for item in (await ask(client, ["ab", "cde"]))["data"]]
    assert body["id"].startswith("pool-")
    assert body["data"] == [
        {"object": "pooling", "index": number, "data": vector} for number, vector in enumerate(vectors)
    ]


async def test_a_model_that_generates_text_has_no_pooling(connect: Connect) -> None:
    answer = await (await connect()).post("/pooling", json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_supported")


@pytest.mark.parametrize("changes", [{"pooling_type": "ALL"}, {"task": PoolingTask.CLASSIFY, "num_outputs": 3}])
async def test_a_model_that_makes_something_else_of_texts_makes_no_vectors(changes: dict[str, Any]) -> None:
    """A list for each token is no vector, and no client of this route expects one; /pooling has them."""
    engine = make_engine(pooler=PoolerConfig(**({"pooling_type": "LAST", "normalize": False} | changes)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://test") as client:
        answer = await client.post(PATH, json={"model": "fake", "input": "a"})
        assert (answer.status_code, "/pooling" in answer.json()["error"]["message"]) == (404, True)
        assert (await client.post("/pooling", json={"model": "fake", "input": "a"})).status_code == 200
    await engine.shutdown()


async def test_base64_holds_the_same_numbers(client: httpx.AsyncClient) -> None:
    plain, packed = await ask(client), await ask(client, encoding_format="base64")
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == plain["data"][0]["embedding"]


async def test_dimensions_and_normalize(client: httpx.AsyncClient) -> None:
    body = await ask(client, A, dimensions=3, normalize=True)
    wanted = vector_of(A)[:3]
    assert body["data"][0]["embedding"] == pytest.approx((wanted / np.linalg.norm(wanted)).tolist())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize(("given", "cut", "kept"), [
    ("abcd", {"truncate_prompt_tokens": 3}, [BOS, 97, 98]), ("ab", {"truncate_prompt_tokens": 3}, [BOS, 97, 98]),
    ("abcd", {"truncate_prompt_tokens": 3, "truncation_side": "left"}, [BOS, 99, 100]),
    ("ab" * 200, {"truncate_prompt_tokens": -1}, [BOS, *[97, 98] * 127, 97]),
    ("ab" * 200, {"truncate_prompt_tokens": 999}, [BOS, *[97, 98] * 127, 97]),
    ([1, 2, 3, 4], {"truncate_prompt_tokens": 3}, [1, 2, 3]),
    ([1, 2, 3, 4], {"truncate_prompt_tokens": 3, "truncation_side": "left"}, [2, 3, 4]),
])  # fmt: skip
async def test_prompts_that_are_cut(
    client: httpx.AsyncClient, path: str, given: Any, cut: dict[str, Any], kept: list[int]
) -> None:
    answer = await client.post(path, json={"input": given} | cut)
    assert answer.status_code == 200, answer.text
    found = answer.json()["data"][0]
    assert found.get("embedding", found.get("data")) == pytest.approx(vector_of(kept).tolist())
    assert answer.json()["usage"]["prompt_tokens"] == len(kept)


async def test_texts_without_special_tokens(client: httpx.AsyncClient) -> None:
    body = await ask(client, "ab", add_special_tokens=False, user="me", cache_salt="s", priority=1, unknown=1)
    assert body["data"][0]["embedding"] == vector_of(A).tolist()


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "input", "input"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "input=[]"),
        ({"input": ["a", 1]}, "input", "not mixed"),
        ({"input": 5}, "input", "input=5"),
        ({"input": ["a"] * 1025}, "input", "input holds 1025 prompts"),
        ({"input": [-1]}, "input", "-1"),
        ({"input": [10**9]}, "input", "not allowed"),
        ({"input": [1] * 257}, "input", "has 257 tokens, at most 256 fit"),
        ({"input": "a", "dimensions": 9}, "dimensions", "dimensions=9 is not allowed: 1 to 8"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions=0"),
        ({"input": "a", "dimensions": "3"}, "dimensions", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "truncate_prompt_tokens=-2"),
        ({"input": "a", "cache_salt": "/"}, "cache_salt", "cache_salt"),
        ({}, "input", "input is missing"),
        ({"input": "a", "messages": CHAT}, "messages", "does not go with input"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt", "does not go with input"),
        ({"messages": []}, "messages", "messages"),
        ({"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template", "--chat-template"),
        ({"messages": CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set messages"),
    ],
)
async def test_refused(client: httpx.AsyncClient, body: dict[str, Any], field: str, words: str) -> None:
    answer = await client.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert words in error["message"]


async def test_another_model(client: httpx.AsyncClient) -> None:
    assert (await client.post(PATH, json={"input": "a", "model": "other"})).status_code == 404


async def test_a_context_of_prompt_alone(client: httpx.AsyncClient) -> None:
    assert len((await ask(client, [1] * 256))["data"]) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_text_from_a_server_of_vectors(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert "ask for embeddings" in answer.json()["error"]["message"]


async def test_vectors_from_a_server_of_text(connect: Connect) -> None:
    answer = await (await connect()).post(PATH, json={"input": "a"})
    assert answer.status_code == 400
    assert "start with --runner pooling" in answer.json()["error"]["message"]


async def test_metrics_count_prompts_and_no_tokens(client: httpx.AsyncClient) -> None:
    await ask(client, [A, B])
    values = wire_values((await client.get("/metrics")).content)
    assert values["vllm:prompt_tokens_total"] == 5
    assert values["vllm:generation_tokens_total"] == 0
    assert values["vllm:request_success_total{finished_reason=stop}"] == 2
    assert values["vllm:e2e_request_latency_seconds_count"] == 2
    assert values["vllm:time_to_first_token_seconds_count"] == 0
    assert values["vllm:request_params_max_tokens_count"] == 0


class HeldCore(FakeCore):
    """A core whose steps produce nothing while it is held."""

    held = True

    def step(self) -> list[EngineCoreOutputs]:
        return [] if self.held else super().step()


async def test_encode_aborts_and_ends() -> None:
    core = HeldCore()
    engine = make_engine(core, pooler=POOLER)
    cancelled = asyncio.ensure_future(anext(engine.encode("ab", request_id="mine")))
    await asyncio.sleep(0.02)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await asyncio.sleep(0.02)
    assert engine.num_in_flight == 0
    waiting = asyncio.ensure_future(anext(engine.encode("ab", request_id="mine")))
    await asyncio.sleep(0.02)
    await engine.abort("mine")
    output = await waiting
    assert (output.request_id, output.outputs.finish_reason, output.outputs.embedding) == ("mine", "abort", [])
    core.held = False
    output = await anext(engine.encode("ab"))
    assert output.outputs.embedding == vector_of([BOS, *A]).tolist()
    assert (output.finished, output.prompt, output.prompt_token_ids) == (True, "ab", [BOS, *A])
    await engine.shutdown()


class NanCore(FakeCore):
    """Its vectors have a place that is no number."""

    def step(self) -> list[EngineCoreOutputs]:
        found = super().step()
        for output in (output for outputs in found for output in outputs.outputs):
            if output.pooled is not None:
                output.pooled[-1] = np.nan
        return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"input": "a"}),
        (PATH, {"input": ["a", "b"], "encoding_format": "base64"}),
        ("/pooling", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/api/embed", {"model": "fake", "input": "a"}),
        ("/api/embeddings", {"model": "fake", "prompt": "a"}),
    ],
)
async def test_what_is_no_number_is_an_error(connect: Connect, path: str, body: dict[str, Any]) -> None:
    """In JSON it would be null, in a vector that looks whole."""
    client = await connect(NanCore(), {"pooler": POOLER})
    answer = await client.post(path, json=body)
    assert answer.status_code == 500
    assert "not a number" in answer.text
