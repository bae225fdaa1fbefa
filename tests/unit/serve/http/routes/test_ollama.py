"""POST /api/chat, /api/generate and /api/embed: lines, bodies, options, errors."""

import json
from typing import Any

import httpx
import pytest

from pagemill.config.pooler_config import PoolerConfig
from pagemill.messages.pooling_params import PoolingTask
from pagemill.messages.sampling_params import SamplingParams
from pagemill.tokenizers.fill_in import FillInTokens
from tests.fakes.engine import make_app, make_engine
from tests.fakes.fake_core import FakeCore, say, vector_of
from tests.fakes.fake_tokenizer import BOS, EOS, ByteTokenizer
from tests.unit.serve.http.conftest import Connect

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "fake", "messages": HI}
GENERATE: dict[str, Any] = {"model": "fake:latest", "prompt": "hi"}
PARSERS: dict[str, Any] = {
    "reasoning_parser": "qwen3", "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "é</b>"]}}</tool_call>'
EMPTY = {"role": "assistant", "content": ""}
TIMES = ("created_at", "total_duration", "prompt_eval_duration", "eval_duration")


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    """The lines of a stream, of which the last says so."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that lines make."""
    whole = dict(found[-1])
    messages = [line["message"] for line in found]
    texts = {name: "".join([item.get(name, "") for item in messages]) for name in ("content", "thinking")}
    calls = [call for item in messages for call in item.get("tool_calls", [])]
    whole["message"] = {"role": "assistant", "content": texts["content"]}
    whole["message"] |= {"thinking": texts["thinking"]} if texts["thinking"] else {}
    whole["message"] |= {"tool_calls": calls} if calls else {}
    return whole


def timeless(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in TIMES}


async def test_a_chat(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello é😀", EOS)))
    answer = (await client.post("/api/chat", json=CHAT | {"stream": False})).json()
    assert timeless(answer) == {
        "model": "fake", "message": {"role": "assistant", "content": "hello é😀"}, "done": True, "done_reason": "stop",
        "load_duration": 0, "prompt_eval_count": len("[user]hi[assistant]"), "eval_count": 13,
    }  # fmt: skip
    assert answer["created_at"].endswith("Z")
    assert all(isinstance(answer[name], int) for name in TIMES[1:])


@pytest.mark.parametrize("said", [
    "plain", "<think>hmm é</think>answer", f"<think>hmm</think>so {CALL}", f"{CALL}{CALL}", "", "<think>cut",
    f"text {CALL} more", '<tool_call>{"name": "f", "arguments": {"a": ',
])  # fmt: skip
async def test_a_stream_is_the_answer(connect: Connect, said: str) -> None:
    client = await connect(FakeCore(say(said, EOS), max_model_len=1024), **PARSERS)
    body = CHAT | {"tools": TOOLS}
    whole = (await client.post("/api/chat", json=body | {"stream": False})).json()
    assert timeless(joined(lines(await client.post("/api/chat", json=body)))) == timeless(whole)


async def test_calls_are_objects_and_come_when_they_are_whole(connect: Connect) -> None:
    client = await connect(FakeCore(say(f"<think>hmm</think>so {CALL}{CALL}", EOS), max_model_len=1024), **PARSERS)
    found = lines(await client.post("/api/chat", json=CHAT | {"tools": TOOLS}))
    calls = [line["message"]["tool_calls"] for line in found if "tool_calls" in line["message"]]
    assert calls == [[{"function": {"name": "f", "arguments": {"a": [1, "é</b>"]}}}]] * 2
    assert joined(found)["message"]["thinking"] == "hmm"


async def test_a_prompt_is_answered_through_the_template_unless_it_is_raw(connect: Connect) -> None:
    core = FakeCore(say("yes", EOS))
    client = await connect(core)
    found = lines(await client.post("/api/generate", json=GENERATE | {"system": "be kind"}))
    assert "".join([line["response"] for line in found]) == "yes"
    assert bytes(core.seen[0].prompt_token_ids) == b"[system]be kind[user]hi[assistant]"
    raw = (await client.post("/api/generate", json=GENERATE | {"raw": True, "stream": False})).json()
    assert (raw["response"], raw["done_reason"]) == ("yes", "stop")
    assert core.seen[1].prompt_token_ids == [BOS, *b"hi"]


@pytest.mark.parametrize(("path", "body", "empty"), [
    ("/api/chat", {"model": "fake"}, {"message": EMPTY}),
    ("/api/chat", {"model": "fake", "messages": [], "keep_alive": 0}, {"message": EMPTY}),
    ("/api/generate", {"model": "fake"}, {"response": ""}),
])  # fmt: skip
async def test_a_body_that_asks_for_nothing_is_told_that_the_model_is_loaded(
    connect: Connect, path: str, body: dict[str, Any], empty: dict[str, Any]
) -> None:
    core = FakeCore()
    client = await connect(core)
    told = {"model": "fake", "done": True, "done_reason": "load", **empty}
    assert timeless((await client.post(path, json=body | {"stream": False})).json()) == told
    assert [timeless(line) for line in lines(await client.post(path, json=body))] == [told]
    assert not core.seen
    assert (await client.post(path, json=body | {"model": "other"})).status_code == 404


async def test_options(connect: Connect) -> None:
    core = FakeCore(say("a" * 300))
    client = await connect(core)
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 5, "stop": ["x"],
        "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "num_ctx": 4096, "mirostat": 0,
    }  # fmt: skip
    answer = await client.post("/api/chat", json=CHAT | {"options": options | {"new": 1}, "stream": False})
    assert answer.json()["done_reason"] == "length"
    assert answer.headers["x-pagemill-ignored-fields"] == "options.new"
    params = core.seen[0].params
    assert isinstance(params, SamplingParams)
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (7, 0.5, 3, 0.9)
    assert (params.min_p, params.seed, params.stop, params.repetition_penalty) == (0.1, 5, ("x",), 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    for limit in (-1, -2, 10_000):
        found = await client.post(
            "/api/generate", json=GENERATE | {"raw": limit == -2, "options": {"num_predict": limit}, "stream": False}
        )
        counts = found.json()
        assert counts["prompt_eval_count"] + counts["eval_count"] == 256, found.text


@pytest.mark.parametrize(("fields", "shown"), [
    ({"think": True}, b"(enable_thinking=True)"), ({"think": False}, b"(enable_thinking=False)"),
    ({"think": "max"}, b"(reasoning_effort=high)(enable_thinking=True)"), ({"keep_alive": "5m"}, b""),
])  # fmt: skip
async def test_how_much_it_thinks(connect: Connect, fields: dict[str, Any], shown: bytes) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core)
    await client.post("/api/chat", json=CHAT | fields)
    assert bytes(core.seen[0].prompt_token_ids) == b"[user]hi" + shown + b"[assistant]"


@pytest.mark.parametrize("form", ["json", {"type": "integer"}])
async def test_the_form_of_the_answer(connect: Connect, form: Any) -> None:
    core = FakeCore(say("1", EOS))
    client = await connect(core)
    await client.post("/api/chat", json=CHAT | {"format": form})
    assert core.seen[0].grammar is not None


async def test_a_conversation_with_tools_is_the_chat_that_it_stands_for(connect: Connect) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core, **PARSERS)
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        *HI, {"role": "assistant", "content": "", "thinking": "hmm", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_name": "f"},
    ]  # fmt: skip
    assert (await client.post("/api/chat", json=CHAT | {"messages": messages, "tools": TOOLS})).status_code == 200
    chat = {
        "messages": [
            *HI, {"role": "assistant", "content": "", "reasoning": "hmm", "tool_calls": [call]},
            {"role": "tool", "content": "done", "name": "f"},
        ],
        "tools": TOOLS,
    }  # fmt: skip
    await client.post("/v1/chat/completions", json=chat)
    assert core.seen[0].prompt_token_ids == core.seen[1].prompt_token_ids


