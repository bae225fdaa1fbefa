"""POST /infill: what stands in a gap, as llama.cpp's clients ask."""

import json
from typing import Any

import httpx
import pytest

from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.tokenizers.fill_in import FillInTokens
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import BOS, ByteTokenizer
from tests.fakes.narrow import sampling_of
from tests.unit.serve.http.conftest import Connect

TOKENS = FillInTokens(290, 291, 292, None, None, (293,))
GAP = {"input_prefix": "a(", "input_suffix": ")"}


class Recorder(FakeCore):
    """Keeps what it is asked."""

    def __init__(self, text: str, *more: int) -> None:
        self.seen: list[EngineCoreRequest] = []
        answer = say(text, *more)
        super().__init__(lambda request: (self.seen.append(request), answer(request))[1])


@pytest.fixture(autouse=True)
def fills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "fill_in", TOKENS)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]


async def test_without_tokens_for_it(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "fill_in", None)
    answer = await (await connect()).post("/infill", json=GAP)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_supported")
    assert "<|fim_prefix|>" in answer.json()["error"]["message"]


async def test_whole(connect: Connect) -> None:
    core = Recorder("x,\ny", 293)
    client = await connect(core)
    answer = (await client.post("/infill", json=GAP | {"prompt": "x", "return_tokens": True, "n_predict": 20})).json()
    assert core.seen[0].prompt_token_ids == [BOS, 290, *b"a(", 291, *b")", 292, *b"x"]
    assert (answer["content"], answer["tokens"]) == ("x,\ny", [*b"x,\ny", 293])
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "eos", "")
    assert (answer["has_new_line"], answer["truncated"], answer["prompt"]) == (True, False, "<s>a()x")
    assert (answer["tokens_evaluated"], answer["tokens_predicted"], answer["tokens_cached"]) == (8, 5, 13)
    assert answer["timings"]["predicted_n"] == 5
    assert answer["timings"]["prompt_ms"] > 0
    assert answer["generation_settings"]["n_predict"] == 20


async def test_streamed_is_the_same(connect: Connect) -> None:
    client = await connect(Recorder("x, y", 293))
    whole = (await client.post("/infill", json=GAP)).json()
    answer = await client.post("/infill", json=GAP | {"stream": True})
    events = events_of(answer)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "".join(event["content"] for event in events) == whole["content"] == "x, y"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    changing = ("content", "timings", "generation_settings")
    assert all(events[-1][name] == whole[name] for name in whole if name not in changing)


async def test_how_it_is_sampled(connect: Connect) -> None:
    core = Recorder("xyz")
    client = await connect(core)
    options = {
        "n_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 11, "stop": ["z"],
        "repeat_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.75,
        "logit_bias": [[5, False], [6, 2.5]],
    }  # fmt: skip
    answer = (await client.post("/infill", json=GAP | options)).json()
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("xy", "word", "z")
    params = sampling_of(core.seen[0])
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (7, 0.5, 3, 0.9, 0.1)
    assert (params.seed, params.repetition_penalty, params.presence_penalty) == (11, 1.5, 0.25)
    assert (params.frequency_penalty, params.logit_bias) == (0.75, {5: -100.0, 6: 2.5})
    assert 293 in (params.stop_token_ids or ())
    for n_predict in (-1, 10_000):
        assert (await client.post("/infill", json=GAP | {"n_predict": n_predict})).status_code == 200
    assert sampling_of(core.seen[-1]).max_tokens == 256 - len(core.seen[-1].prompt_token_ids)


async def test_a_prompt_alone(connect: Connect) -> None:
    """As editors send to have it in the cache before they ask."""
    core = Recorder("xyz")
    client = await connect(core)
    answer = (await client.post("/infill", json=GAP | {"n_predict": 0, "return_tokens": True})).json()
    assert (answer["content"], answer["tokens"], answer["tokens_predicted"]) == ("", [], 0)
    assert sampling_of(core.seen[0]).max_tokens == 1


async def test_fields_that_are_asked_for(connect: Connect) -> None:
    client = await connect(Recorder("xyz"))
    fields = ["content", "timings/prompt_n", "truncated", "no/such"]
    answer = (await client.post("/infill", json=GAP | {"n_predict": 3, "response_fields": fields})).json()
    assert answer == {"content": "xyz", "prompt_n": 7, "truncated": False}


async def test_what_does_not_fit_is_cut(connect: Connect) -> None:
    core = Recorder("xyz")
    client = await connect(core)
    extra = [{"filename": "f", "text": "e" * 500}]
    body = {"input_prefix": "a" * 1000 + "b", "input_suffix": "c" + "d" * 1000, "input_extra": extra, "n_predict": 56}
    answer = (await client.post("/infill", json=body)).json()
    prompt = core.seen[0].prompt_token_ids
    assert (len(prompt), answer["truncated"]) == (200, True)
    assert prompt[prompt.index(291) - 1 : prompt.index(291) + 2] == [ord("b"), 291, ord("c")]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 3}, "input_suffix"),
        ({"input_extra": "file"}, "input_extra"),
        ({"input_extra": [{"filename": "f"}]}, "input_extra"),
        ({"input_extra": [{"text": ""}] * 1025}, "input_extra"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a" * 300}, "prompt"),
        ({"n_predict": -3}, "n_predict"),
        ({"temperature": -1}, "temperature"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"logit_bias": [[5, True]]}, "logit_bias"),
        ({"logit_bias": [["word", 1]]}, "logit_bias"),
        ({"mirostat": 2}, "mirostat"),
        ({"n_probs": 3}, "n_probs"),
        ({"grammar": "root ::= 'a'", "json_schema": {}}, "grammar"),
        ({"grammar": "not a grammar"}, "grammar"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"model": "other"}, "model"),
    ],
)
async def test_bad_input_is_named(connect: Connect, changes: dict[str, Any], field: str) -> None:
    answer = await (await connect()).post("/infill", json=GAP | changes)
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == field


async def test_what_editors_send_besides(connect: Connect) -> None:
    """The rest of what llama.vim sends: what cannot matter is accepted, and what has no effect is named."""
    client = await connect(Recorder("xyz"))
    more = {"cache_prompt": True, "id_slot": 0, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "n_indent": 4}
    answer = await client.post("/infill", json=GAP | more | {"samplers": ["top_k", "top_p", "infill"]})
    assert answer.status_code == 200
    assert answer.headers["x-pagemill-ignored-fields"] == "t_max_predict_ms, n_indent, samplers"
