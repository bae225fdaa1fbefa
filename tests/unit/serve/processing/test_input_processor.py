"""Admission: what is refused, with which words, and what is filled in."""

from http import HTTPStatus
from typing import Any

import msgspec
import pytest

from pagemill.errors import ModelError, RequestError
from pagemill.messages.engine_io import EngineReady
from pagemill.messages.sampling_params import MAX_BANNED_SEQUENCES, SamplingParams
from pagemill.serve.processing.checks import MAX_PROMPT_LOGPROBS
from pagemill.serve.processing.input_processor import InputProcessor, PreparedRequest, RequestOptions
from pagemill.tokenizers.control_text import MARK
from tests.fakes.fake_tokenizer import BOS, EOS, IM_END, ByteTokenizer

READY = EngineReady(max_model_len=32, vocab_size=300, num_blocks=8, block_size=16)


class Number(int):
    """Which no message to the engine can hold."""


def prepare(prompt: Any = "hi", has_priorities: bool = False, **given: Any) -> PreparedRequest:
    option_names = ("priority", "cache_salt", "add_special_tokens", "clamp_max_tokens", "rendered")
    options = RequestOptions(**{name: given.pop(name) for name in option_names if name in given})
    processor = InputProcessor(ByteTokenizer(), READY, (EOS, IM_END), has_priorities)
    return processor.prepare(prompt, SamplingParams(**given), options)


@pytest.mark.parametrize(("given", "field", "words"), [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": "x" * 31}, "prompt", "has 32 tokens, at most 31 fit"),
    ({"prompt": [1] * 32}, "prompt", "has 32 tokens, at most 31 fit"),
    ({"prompt": "x" * 3000}, "prompt", "has 3000 characters"),
    ({"prompt": [1, -1]}, "prompt", "token id -1 "),
    ({"prompt": [1, 300]}, "prompt", "token id 300 in the prompt is not allowed: 0 to 299"),
    ({"prompt": [1, 10**5000]}, "prompt", "a number of"),
    ({"prompt": [1, 2.0]}, "prompt", "2.0 in the prompt is not an integer"),
    ({"prompt": [1, True]}, "prompt", "True in the prompt is not an integer"),
    ({"prompt": [1, "2"]}, "prompt", "'2' in the prompt is not an integer"),
    ({"prompt": [1, Number(2)]}, "prompt", "2 in the prompt is not an integer"),
    ({"prompt": [1, HTTPStatus.OK]}, "prompt", "HTTPStatus.OK: 200> in the prompt is not an integer"),
    ({"prompt": 5}, "prompt", "5; it must be a text or a list"),
    ({"prompt": {"prompt": "a", "prompt_token_ids": [1]}}, "prompt", "dict"),
    ({"prompt": {"promt": "a"}}, "prompt", "promt"),
    ({"prompt": "\ud800"}, "prompt", "Unicode"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "300; token ids are 0 to 299"),
    ({"stop": "\ud800"}, "stop", "Unicode"),
    ({"bad_words": ["\ud800"]}, "bad_words", "Unicode"),
    ({"bad_words_token_ids": [[1, 300]]}, "bad_words_token_ids", "300; token ids are 0 to 299"),
    ({"allowed_token_ids": [1, 300]}, "allowed_token_ids", "300; token ids are 0 to 299"),
    ({"logit_bias": {300: 1.0}}, "logit_bias", "300; token ids are 0 to 299"),
    ({"max_tokens": 30}, "max_tokens", "max_tokens=30 is too large: the prompt has 3 tokens, so at most 29"),
    ({"max_tokens": None, "min_tokens": 30}, "min_tokens", "at most 29 tokens"),
    ({"cache_salt": ""}, "cache_salt", "1 to 128 characters"),
    ({"cache_salt": "a/b"}, "cache_salt", "'a/b'"),
    ({"cache_salt": "x" * 129}, "cache_salt", "1 to 128 characters"),
    ({"cache_salt": "abc\n"}, "cache_salt", "1 to 128 characters"),
    ({"priority": 1}, "priority", "--scheduling-policy priority"),
    ({"priority": True}, "priority", "an integer"),
    ({"priority": 2**40, "has_priorities": True}, "priority", "an integer"),
])  # fmt: skip
def test_refused(given: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError) as raised:
        prepare(**given)
    assert raised.value.field == field
    assert words in str(raised.value)
    assert len(str(raised.value)) < 300


def test_as_many_stop_tokens_as_allowed_leave_room_for_the_models_own() -> None:
    ready = EngineReady(max_model_len=32, vocab_size=3000, num_blocks=8, block_size=16)
    processor = InputProcessor(ByteTokenizer(), ready, (EOS, IM_END), False)
    prepared = processor.prepare("hi", SamplingParams(stop_token_ids=range(300, 1324)), RequestOptions())
    assert len(prepared.request.params.stop_token_ids) == 1026
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(prepared.request), type=type(prepared.request))
    with pytest.raises(RequestError, match="1025 ids; at most 1024 are allowed"):
        processor.prepare("hi", SamplingParams(stop_token_ids=range(300, 1325)), RequestOptions())


