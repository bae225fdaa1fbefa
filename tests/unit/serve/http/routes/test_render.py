"""POST /v1/chat/completions/render and /v1/completions/render."""

import msgspec

from pagemill.messages.sampling_params import SamplingParams
from tests.fakes.fake_core import FakeCore
from tests.unit.serve.http.conftest import Connect

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0.5, "logit_bias": {"7": 1}}


async def test_a_chat_is_rendered_as_it_is_run_and_not_run(connect: Connect) -> None:
    core = FakeCore()
    client = await connect(core)
    rendered = (await client.post("/v1/chat/completions/render", json=CHAT, headers={"x-request-id": "r1"})).json()
    assert not core.seen
    await client.post("/v1/chat/completions", json=CHAT)
    request = core.seen[0]
    assert (rendered["request_id"], rendered["model"], rendered["stream"]) == ("r1", "fake", False)
    assert rendered["token_ids"] == request.prompt_token_ids
    params = msgspec.convert(rendered["sampling_params"] | {"type": "sampling"}, SamplingParams, strict=False)
    assert params.replace(seed=None) == msgspec.structs.replace(request.params, seed=None)  # type: ignore[arg-type]


async def test_prompts_are_rendered_one_by_one(connect: Connect) -> None:
    client = await connect()
    answer = await client.post("/v1/completions/render", json={"prompt": ["a", "b"], "stream": True, "new": 1})
    assert [item["token_ids"] for item in answer.json()] == [[256, 97], [256, 98]]
    assert answer.json()[0]["stream"] is True
    assert answer.headers["x-pagemill-ignored-fields"] == "new"


async def test_it_says_nothing_of_the_salt_of_a_key(connect: Connect) -> None:
    client = await connect(api_key=("k", "l"))
    answer = await client.post("/v1/chat/completions/render", json=CHAT, headers={"authorization": "Bearer k"})
    assert answer.status_code == 200
    assert "salt" not in answer.text


async def test_bad_bodies_are_refused_as_by_the_chat(connect: Connect) -> None:
    answer = await (await connect()).post("/v1/chat/completions/render", json=CHAT | {"temperature": -1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
