"""Forced tokens, with and without jump-forward: the same bytes as the tokenizer would write them, the same greedy text,
fewer steps, and outputs that have their form, on the embedded model and on random weights. The whole corpus is
benchmarks/jump_forward.py's."""

import json
import random

import pytest

from benchmarks.jump_forward import COMPACT, FINAL_ONLY, LAYOUTS, corpus, invalid, run, same_text
from pagemill import LLM, SamplingParams
from pagemill.grammar.backends.guidance import GuidanceBackend
from pagemill.grammar.translate import translated
from pagemill.grammar.vocabulary import token_table
from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.tokenizers.load import load_tokenizer
from tests.conformance.test_structured_corpus import TOO_COMPLEX, texts_of
from tests.conformance.test_structured_corpus import corpus as corpus_with_values
from tests.fakes.schema_order import in_schema_order
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.model]
MOST_DIFFERENT = 0.05
FEWER_STEPS = 0.2
AHEAD = 200
"""Bytes that are tokenized at a time."""
MOST_COMPARED = 16
"""Tokens of a stretch that are compared: no byte behind those makes a difference for them."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=96, output_kind=FINAL_ONLY)
HOT = SamplingParams(temperature=1.5, max_tokens=96, output_kind=FINAL_ONLY)
PERSON = {
    "type": "object",
    "properties": {"first_name": {"enum": ["Ada", "Alan"]}, "kind_of_person": {"const": "a computer scientist"}},
    "required": ["first_name", "kind_of_person"],
    "additionalProperties": False,
}


def forced_in(text, matcher, tokenizer, tokens, choose):
    """How many tokens are forced while a text is followed. Where none is, `choose` takes one of those that the rest
    begins with; the tokenizer's is the first."""
    left = text.encode()
    num_forced = 0
    while left:
        written = tokenizer.encode(left[:AHEAD].decode(errors="ignore"), add_special_tokens=False)
        found = matcher.forced()
        if found:
            assert found[:MOST_COMPARED] == written[: len(found)][:MOST_COMPARED]
            num_forced += len(found)
        else:
            sizes = [size for size in range(1, 12) if left[:size] in tokens]
            found = [choose([written[0], *(tokens[left[:size]] for size in sizes if begins_text(left[size:]))])]
        while True:
            assert matcher.accept(found) == len(found)
            left = left[sum(len(tokenizer.token_bytes(token)) for token in found) :]
            if begins_text(left):
                break
            found = [tokens[left[:1]]]
    assert matcher.complete
    return num_forced


def begins_text(data):
    """Whether the bytes do not begin inside a character."""
    return data[:1] < b"\x80" or data[:1] >= b"\xc0"


@pytest.mark.parametrize("choose", [lambda tokens: tokens[0], random.Random(0).choice], ids=["whole", "split"])
def test_structured_forced_tokens_are_those_that_the_tokenizer_writes(smollm2_path, choose):
    """Also where the tokens before are others than those that it would write."""
    tokenizer = load_tokenizer(smollm2_path)
    table = token_table(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    vocabulary = GuidanceBackend(table, tokenizer)
    tokens = {text: token for token, text in enumerate(table.tokens) if token not in table.special}
    num_forced = 0
    for entry in corpus_with_values():
        if entry["name"] in TOO_COMPLEX:
            continue
        try:
            matcher = vocabulary.matcher(translated(StructuredOutputsParams(json=entry["schema"])))
        except ValueError:
            continue
        values = [in_schema_order(test["data"], entry["schema"]) for test in entry["tests"] if test["valid"]]
        for text in {text for value in values for text in texts_of(value)}:
            num_forced += forced_in(text, matcher.copy(), tokenizer, tokens, choose)
    assert num_forced > 5000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_structured_greedy_text_is_that_without_in_fewer_steps(layout):
    schemas = corpus(every=6)
    without, found = (run("smollm2", schemas, GREEDY, LAYOUTS[layout], jump=jump) for jump in (False, True))
    names = found.outputs
    assert without.num_sampled(names) == without.num_tokens(names)
    others = [name for name, one in found.outputs.items() if not same_text(one, without.outputs[name])]
    assert len(others) <= MOST_DIFFERENT * len(found.outputs), others
    if layout == "compact":
        done = found.finished()
        assert found.num_sampled(done) <= (1 - FEWER_STEPS) * found.num_tokens(done)
    assert not invalid(schemas, found.finished() | without.finished())


@pytest.mark.parametrize("jump", [True, False])
def test_structured_outputs_at_a_high_temperature_have_their_form(jump):
    schemas = corpus(every=4)
    found = run("smollm2", schemas, HOT, COMPACT, jump=jump).finished()
    assert len(found) > 20
    assert not invalid(schemas, found)


@pytest.mark.parametrize("jump", [True, False])
def test_structured_outputs_of_random_weights_have_their_form(tmp_path, jump):
    path = make_checkpoint(tmp_path, "LlamaForCausalLM")
    schemas = corpus(every=2)
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 512}
    found = run(str(path), schemas, HOT.replace(max_tokens=400), COMPACT, jump=jump, **settings).finished()
    assert len(found) > 20
    assert not invalid(schemas, found)


