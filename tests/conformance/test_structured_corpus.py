"""Schemas that people use, with values that they allow and that they do not (data/json-schemas.jsonl.xz: 306 of
JSONSchemaBench's MaskBench): every valid one is accepted token by token and no invalid one, or the schema is
refused."""

import json
import lzma
from pathlib import Path

import pytest

from pagemill.catalog.grammars import GRAMMARS, GUIDANCE
from pagemill.grammar.backends.guidance import GuidanceBackend
from pagemill.grammar.translate import translated
from pagemill.grammar.vocabulary import token_table
from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.tokenizers.load import load_tokenizer
from tests.fakes.schema_order import in_schema_order

CORPUS = Path(__file__).parent / "data/json-schemas.jsonl.xz"
MOST_REFUSED = 0.15
KEYWORDS = ("oneOf", "not", "contains", "uniqueItems", "propertyNames", "Properties", "regex", "level")
TOO_COMPLEX = {"Github_hard---o62065"}
"""Accepted, but a pattern of it (`^(?:\\S+\\s+){0,49}\\S+$`) reaches the limits in the middle of an output, which ends
with an error then."""


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return GuidanceBackend(token_table(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids), tokenizer)


def corpus():
    with lzma.open(CORPUS, "rt") as lines:
        return [json.loads(line) for line in lines]


def texts_of(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False), json.dumps(value, indent=2, ensure_ascii=False)


def misjudged(entries, tokenizer, vocabulary, backend=GUIDANCE):
    """Texts that are accepted and must not be, or the other way round; and the names of refused schemas."""
    wrong, refused = [], []
    for entry in entries:
        try:
            matcher = vocabulary.matcher(translated(StructuredOutputsParams(json=entry["schema"]), backend=backend))
        except ValueError as error:
            refused.append(f"{entry['name']}: {error}")
            continue
        for test in entry["tests"]:
            for text in texts_of(in_schema_order(test["data"], entry["schema"])):
                tokens = tokenizer.encode(text, add_special_tokens=False)
                copy = matcher.copy()
                accepted = copy.accept(tokens) == len(tokens) and copy.complete
                if accepted is not test["valid"] and not (test["valid"] and entry["name"] in TOO_COMPLEX):
                    wrong.append((entry["name"], test["valid"], text))
    return wrong, refused


@pytest.mark.model
def test_structured_schemas_of_the_corpus_in_part(tokenizer, vocabulary):
    wrong, refused = misjudged(corpus()[::20], tokenizer, vocabulary)
    assert not wrong
    assert len(refused) <= 4


@pytest.mark.slow
@pytest.mark.model
def test_structured_schemas_of_the_corpus(tokenizer, vocabulary):
    entries = corpus()
    wrong, refused = misjudged(entries, tokenizer, vocabulary)
    assert not wrong
    assert len(refused) <= MOST_REFUSED * len(entries), refused
    assert all(any(word in why for word in KEYWORDS) for why in refused), refused


@pytest.mark.slow
@pytest.mark.model
def test_structured_schemas_of_the_corpus_in_part_by_xgrammar(tokenizer):
    entries = corpus()[3::16]
    wrong, refused = misjudged(entries, tokenizer, by_xgrammar(tokenizer), "xgrammar")
    assert not wrong
    assert len(refused) <= 0.25 * len(entries), refused


@pytest.mark.conformance
@pytest.mark.model
@pytest.mark.timeout(7200)
def test_structured_schemas_of_the_corpus_by_xgrammar(tokenizer):
    entries = corpus()
    wrong, refused = misjudged(entries, tokenizer, by_xgrammar(tokenizer), "xgrammar")
    assert not wrong
    assert len(refused) <= MOST_REFUSED * len(entries), refused
    assert all(any(word in why for word in (*KEYWORDS, "pattern")) for why in refused), refused


def by_xgrammar(tokenizer):
    return GRAMMARS.resolve("xgrammar")(token_table(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids))
