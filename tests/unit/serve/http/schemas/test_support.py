"""Every field of every request has an effect, is refused by name, or is a hint that docs/compat.md lists."""

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from pydantic import BaseModel

from pagemill.config.facts import ModelFacts
from pagemill.config.pooler_config import PoolerConfig
from pagemill.errors import RequestError
from pagemill.serve.http.preparer import CHAT, COMPLETIONS, DETOKENIZE, EMBEDDINGS, TOKENIZE, Part, Preparer
from pagemill.serve.http.responses import ServedModel
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.completions import CompletionBody
from pagemill.serve.http.schemas.embeddings import EmbeddingBody
from pagemill.serve.http.schemas.support import IGNORED_FIELDS_HEADER, header_of
from pagemill.serve.http.schemas.tokenize import DetokenizeBody, TokenizeBody
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.serve.processing.input_processor import RequestOptions
from tests.fakes.engine import FACTS, make_engine
from tests.fakes.fake_tokenizer import ByteTokenizer
from tests.unit.serve.http.conftest import Connect

BODIES: dict[str, type[BaseModel]] = {
    CHAT: ChatBody, COMPLETIONS: CompletionBody, EMBEDDINGS: EmbeddingBody, TOKENIZE: TokenizeBody,
    DETOKENIZE: DetokenizeBody,
}  # fmt: skip
HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 9, "temperature": 1},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 9, "temperature": 1},
    EMBEDDINGS: {"input": "hi"},
    TOKENIZE: {"messages": HI},
    DETOKENIZE: {"tokens": [104]},
}
GENERATION: dict[str, Any] = {
    "model": "another", "max_tokens": 5, "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 1,
    "stop": "x", "stop_token_ids": [7], "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 1,
    "skip_special_tokens": False, "stream": True, "cache_salt": "s", "priority": 1, "echo": True,
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {"7": 5},
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a+"}, "guided_regex": "a+",
    "guided_json": {"type": "string"}, "guided_choice": ["a"], "guided_grammar": "start: \"a\"",
    "guided_whitespace_pattern": "_",
    "allowed_token_ids": [7, 8], "bad_words": ["no"],
    "repetition_detection": {"max_pattern_size": 4, "min_count": 3}, "vllm_xargs": {"x": 1},
    "use_beam_search": True, "length_penalty": 2.0,
    "prompt_logprobs": 1, "logprob_token_ids": [7], "return_tokens_as_token_ids": True, "return_token_ids": True,
    "detokenize": False,
}  # fmt: skip
WITH_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
EXAMPLES: dict[str, dict[str, Any]] = {
    CHAT: GENERATION
    | {
        "messages": HI[:1], "max_completion_tokens": 5, "add_generation_prompt": False, "add_special_tokens": True,
        "continue_final_message": True, "chat_template_kwargs": {"x": 1}, "reasoning_effort": "low",
        "include_reasoning": False, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
        "logprobs": True, "top_logprobs": 2, "thinking_token_budget": 5, "documents": [{"title": "t", "text": "x"}],
    },
    COMPLETIONS: GENERATION | {"prompt": "ho", "add_special_tokens": False, "logprobs": 1},
    EMBEDDINGS: {
        "input": "ho", "model": "another", "encoding_format": "base64", "dimensions": 2, "normalize": False,
        "use_activation": False, "truncate_prompt_tokens": 2, "truncation_side": "left",
        "add_special_tokens": False, "cache_salt": "s", "priority": 1,
        "messages": HI[:1], "add_generation_prompt": True, "continue_final_message": True,
        "chat_template_kwargs": {"x": 1},
    },
    TOKENIZE: {
        "model": "another", "prompt": "ho", "messages": HI[:1], "add_generation_prompt": False,
        "continue_final_message": True, "chat_template_kwargs": {"x": 1}, "reasoning_effort": "low", "tools": TOOLS,
        "add_special_tokens": True, "return_token_strs": True,
    },
    DETOKENIZE: {"model": "another", "tokens": [105]},
}  # fmt: skip
"""A value per declared field with which something else is run, or something else is answered, than without."""
WITH_OTHERS: dict[str, dict[str, Any]] = {
    "add_generation_prompt": {"messages": HI},
    "continue_final_message": {"messages": HI, "add_generation_prompt": True},
    "chat_template_kwargs": {"messages": HI},
    "truncation_side": {"input": "hi", "truncate_prompt_tokens": 2},
}
"""Bodies of embeddings for the fields that go with others only."""