def test_a_model_with_any_number_of_ends_is_refused() -> None:
    ready = EngineReady(max_model_len=32, vocab_size=300, num_blocks=8, block_size=16)
    with pytest.raises(ModelError, match="65 end-of-sequence tokens; at most 64"):
        InputProcessor(ByteTokenizer(), ready, tuple(range(65)), False)


def test_marks_of_a_rendered_text_are_for_the_tokenizer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def encode(self: Any, text: str, add_special_tokens: bool = True, *, rendered: bool = False) -> list[int]:
        seen.append((text, add_special_tokens, rendered))
        return [1]

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    text = f"[user]<{MARK}s>"
    assert prepare(text, add_special_tokens=False, rendered=True).prompt == "[user]<s>"
    assert prepare(text).prompt == text
    assert seen == [(text, False, True), (text, True, False)]


def test_a_text_far_too_long_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    with pytest.raises(RequestError, match="cannot fit"):
        prepare("x" * 100_000)


@pytest.mark.parametrize("prompt", ["hi", [BOS, 104, 105], {"prompt": "hi"}, {"prompt_token_ids": [BOS, 104, 105]}])
def test_forms_of_a_prompt(prompt: Any) -> None:
    prepared = prepare(prompt)
    assert prepared.request.prompt_token_ids == [BOS, 104, 105]
    assert prepared.prompt == ("hi" if "hi" in str(prompt) else None)


def test_rendered_chats_have_their_special_tokens_already() -> None:
    assert prepare("hi", add_special_tokens=False).request.prompt_token_ids == [104, 105]


def test_longest_prompt_leaves_room_for_one_token() -> None:
    assert prepare([1] * 31, max_tokens=None).request.params.max_tokens == 1


def test_room_is_filled_in_or_clamped_to() -> None:
    assert prepare(max_tokens=None).request.params.max_tokens == 29
    assert prepare(max_tokens=500, clamp_max_tokens=True).request.params.max_tokens == 29


def test_end_of_sequence_is_a_stop_token_unless_ignored() -> None:
    assert prepare(stop_token_ids=[7]).request.params.stop_token_ids == (7, EOS, IM_END)
    assert prepare(stop_token_ids=[7], ignore_eos=True).request.params.stop_token_ids == (7,)


def test_seeds_are_kept() -> None:
    assert prepare(seed=5).request.params.seed == 5
    assert prepare(seed=-1).request.params.seed == 2**64 - 1


def test_ids_are_unique() -> None:
    assert prepare().request.request_id != prepare().request.request_id


def test_priority_and_salt_travel() -> None:
    request = prepare(priority=-3, has_priorities=True, cache_salt="team-a:1").request
    assert (request.priority, request.cache_salt) == (-3, "team-a:1")


def test_bad_words_become_tokens_with_and_without_a_blank_before() -> None:
    processor = InputProcessor(ByteTokenizer(), READY, (EOS, IM_END), False)
    params = SamplingParams(bad_words=["no", " so"], bad_words_token_ids=[[7]])
    found = processor.prepare("hi", params, RequestOptions()).request.params
    assert isinstance(found, SamplingParams)
    tokens = [tuple(processor._tokenizer.encode(text, False)) for text in ("no", " no", " so")]
    assert found.bad_words_token_ids == ((7,), *tokens)
    again = processor.prepare("hi", found, RequestOptions()).request.params
    assert again == found.replace(seed=again.seed)


def test_bad_words_and_banned_tokens_are_few_together() -> None:
    banned = [[token % 200, token // 200] for token in range(MAX_BANNED_SEQUENCES - 1)]
    with pytest.raises(RequestError, match=f"{MAX_BANNED_SEQUENCES + 1} entries") as caught:
        prepare(bad_words=["no"], bad_words_token_ids=banned)
    assert caught.value.field == "bad_words_token_ids"


def test_log_probabilities_of_a_prompt_fit_into_a_message() -> None:
    most = MAX_PROMPT_LOGPROBS // 301  # tokens, each with the whole vocabulary
    ready = EngineReady(max_model_len=most + 20, vocab_size=300, num_blocks=8, block_size=16, max_logprobs=-1)
    processor = InputProcessor(ByteTokenizer(), ready, (EOS, IM_END), False)
    params = SamplingParams(prompt_logprobs=-1)
    fits = processor.prepare([5] * most, params, RequestOptions()).request.params
    assert isinstance(fits, SamplingParams)
    assert fits.prompt_logprobs == 300
    with pytest.raises(RequestError, match=f"prompt of {most + 1} tokens") as caught:
        processor.prepare([5] * (most + 1), params, RequestOptions())
    assert caught.value.field == "prompt_logprobs"
