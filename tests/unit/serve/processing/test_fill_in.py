"""A text with a gap as the tokens of a prompt: the order of its parts, and what is kept where room is short."""

import itertools

import pytest

from pagemill.errors import RequestError
from pagemill.serve.processing.fill_in import File, Gap, gap_prompt
from pagemill.tokenizers.fill_in import FillInTokens
from tests.fakes.fake_tokenizer import BOS, ByteTokenizer

PRE, SUF, MID, REPO, FILE = 290, 291, 292, 293, 294
PLAIN = FillInTokens(PRE, SUF, MID, None, None, ())
FULL = FillInTokens(PRE, SUF, MID, REPO, FILE, (REPO, FILE))
FILES = (File("a.py", "import os\n"), File("b.py", "x = 1\n"))


def parts(token_ids: list[int]) -> list[str | int]:
    """Texts between tokens that are no bytes."""
    found: list[str | int] = []
    for is_byte, group in itertools.groupby(token_ids, lambda token: token < 256):
        ids = list(group)
        found += [bytes(ids).decode()] if is_byte else ids
    return found


def test_the_order_of_the_parts() -> None:
    gap = Gap("def f():\n", "\n    return x", "    x", ())
    prompt = gap_prompt(ByteTokenizer(), PLAIN, gap, 100)
    assert parts(prompt.token_ids) == [BOS, PRE, "def f():\n", SUF, "\n    return x", MID, "    x"]
    assert not prompt.is_cut


def test_files_are_before_it_with_their_names() -> None:
    gap = Gap("p", "s", "", FILES)
    prompt = gap_prompt(ByteTokenizer(), FULL, gap, 100)
    repository = [BOS, REPO, "myproject\n", FILE, "a.py\nimport os\n", FILE, "b.py\nx = 1\n", FILE, "filename\n"]
    assert parts(prompt.token_ids) == [*repository, PRE, "p", SUF, "s", MID]
    plain = gap_prompt(ByteTokenizer(), PLAIN, gap, 100)
    between = "\n\n--- snippet ---\n\n"
    assert parts(plain.token_ids) == [BOS, f"{between}import os\n{between}x = 1\n", PRE, "p", SUF, "s", MID]


@pytest.mark.parametrize("room", range(5, 80))
@pytest.mark.parametrize("sizes", [(0, 0), (3, 40), (40, 3), (40, 40)])
def test_what_is_nearest_is_kept(room: int, sizes: tuple[int, int]) -> None:
    before, after = (bytes(range(97, 97 + 26)).decode() * 2)[: sizes[0]], "0123456789" * 4
    after = after[: sizes[1]]
    prompt = gap_prompt(ByteTokenizer(), FULL, Gap(before, after, "", FILES), room)
    ids = prompt.token_ids
    assert len(ids) <= room
    at, between = ids.index(PRE), ids.index(SUF)
    kept_before, kept_after = bytes(ids[at + 1 : between]).decode(), bytes(ids[between + 1 : -1]).decode()
    assert before.endswith(kept_before)
    assert after.startswith(kept_after)
    whole = gap_prompt(ByteTokenizer(), FULL, Gap(before, after, "", FILES), 1000).token_ids
    assert prompt.is_cut == (len(whole) > room)
    if kept_before != before or kept_after != after:
        assert len(ids) == room
        assert ids[:2] == [BOS, PRE], "files come last"
    elif prompt.is_cut:
        assert len(ids) == room
        assert ids == [BOS, *whole[len(whole) - room + 1 :]]


def test_texts_far_too_long_are_not_tokenized_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def encode(self: ByteTokenizer, text: str) -> list[int]:
        seen.append(len(text))
        return list(text.encode())

    monkeypatch.setattr(ByteTokenizer, "encode_literal", encode)
    huge = "a" * 10_000_000
    prompt = gap_prompt(ByteTokenizer(), FULL, Gap(huge, huge, "", [File("f", huge)] * 50), 100)
    assert (len(prompt.token_ids), prompt.is_cut) == (100, True)
    assert sum(seen) < 30_000


@pytest.mark.parametrize(
    ("gap", "field"),
    [
        (Gap("a", "b", "c" * 97, ()), "prompt"),
        (Gap("a", "b", "c" * 1_000_000, ()), "prompt"),
        (Gap("\ud800", "b", "", ()), "input_prefix"),
        (Gap("a", "\ud800", "", ()), "input_suffix"),
        (Gap("a", "b", "", [File("\ud800", "")]), "input_extra"),
    ],
)
def test_bad_texts_are_named(gap: Gap, field: str) -> None:
    with pytest.raises(RequestError) as error:
        gap_prompt(ByteTokenizer(), PLAIN, gap, 100)
    assert error.value.field == field
