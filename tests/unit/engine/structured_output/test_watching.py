"""What the bytes of an output say of where it stands, however tokens cut them."""

import numpy as np
import pytest

from pagemill.engine.structured_output.following import FollowedGrammar
from pagemill.engine.structured_output.watching import OutputWatch
from pagemill.grammar.interface import num_words
from pagemill.grammar.mask_filler import MaskFiller
from pagemill.messages.structured_outputs import CONTROL, GrammarSpec, Thinking
from tests.fakes.byte_vocabulary import TABLE, Following

MARK = 300
"""A control token."""
THINK = Thinking(b"<think>", b"</think>", tuple(b"</think>"))


def bytes_of(token: int) -> bytes:
    return CONTROL + b"<|call|>" if token == MARK else TABLE.tokens[token]


def taken(spec: GrammarSpec, tokens: list[int] | bytes) -> list[tuple[int, list[int]]]:
    """Where triggers were complete, and the tokens from their beginning on."""
    watch = OutputWatch(spec, bytes_of)
    found = [(place, list(watch.take(token))) for place, token in enumerate(tokens)]
    return [(place, begun) for place, begun in found if begun]


def test_a_trigger_is_found_anywhere_but_in_reasoning() -> None:
    spec = GrammarSpec("x", thinking=THINK, triggers=(b"<call>",))
    assert taken(spec, b"so <call>") == [(8, list(b"<call>"))]
    assert taken(spec, b"<<call>") == [(6, list(b"<call>"))]
    assert taken(spec, b" \n<think><call></think><call>") == [(28, list(b"<call>"))]
    assert taken(spec, b"so <think><call>") == [(15, list(b"<call>"))]


def test_reasoning_that_has_begun_in_the_prompt() -> None:
    open_now = Thinking(b"<think>", b"</think>", (1,), is_open=True)
    spec = GrammarSpec("x", thinking=open_now, triggers=(b"<call>",))
    assert taken(spec, b"a<call>b</think>\n<call>") == [(22, list(b"<call>"))]


def test_triggers_at_the_beginning_alone() -> None:
    spec = GrammarSpec("x", first_triggers=(b"[f(", b"[get("))
    assert taken(spec, b"\n [get(") == [(6, list(b"[get("))]
    assert taken(spec, b"I [f(") == []
    assert taken(spec, b"[x[f(") == []


def test_control_tokens_are_told_from_text() -> None:
    spec = GrammarSpec("x", triggers=(CONTROL + b"<|call|>go",))
    assert taken(spec, [97, MARK, *b"go"]) == [(3, [MARK, *b"go"])]
    assert taken(spec, [*b"<|call|>", *b"go"]) == []


def test_tokens_that_overlap_a_trigger_belong_to_it() -> None:
    """Token 257 is `":`."""
    spec = GrammarSpec("x", triggers=(b":a",))
    assert taken(spec, [97, 257, 97]) == [(2, [257, 97])]


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("begun", ["prompt", "output"])
def test_the_end_of_a_reasoning_that_has_had_its_budget(budget: int, begun: str) -> None:
    thinking = Thinking(b"<think>", b"</think>", tuple(b"</think>"), is_open=begun == "prompt", budget=budget)
    watch = OutputWatch(GrammarSpec("", thinking=thinking), bytes_of)
    for token in b"" if begun == "prompt" else b"\n<think>":
        assert not watch.forced
        watch.take(token)
    for number in range(budget):
        assert not watch.forced, number
        watch.take(97)
    for number, token in enumerate(b"</think>"):
        assert bytes(watch.forced) == b"</think>"[number:]
        watch.take(token)
    assert not watch.is_thinking
    for token in b"<think>more" if begun == "output" else b"more":
        watch.take(token)
    assert not watch.forced or begun == "output"


def test_reasoning_that_ends_by_itself_has_no_end_forced() -> None:
    thinking = Thinking(b"<think>", b"</think>", tuple(b"</think>"), is_open=True, budget=9)
    watch = OutputWatch(GrammarSpec("", thinking=thinking), bytes_of)
    for token in b"a</think>bcdefghijkl":
        assert not watch.forced
        watch.take(token)


@pytest.fixture(scope="module")
def vocabulary() -> Following:
    return Following()


def followed(vocabulary: Following, spec: GrammarSpec, **form: object) -> FollowedGrammar:
    matcher = vocabulary.matcher(**form) if form else None
    watch = OutputWatch(spec, bytes_of)
    return FollowedGrammar(matcher, num_words(len(TABLE.tokens)), TABLE.ends, None, watch, waits=spec.waits)


def test_a_grammar_begins_with_its_trigger(vocabulary: Following) -> None:
    grammar = followed(vocabulary, GrammarSpec("x", triggers=(b"<c>",)), regex="<c>yes")
    grammar.accept(list(b"no <c"))
    assert not grammar.holds
    assert grammar.forced_tokens() == ()
    grammar.accept(list(b">"))
    assert grammar.holds
    assert bytes(grammar.forced_tokens()) == b"yes"
    grammar.accept(list(b"yes"))
    assert grammar.end() is not None


def test_a_trigger_whose_token_goes_on_otherwise_is_text(vocabulary: Following) -> None:
    """Token 258 is `{"`."""
    grammar = followed(vocabulary, GrammarSpec("x", triggers=(b"<{",)), choice=["<{x"])
    grammar.accept([ord("<"), 258])
    assert not grammar.holds
    grammar.accept(list(b"<{"))
    assert grammar.holds


def test_a_budget_alone_restricts_nothing_else(vocabulary: Following) -> None:
    thinking = Thinking(b"<think>", b"</", tuple(b"</"), is_open=True, budget=1)
    grammar = followed(vocabulary, GrammarSpec("", thinking=thinking))
    assert not grammar.holds
    grammar.accept([97])
    assert grammar.holds
    masks = np.zeros((1, grammar.num_words), np.int32)
    FollowedGrammar.fill([grammar], masks, MaskFiller())
    assert np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist() == [ord("<")]
    assert not grammar.is_complete_with(grammar.forced_tokens())
    grammar.accept(list(b"</"))
    assert not grammar.holds
    assert grammar.end() is None