OPENAI_AND_REFERENCE: dict[str, str] = {
    CHAT: """
        messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
        max_tokens metadata modalities n parallel_tool_calls prediction presence_penalty prompt_cache_key
        prompt_cache_retention
        reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options
        temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
        thinking_token_budget include_reasoning use_beam_search top_k min_p repetition_penalty length_penalty
        stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words echo
        add_generation_prompt continue_final_message add_special_tokens documents chat_template chat_template_kwargs
        mm_processor_kwargs media_io_kwargs structured_outputs priority request_id logits_processors
        return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params ec_transfer_params vllm_xargs best_of
        guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
        structural_tag stream_interval repetition_detection logprob_token_ids detokenize
    """,
    COMPLETIONS: """
        model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty length_penalty
        stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids prompt_logprobs prompt_embeds
        add_special_tokens response_format structured_outputs priority request_id return_tokens_as_token_ids
        return_token_ids cache_salt kv_transfer_params ec_transfer_params vllm_xargs logits_processors bad_words
        guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
        structural_tag stream_interval repetition_detection logprob_token_ids detokenize
    """,
    EMBEDDINGS: """
        input model encoding_format dimensions user messages add_special_tokens priority request_id normalize
        truncate_prompt_tokens embed_dtype endianness cache_salt mm_processor_kwargs use_activation truncation_side
    """,
    TOKENIZE: """
        model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message
        chat_template chat_template_kwargs mm_processor_kwargs tools
    """,
    DETOKENIZE: "model tokens",
}
"""The fields that clients of the reference and of OpenAI know."""


def parts(kind: str, body: dict[str, Any], facts: ModelFacts = FACTS) -> list[Part]:
    """What is run, and what is answered; ids and times, which differ anyway, left out."""
    pooler = PoolerConfig(pooling_type="LAST", normalize=True) if kind == EMBEDDINGS else None
    engine = make_engine(pooler=pooler, facts=facts)
    preparer = Preparer(engine.preparation, ServedModel("fake", 0), ParserSettings("qwen3", "hermes"))
    found = list(preparer.parts(kind, json.dumps(body).encode()))
    return [
        structs.replace(part, request=structs.replace(part.request, request_id="", arrival_time=0.0))
        if hasattr(part, "request")
        else part
        for part in found
    ]


DECLARED = [(kind, name) for kind, body in BODIES.items() for name in body.model_fields if name not in body.hints]
REFUSED = [(kind, name) for kind, body in BODIES.items() for name in body.refused]
HINTS = [(kind, name) for kind, body in BODIES.items() for name in body.hints]


@pytest.mark.parametrize(("kind", "name"), DECLARED)
def test_a_declared_field_has_an_effect(kind: str, name: str) -> None:
    plain = WITH_OTHERS.get(name, BASE[kind]) if kind == EMBEDDINGS else BASE[kind]
    if name == "stream_options":
        assert parts(kind, plain | WITH_STREAM) != parts(kind, plain | {"stream": True})
        return
    assert name in EXAMPLES[kind], f"say with which value {name} of {kind} has an effect"
    try:
        found = parts(kind, plain | {name: EXAMPLES[kind][name]})
    except RequestError as error:
        assert error.field == name  # it takes effect by what it excludes
    else:
        assert found != parts(kind, plain)


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_a_refused_field_is_refused_with_what_to_do_instead(kind: str, name: str) -> None:
    rule = BODIES[kind].refused[name]
    with pytest.raises(RequestError, match=name) as caught:
        parts(kind, BASE[kind] | {name: {"something": 1}})
    assert caught.value.field == name
    assert str(caught.value).endswith(rule.instead)
    for value in (None, *rule.neutral):
        assert parts(kind, BASE[kind] | {name: value}) == parts(kind, BASE[kind])


@pytest.mark.parametrize(("kind", "name"), HINTS)
def test_a_hint_is_accepted_and_changes_nothing(kind: str, name: str) -> None:
    assert parts(kind, BASE[kind] | {name: "x"}) == parts(kind, BASE[kind])


@pytest.mark.parametrize("kind", BODIES)
def test_what_clients_know_is_in_one_of_the_three_classes(kind: str) -> None:
    body = BODIES[kind]
    known = {*body.model_fields, *body.refused, *body.hints}
    assert set(OPENAI_AND_REFERENCE[kind].split()) <= known
    assert not set(body.refused) & {*body.model_fields, *body.hints}