@pytest.mark.parametrize(("path", "fields", "named"), [
    ("/api/chat", {"model": None}, "model"), ("/api/chat", {"messages": 5}, "messages"),
    ("/api/chat", {"messages": [{"role": "x", "content": ""}]}, "messages.0.role"),
    ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "messages.0.images"),
    ("/api/chat", {"options": {"temperature": -1}}, "options.temperature"),
    ("/api/chat", {"options": {"num_predict": -5}}, "options.num_predict"),
    ("/api/chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat"), ("/api/chat", {"options": {"stop": 5}},
     "options.stop"), ("/api/chat", {"options": 5}, "options"), ("/api/chat", {"format": 5}, "format"),
    ("/api/chat", {"format": {"type": "nonsense"}}, "nonsense"), ("/api/chat", {"think": 5}, "think"),
    ("/api/chat", {"tools": TOOLS}, "tools"), ("/api/chat", {"tools": 5}, "tools"),
    ("/api/generate", {"images": ["x"]}, "images"), ("/api/generate", {"suffix": "x"}, "suffix"),
    ("/api/generate", {"template": "x"}, "template"), ("/api/generate", {"context": [1]}, "context"),
    ("/api/generate", {"suffix": "x", "system": "y"}, "system"),
    ("/api/generate", {"raw": True, "system": "x"}, "system"), ("/api/generate", {"prompt": 5}, "prompt"),
    ("/api/embed", {"input": "a"}, "embeddings"), ("/api/chat", {"model": "other"}, "other"),
])  # fmt: skip
async def test_what_is_wrong_is_named(connect: Connect, path: str, fields: dict[str, Any], named: str) -> None:
    client = await connect()
    body = {"/api/chat": CHAT, "/api/generate": GENERATE, "/api/embed": {"model": "fake"}}[path]
    answer = await client.post(path, json=body | fields)
    assert answer.status_code == (404 if named == "other" else 400), answer.text
    assert set(answer.json()) == {"error"}
    assert named in answer.json()["error"]


