"""Structured output on the embedded model: at temperature 1.5, every output that is finished has its form."""

import json
import re

import jsonschema
import pytest

from pagemill import LLM, SamplingParams
from pagemill.errors import RequestError
from pagemill.messages.structured_outputs import StructuredOutputsParams

pytestmark = [pytest.mark.slow, pytest.mark.model]
ANIMAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
        "owner": {"oneOf": [{"type": "null"}, {"type": "string", "maxLength": 8}]},
    },
    "required": ["name", "age", "kind", "tags", "owner"],
    "additionalProperties": False,
}
NESTED = {"type": "array", "items": {"type": "object", "required": ["x"], "properties": {"x": {"type": "boolean"}},
          "additionalProperties": False}, "minItems": 1, "maxItems": 2}  # fmt: skip
HOT = SamplingParams(temperature=1.5, max_tokens=160)


@pytest.fixture(scope="module")
def llm(smollm2_path):
    return LLM(str(smollm2_path), max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def ahead(smollm2_path):
    """Steps are scheduled ahead of tokens that are being sampled."""
    return LLM(str(smollm2_path), max_model_len=512, max_num_seqs=4, async_scheduling=True)


def hot(seed, **form):
    return HOT.replace(seed=seed, structured_outputs=StructuredOutputsParams(disable_any_whitespace=True, **form))


def completions(llm, params):
    return [output.outputs[0] for output in llm.generate(["Tell me:"] * len(params), params, use_tqdm=False)]


@pytest.mark.parametrize("engine", ["llm", "ahead"])
def test_structured_outputs_have_their_form(request, engine):
    """With free requests beside them, more of them than slots."""
    schemas = [ANIMAL, NESTED, ANIMAL]
    params = [hot(seed, json=schema) for seed, schema in enumerate(schemas)] + [HOT.replace(max_tokens=8)]
    found = completions(request.getfixturevalue(engine), params)
    finished = [(one, schema) for one, schema in zip(found, schemas, strict=False) if one.finish_reason == "stop"]
    assert finished
    for one, schema in finished:
        jsonschema.validate(json.loads(one.text), schema)
    assert found[-1].finish_reason in ("length", "stop")


def test_structured_outputs_do_not_depend_on_steps_scheduled_ahead(llm, ahead):
    params = [hot(seed, json=schema) for seed, schema in enumerate([ANIMAL, NESTED, ANIMAL])]
    params += [hot(7, regex="[0-9]{20}"), hot(8, choice=["perhaps", "perhaps not"])]
    expected = [one.token_ids for one in completions(llm, params)]
    assert [one.token_ids for one in completions(ahead, params)] == expected


def test_structured_outputs_survive_preemption(smollm2_path):
    """Three outputs of up to 100 tokens share a cache of 176, and are those that each has for itself."""
    llm = LLM(str(smollm2_path), max_model_len=112, max_num_seqs=3, num_gpu_blocks_override=12, block_size=16)
    params = [
        hot(seed, json={"type": "array", "items": {"type": "integer"}, "minItems": 60}).replace(max_tokens=90)
        for seed in range(3)
    ]
    together = [one.token_ids for one in completions(llm, params)]
    assert together == [completions(llm, [alone])[0].token_ids for alone in params]


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"regex": r"[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"grammar": 'root ::= "<" [a-z] [a-z]? ">"'}, "<[a-z][a-z]?>"),
        ({"structural_tag": {"format": {"type": "tag", "begin": "<a>", "end": "</a>",
                                        "content": {"type": "regex", "pattern": "[0-9]{2}"}}}}, "<a>[0-9]{2}</a>"),
    ],
)  # fmt: skip
def test_structured_kinds(llm, form, pattern):
    for one in completions(llm, [hot(seed, **form) for seed in range(3)]):
        assert one.finish_reason == "stop"
        assert re.fullmatch(pattern, one.text)


@pytest.mark.parametrize("fields", [{}, {"stop": ["-zz"]}])
def test_structured_outputs_after_a_prompt_that_ends_within_a_character(llm, fields):
    """Its last bytes, which no form completes, are none of the output's."""
    whole = llm.get_tokenizer().encode("Number \U0001d539", add_special_tokens=False)
    prompts = [{"prompt_token_ids": whole[: len(whole) - count]} for count in (1, 2, 3)]
    params = hot(3, regex="[0-9]{3}-[a-f]{2}").replace(**fields)
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert re.fullmatch("[0-9]{3}-[a-f]{2}", output.outputs[0].text)


def test_structured_outputs_are_the_same_alone_and_together(llm):
    params = [hot(seed, json=NESTED) for seed in range(3)]
    together = [one.token_ids for one in completions(llm, params)]
    assert together == [completions(llm, [alone])[0].token_ids for alone in params]


def test_structured_outputs_begin_after_reasoning(llm):
    params = hot(1, choice=["A", "B"], free_until="<|im_end|>").replace(max_tokens=40, skip_special_tokens=False,
                                                                        logit_bias={2: 6.0})  # fmt: skip
    (one,) = completions(llm, [params])
    _, mark, answer = one.text.partition("<|im_end|>")
    assert answer in ("A", "B") if mark and one.finish_reason == "stop" else len(one.token_ids) <= 40


def test_structured_outputs_with_logprobs(llm):
    params = hot(5, choice=["a long forced answer"]).replace(logprobs=0)
    (one,) = completions(llm, [params])
    assert one.text == "a long forced answer"
    assert len(one.logprobs) == len(one.token_ids)


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(a{1,300}){300}"},
        {"json": {"type": "string", "not": {"pattern": "x"}}},
        {"json": {"enum": ["x" * 1_000_000]}},
        {"grammar": "start: start"},
    ],
)
def test_structured_forms_that_cannot_be_followed_are_refused(llm, form):
    with pytest.raises(RequestError):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(**form)), use_tqdm=False)
    assert completions(llm, [SamplingParams(max_tokens=2)])[0].token_ids
