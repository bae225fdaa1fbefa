"""Reasoning between marks: where it begins and ends, however the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.serve.parsers.engine import make_parser
from pagemill.serve.parsers.formats.reasoning import THINK, THINK_UNASKED
from pagemill.serve.parsers.interface import MessageForm
from tests.fakes.messages import Message, cut, parse

OPENED = MessageForm(prompt_end="<|im_start|>assistant\n<think>\n")
CLOSED = MessageForm(prompt_end="<|im_start|>assistant\n<think>\n\n</think>\n\n")
NEITHER = MessageForm(prompt_end="Say <think>!<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(("form", "text", "reasoning", "content"), [
    (NEITHER, "<think>\nSo.\n</think>\n\nYes.\n", "So.", "Yes.\n"),
    (NEITHER, "\n <think>So.</think>Yes.", "So.", "Yes."),
    (NEITHER, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (NEITHER, "<think>So, and the end is far", "So, and the end is far", ""),
    (NEITHER, "<think>a </thin k> <think> b\n</think>", "a </thin k> <think> b", ""),
    (OPENED, "So.\n</think>\n\nYes. </think>", "So.", "Yes. </think>"),
    (OPENED, "So. </thi", "So. </thi", ""),
    (CLOSED, "Yes <think>.", "", "Yes <think>."),
    (MessageForm(begun="<think>So"), " it is.</think>Yes", "it is.", "Yes"),
    (MessageForm(begun="<think>So</think>Ye"), "s", "", "s"),
])  # fmt: skip
def test_both_parsers_agree_where_marks_are(form: MessageForm, text: str, reasoning: str, content: str) -> None:
    for kind in (THINK, THINK_UNASKED):
        assert parse(make_parser(kind, None, form), [text]) == Message(content, reasoning)


@pytest.mark.parametrize("text", ["So.\n</think>\n\nYes.", "\n\nSo.</think>Yes.", "<So.</think>Yes."])
def test_without_the_first_mark_they_do_not(text: str) -> None:
    assert parse(make_parser(THINK, None, NEITHER), [text]) == Message(text)
    reasoning = text.partition("</think>")[0].strip()
    assert parse(make_parser(THINK_UNASKED, None, NEITHER), [text]) == Message("Yes.", reasoning)


@pytest.mark.parametrize("text", ["", " \n", "<thi", " <think"])
def test_a_text_that_ends_before_it_is_known(text: str) -> None:
    assert parse(make_parser(THINK, None, NEITHER), [text]) == Message(text)
    assert parse(make_parser(THINK_UNASKED, None, NEITHER), [text]) == Message("", text.strip())


def test_nothing_is_held_back_but_what_may_be_a_mark_or_its_white_space() -> None:
    parser = make_parser(THINK, None, NEITHER)
    shown = [parser.feed(piece, ()) for piece in ("<think>So", " it", " is </th", "at\n", "</think>", "\nYes", " no ")]
    texts = [[delta.reasoning or delta.content for delta in deltas] for deltas in shown]
    assert texts == [["So"], [" it"], [" is"], [" </that"], [], ["Yes"], [" no "]]


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", " ", "\n", "a", "é😀", "think"]), max_size=12
)


@settings(deadline=None)
@given(PIECES, st.lists(st.integers(0, 80), max_size=8), st.sampled_from([OPENED, CLOSED, NEITHER]))
def test_how_the_text_is_cut_changes_nothing(pieces: list[str], places: list[int], form: MessageForm) -> None:
    text = "".join(pieces)
    for kind in (THINK, THINK_UNASKED):
        whole = parse(make_parser(kind, None, form), [text])
        assert parse(make_parser(kind, None, form), cut(text, places)) == whole
        assert parse(make_parser(kind, None, form), list(text)) == whole
