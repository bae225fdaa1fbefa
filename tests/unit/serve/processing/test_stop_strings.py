"""Stop strings: the cut of the text into pieces never matters."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.serve.processing.stop_strings import StopMatcher

TEXTS = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read character by character; the first stop string to be complete ends the text, the longest if several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def feed_all(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    released = []
    for piece in pieces:
        text, stop = matcher.feed(piece)
        released.append(text)
        if stop is not None:
            return released, stop
    return [*released, matcher.release()], None


@given(TEXTS, STOPS, st.booleans(), st.lists(st.integers(0, 24)))
def test_every_split_gives_the_same_text(text: str, stops: list[str], include: bool, cuts: list[int]) -> None:
    borders = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    released, stop = feed_all(StopMatcher(tuple(stops), include), pieces)
    assert ("".join(released), stop) == reference(text, stops, include)


@given(TEXTS, STOPS)
def test_held_back_is_exactly_what_may_still_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher, released = StopMatcher(tuple(stops), False), ""
    for end, char in enumerate(text, start=1):
        piece, stop = matcher.feed(char)
        released += piece
        if stop is not None:
            return
        held = text[len(released) : end]
        longest = max(
            (text[start:end] for start in range(end + 1) if any(s.startswith(text[start:end]) for s in stops)), key=len
        )
        assert held == longest


@pytest.mark.parametrize(("stops", "pieces", "expected"), [
    (("END",), ["some E", "N", "D more"], ["some ", "", ""]),
    (("END",), ["some E", "NO"], ["some ", "ENO", ""]),
    (("\n\n",), ["a\n", "b\n", "\n"], ["a", "\nb", ""]),
])  # fmt: skip
def test_pieces_come_as_soon_as_they_are_certain(
    stops: tuple[str, ...], pieces: list[str], expected: list[str]
) -> None:
    released, _ = feed_all(StopMatcher(stops, False), pieces)
    assert released == expected


def test_unarmed_pieces_do_not_stop_but_still_hold_back() -> None:
    matcher = StopMatcher(("xyz", "no"), False)
    assert matcher.feed("no xy", armed=False) == ("no ", None)
    assert matcher.feed("z!") == ("", "xyz")


def test_compiled_stop_strings_are_shared() -> None:
    matchers = [StopMatcher(("shared",), False) for _ in range(2)]
    for matcher in matchers:
        matcher.feed("s")
    assert matchers[0]._automaton is matchers[1]._automaton


def test_nothing_is_compiled_before_a_stop_string_may_have_begun() -> None:
    matcher = StopMatcher(("xyz",), False)
    assert matcher.feed("abc") == ("abc", None)
    assert matcher._automaton is None
    assert matcher.feed("xy") == ("", None)
    assert matcher._automaton is not None