async def test_bodies_may_have_the_type_of_a_form_unless_a_browser_sends_them(connect: Connect) -> None:
    client = await connect(FakeCore(say("ok", EOS)))
    form = {"content-type": "application/x-www-form-urlencoded"}
    content = json.dumps(CHAT)
    assert (await client.post("/api/chat", content=content, headers=form)).status_code == 200
    for browser in ({"origin": "http://test"}, {"sec-fetch-site": "none"}):
        answer = await client.post("/api/chat", content=content, headers=form | browser)
        assert answer.status_code == 415
        assert set(answer.json()) == {"error"}


async def test_an_engine_that_dies_ends_the_stream_with_an_error(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS), fail_after=3))
    streamed = await client.post("/api/chat", json=CHAT)
    assert "engine" in json.loads(streamed.text.splitlines()[-1])["error"]


async def test_vectors() -> None:
    core = FakeCore(max_model_len=8)
    engine = make_engine(core, pooler=PoolerConfig(pooling_type="LAST", normalize=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://test") as client:
        answer = (await client.post("/api/embed", json={"model": "fake", "input": ["a", "bc"]})).json()
        expected = [vector_of([BOS, *text]).tolist() for text in (b"a", b"bc")]
        assert (answer["embeddings"], answer["prompt_eval_count"]) == (expected, 5)
        cut = (await client.post("/api/embed", json={"model": "fake", "input": "a" * 5000, "dimensions": 2})).json()
        assert cut["embeddings"] == [vector_of([BOS, *b"a" * 7]).tolist()[:2]]
        older = (await client.post("/api/embeddings", json={"model": "fake", "prompt": "a"})).json()
        assert older == {"embedding": expected[0]}
        refused = await client.post("/api/embed", json={"model": "fake", "input": "a" * 50, "truncate": False})
        assert refused.status_code == 400
    await engine.shutdown()


async def test_a_suffix_is_what_follows_a_gap(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "fill_in", FillInTokens(290, 291, 292, None, None, (293,)))
    core = FakeCore(say("x, y", 293))
    client = await connect(core)
    body = {"model": "fake", "prompt": "f(", "suffix": ")", "options": {"num_predict": 20}}
    whole = (await client.post("/api/generate", json=body | {"stream": False})).json()
    assert core.seen[0].prompt_token_ids == [BOS, 290, *b"f(", 291, *b")", 292]
    assert (whole["response"], whole["done_reason"]) == ("x, y", "stop")
    lines = [json.loads(line) for line in (await client.post("/api/generate", json=body)).text.splitlines()]
    assert "".join(line["response"] for line in lines) == "x, y"
    assert lines[-1]["done"]
    only = await client.post("/api/generate", json=body | {"prompt": "", "stream": False})
    assert only.json()["response"] == "x, y"


@pytest.mark.parametrize("changes", [{"pooling_type": "ALL"}, {"task": PoolingTask.CLASSIFY, "num_outputs": 3}])
async def test_a_model_that_makes_something_else_of_texts_makes_no_vectors(changes: dict[str, Any]) -> None:
    engine = make_engine(pooler=PoolerConfig(**({"pooling_type": "LAST", "normalize": False} | changes)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://test") as client:
        for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
            answer = await client.post(path, json={"model": "fake", field: "a"})
            assert (answer.status_code, "/pooling" in answer.json()["error"]) == (404, True)
    await engine.shutdown()
