"""Values that make no sense, over HTTP and in `LLM`: a 400 or a ValueError that names the field, the value and what is
allowed, at once, while a neighbour's stream goes on as if nothing had happened."""

import concurrent.futures
import json
import time
from typing import Any

import httpx
import pytest

from pagemill import LLM, SamplingParams
from pagemill.errors import RequestError
from tests.fakes.tiny_checkpoint import VOCAB_SIZE, make_checkpoint
from tests.integration.server_process import running_server

NAN, INF = float("nan"), float("inf")
NUMBERS = {
    "temperature": [-0.1, 10**400, NAN, INF, -INF, "1", True, [1]],
    "top_p": [0, -0.1, 1.0001, NAN, INF, "1"],
    "min_p": [-0.1, 1.1, NAN, INF],
    "presence_penalty": [-2.1, 2.1, NAN, INF],
    "frequency_penalty": [-2.1, 2.1, NAN, INF],
    "repetition_penalty": [0, -1, 101, 1e300, NAN, INF],
    "top_k": [-2, 2**31, 1.5, NAN, 10**4000],
    "n": [0, -1, 65, 10**9, 1.5],
    "seed": [2**64, -(2**63) - 1, 10**4000, 1.5, NAN],
    "max_tokens": [-1, 10**9, 1.5, INF, 10**4000],
    "min_tokens": [-1, 2**31, 10**9, 1.5],
}
LISTS: dict[str, list[Any]] = {
    "stop": [5, [5], [""], ["x"] * 10_000, ["x" * 5000], ["\ud800"], {"a": 1}],
    "stop_token_ids": [[-1], [VOCAB_SIZE], [2**40], ["1"], [1.0], [True], [1] * 5000, 5],
    "allowed_token_ids": [[], [-1], [VOCAB_SIZE], [2**40], ["1"], [1] * 20_000, 5],
    "bad_words": ["no", [""], [5], ["x"] * 10_000, ["x" * 5000], ["\ud800"], 5],
    "repetition_detection": [
        {"max_pattern_size": 5}, {"max_pattern_size": -1, "min_count": 2}, {"max_pattern_size": 10**9, "min_count": 2},
        {"max_pattern_size": 5, "min_count": 1}, {"max_pattern_size": 5, "min_count": NAN}, {"x": 1}, 5, "on",
    ],
}  # fmt: skip
BIASES: list[Any] = [
    {5: 100.5}, {5: NAN}, {5: INF}, {5: "1"}, {5: None}, {-5: 1}, {VOCAB_SIZE: 1}, {2**40: 1},
    dict.fromkeys(range(100_000), 1.5), [5], 5,
]  # fmt: skip
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 2, "temperature": 0}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("min_tokens", {"min_tokens": 600}),
    ("allowed_token_ids", {"allowed_token_ids": [2], "min_tokens": 1}),
    ("allowed_token_ids", {"allowed_token_ids": [68], "bad_words": ["b"]}),
    ("vllm_xargs", {"vllm_xargs": {"x": 1}}),
    ("vllm_xargs", {"vllm_xargs": {"x": NAN}}),
    ("vllm_xargs", {"vllm_xargs": dict.fromkeys(map(str, range(100)), 1)}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: value}) for table in (NUMBERS, LISTS) for name, values in table.items() for value in values),
    *(("logit_bias", {"logit_bias": bias}) for bias in BIASES),
    *TOGETHER,
]
"""(the field at fault, what is sent)."""
BAD_SCHEMA = {"type": "string", "not": {"pattern": "x"}}
FORM = {"structured_outputs": {"choice": ["a"]}}
OF_THE_API: list[tuple[str, dict[str, Any]]] = [
    *(("prompt_logprobs", {"prompt_logprobs": count}) for count in (-2, 21, 10**9, 1.5, NAN)),
    *(("logprob_token_ids", {"logprob_token_ids": ids}) for ids in ([-1], [VOCAB_SIZE], [2**40], [1.5], [1] * 5000, 5)),
    *(("priority", {"priority": number}) for number in (1, 2**31, 10**4000, 1.5, NAN, "1")),
    *(("cache_salt", {"cache_salt": salt}) for salt in ("", "a/b", "x" * 129, 5)),
    *(("length_penalty", {"length_penalty": number}) for number in (2, NAN, INF, "1")),
    ("response_format", {"response_format": {"type": "xml"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD_SCHEMA}}}),
    ("response_format", {"response_format": {"type": "structural_tag", "format": {"type": "unknown"}}}),
    ("guided_json", {"guided_json": BAD_SCHEMA}),
    ("guided_json", {"guided_json": "{"}),
    ("guided_json", {"guided_json": {"enum": ["x" * 1_000_000]}}),
    ("guided_regex", {"guided_regex": "(a{1,300}){300}"}),
    ("guided_regex", {"guided_regex": "("}),
    ("guided_choice", {"guided_choice": []}),
    ("guided_choice", {"guided_choice": ["a"] * 5000}),
    ("guided_grammar", {"guided_grammar": "start: nowhere"}),
    ("guided_grammar", {"guided_grammar": "start: start"}),
    ("guided_whitespace_pattern", {"guided_json": {}, "guided_whitespace_pattern": "x" * 1000}),
    ("guided_whitespace_pattern", {"guided_choice": ["a"], "guided_whitespace_pattern": "x"}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs", {"structured_outputs": {"choice": 5}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "free_until": [-1]}}),
    ("structured_outputs", {"structured_outputs": {"json": {"minimum": NAN, "type": "integer"}}}),
    ("structured_outputs", {"structured_outputs": {"grammar": "start: nowhere"}}),
    ("structured_outputs", {"response_format": {"type": "json_object"}, **FORM}),
    ("guided_regex", {"guided_json": {}, "guided_regex": "a"}),
    ("ignore_eos", {"ignore_eos": True, **FORM}),
    ("allowed_token_ids", {"allowed_token_ids": [5], **FORM}),
    ("use_beam_search", {"use_beam_search": True, **FORM}),
]
"""The same, of the HTTP API alone."""
NEUTRAL = {"max_tokens": 8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM"))


def long_answer(url):
    """What a neighbour is told meanwhile."""
    body = {"prompt": "abcdef", "max_tokens": 400, "ignore_eos": True, "seed": 3, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        return "".join(
            json.loads(line[6:])["choices"][0]["text"] for line in answer.iter_lines() if line.startswith("data: {")
        )


def test_over_http(checkpoint):
    with running_server(checkpoint, "--dtype", "float32", "--cpu-threads", "1") as server:
        undisturbed = long_answer(server.url)
        with concurrent.futures.ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=300) as client:
            neighbour = pool.submit(long_answer, server.url)
            for path, prompt in (
                ("/v1/completions", {"prompt": "ab"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
            ):
                for field, sent in BAD + OF_THE_API:
                    began = time.monotonic()
                    raw = json.dumps({**prompt, **NEUTRAL, **sent})
                    answer = client.post(path, content=raw, headers={"content-type": "application/json"})
                    assert (answer.status_code, field) == (400, field), raw[:200]
                    error = answer.json()["error"]
                    if "\\ud8" not in raw:  # which is no JSON
                        assert error["param"] == field, (raw[:200], error)
                        assert field in error["message"], (raw[:200], error)
                    assert len(error["message"]) < 600
                    assert time.monotonic() - began < 20
                if neighbour.done():
                    assert neighbour.result() == undisturbed
                    neighbour = pool.submit(long_answer, server.url)
            assert neighbour.result() == undisturbed
            assert client.get("/health").status_code == 200


def test_in_llm(checkpoint):
    neighbour = SamplingParams(temperature=0.8, seed=3, max_tokens=16, ignore_eos=True)
    with LLM(checkpoint, dtype="float32", cpu_threads=1) as llm:
        before = llm.generate("abcdef", neighbour, use_tqdm=False)[0].outputs[0].token_ids
        for field, sent in BAD:
            given = {"extra_args" if name == "vllm_xargs" else name: value for name, value in sent.items()}
            if sent.get("max_tokens") == 10**9:
                continue  # offline, a max_tokens beyond the room means the room
            with pytest.raises(RequestError) as caught:
                params = [neighbour, SamplingParams(**(NEUTRAL | given))]
                llm.generate(["abcdef", "ab"], params, use_tqdm=False)
            assert caught.value.field == field, (str(given)[:200], caught.value)
            assert field in str(caught.value), (str(given)[:200], caught.value)
            assert len(str(caught.value)) < 600
        assert llm.generate("abcdef", neighbour, use_tqdm=False)[0].outputs[0].token_ids == before