def test_tools_are_accepted_where_none_is_to_be_called() -> None:
    given = {"tools": TOOLS, "tool_choice": "none"}
    assert parts(COMPLETIONS, BASE[COMPLETIONS] | given) == parts(COMPLETIONS, BASE[COMPLETIONS])
    with pytest.raises(RequestError, match="tools"):
        parts(COMPLETIONS, BASE[COMPLETIONS] | {"tools": TOOLS})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 3}), ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
])  # fmt: skip
async def test_unknown_fields_are_named_in_a_header(
    connect: Connect, path: str, body: dict[str, Any], stream: bool
) -> None:
    client = await connect()
    answer = await client.post(
        path, json=body | {"stream": stream, "new_one": 1, "é\r\nSet-Cookie: a": 2, "store": True}
    )
    assert answer.status_code == 200
    assert answer.headers[IGNORED_FIELDS_HEADER] == "new_one, ???Set-Cookie??a"
    assert IGNORED_FIELDS_HEADER not in (await client.post(path, json=body)).headers


async def test_variables_that_the_template_does_not_read_are_named_in_the_header(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(*names: str) -> None:
        monkeypatch.setattr(ByteTokenizer, "template_variables", lambda self, chat_template=None: frozenset(names))

    async def named(**fields: Any) -> str | None:
        answer = await client.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 3} | fields)
        assert answer.status_code == 200
        return answer.headers.get(IGNORED_FIELDS_HEADER)

    client = await connect()
    reads("messages", "thinking")
    assert await named(reasoning_effort="low") == "reasoning_effort"
    given = {"thinking": True, "other": 1, "reasoning_effort": "low"}
    unread = "chat_template_kwargs.other, chat_template_kwargs.reasoning_effort"
    assert set(str(await named(chat_template_kwargs=given)).split(", ")) == set(unread.split(", "))
    assert await named(unknown=1, reasoning_effort="low") == "unknown, reasoning_effort"
    assert await named(chat_template_kwargs={"thinking": False}) is None
    refused = await client.post("/v1/chat/completions", json={"messages": HI, "documents": [{"text": "x"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    assert await named(documents=[]) is None
    reads("messages", "thinking", "reasoning_effort")
    assert await named(reasoning_effort="low", chat_template_kwargs={"thinking": 1}) is None


@pytest.mark.parametrize("kind", [CHAT, COMPLETIONS])
def test_the_models_max_new_tokens_is_a_limit_of_every_request(kind: str) -> None:
    facts = replace(FACTS, generation_defaults={"max_new_tokens": 20})

    def most(**fields: Any) -> int:
        part = parts(kind, BASE[kind] | {"max_tokens": None} | fields, facts)[1]
        return part.request.params.max_tokens  # type: ignore[union-attr, return-value]

    assert most() == (20 if kind == CHAT else 16)
    assert most(max_tokens=7) == 7
    assert most(max_tokens=99) == 20
    with pytest.raises(RequestError, match="min_tokens=30 is not allowed: at most 20 tokens are generated") as caught:
        most(max_tokens=99, min_tokens=30)
    assert caught.value.field == "min_tokens"


def test_the_header_is_bounded() -> None:
    value = header_of([f"{index}" + "x" * 1000 for index in range(100_000)])
    assert len(value) < 1000
    assert value.endswith(", and 99984 more")


async def test_an_answer_in_a_chat_begins_with_the_message_that_it_continues(connect: Connect) -> None:
    client = await connect()
    body = {"messages": HI, "continue_final_message": True, "echo": True, "max_tokens": 3, "n": 2}
    plain = (await client.post("/v1/chat/completions", json=body | {"echo": False})).json()
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    for before, after in zip(plain["choices"], whole["choices"], strict=True):
        assert after["message"]["content"] == "ho" + before["message"]["content"]
    lines = (await client.post("/v1/chat/completions", json=body | {"stream": True})).text
    assert lines.count('"content":"ho"') == 2
    of_user = (
        await client.post("/v1/chat/completions", json={"messages": HI[:1], "echo": True, "max_tokens": 3})
    ).json()
    assert not of_user["choices"][0]["message"]["content"].startswith("hi")


def test_the_tokenizers_own_first_token() -> None:
    tokenize = make_engine().preparation.inputs
    assert RequestOptions().add_special_tokens
    for kind, with_bos in ((CHAT, True), (COMPLETIONS, True), (CHAT, False), (COMPLETIONS, False)):
        request = parts(kind, BASE[kind] | {"add_special_tokens": with_bos})[1].request  # type: ignore[union-attr]
        assert (request.prompt_token_ids[0] == tokenize._tokenizer.bos_token_id) is with_bos