def test_structured_outputs_with_logprobs_are_forced_too():
    """The text is the same, and each token has its log-probability."""
    schemas = corpus(every=12)
    plain, scored = (run("smollm2", schemas, GREEDY.replace(logprobs=asked), COMPACT, jump=True) for asked in (None, 1))
    assert scored.num_sampled(done := scored.finished()) <= (1 - FEWER_STEPS) * scored.num_tokens(done)
    others = [name for name, one in scored.outputs.items() if not same_text(one, plain.outputs[name])]
    assert len(others) <= MOST_DIFFERENT * len(plain.outputs), others
    for one in scored.outputs.values():
        assert [next(iter(row)) for row in one.logprobs] == list(one.token_ids)
        assert all(row[token].logprob <= 0 for row, token in zip(one.logprobs, one.token_ids, strict=True))


def engine(path, jump):
    return LLM(str(path), max_model_len=256, max_num_seqs=16, enable_jump_forward=jump)


@pytest.fixture(scope="module")
def llm(smollm2_path):
    return engine(smollm2_path, True)


@pytest.fixture(scope="module")
def one_by_one(smollm2_path):
    return engine(smollm2_path, False)


def people(llm, *params):
    form = StructuredOutputsParams(json=PERSON, **COMPACT)
    asked = [one.replace(structured_outputs=form) for one in params]
    return [output.outputs[0] for output in llm.generate(["Who? "] * len(asked), asked, use_tqdm=False)]


STOPS = {"computer": '"a ', "_name": '{"first', '":"': '{"first_name', "kind_of": ',"'}
"""Stop string -> what the text ends with before it."""


@pytest.mark.parametrize("logprobs", [None, 0])
def test_structured_outputs_end_at_a_stop_string_inside_a_stretch(llm, one_by_one, logprobs):
    """What comes behind it was computed, and is neither shown nor counted."""
    asked = [GREEDY.replace(stop=stop, logprobs=logprobs) for stop in STOPS]
    without = people(one_by_one, *asked)
    for one, other, (stop, kept) in zip(people(llm, *asked), without, STOPS.items(), strict=True):
        assert one.text == other.text
        assert one.text.endswith(kept)
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason) == ("stop", stop)
        assert logprobs is None or len(one.logprobs) == len(one.token_ids)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_structured_outputs_may_be_cut_off_anywhere(llm, logprobs):
    """`max_tokens` counts forced tokens."""
    (whole,) = people(llm, GREEDY.replace(logprobs=logprobs))
    size = len(whole.token_ids)
    assert whole.finish_reason == "stop"
    limits = range(1, size + 1)
    cut = people(llm, *(GREEDY.replace(max_tokens=most, logprobs=logprobs) for most in limits))
    for most, one in zip(limits, cut, strict=True):
        assert len(one.token_ids) == most
        assert one.finish_reason == "length"
        assert whole.text.startswith(one.text)


def test_structured_outputs_of_several_completions(llm):
    """Each has its own."""
    outputs = llm.generate(
        "Who? ",
        HOT.replace(n=4, seed=3, structured_outputs=StructuredOutputsParams(json=PERSON, **COMPACT)),
        use_tqdm=False,
    )
    texts = [one.text for one in outputs[0].outputs]
    assert len(texts) == 4
    assert not [text for text in texts if json.loads(text)["kind_of_person"] != "a computer scientist"]
