import random
import re

import pytest

from pagemill.grammar.regexes import lengths, searched, whole
from tests.fakes.byte_vocabulary import Following, accepts

pytestmark = pytest.mark.cases(one_in=6)

PATTERNS = [
    "abc", "a|b|", "(ab)*c", "a{2,3}b?", "[a-c]+", "[^a]b", "a.b", r"\d+-\d{2}", r"\w\W", "(?:a|b){2}c*?", "^ab$|^c$",
    "(^a|b$)", "^(a|bc)+$", r"\x61\u0062", r"[\d-]a", "x{", r"\.\/", "[.]", "()a", "^$", "a{0}b", "[a-]{2}",
    r"\sa", "é+",
]  # fmt: skip


def texts(pattern):
    """Some that are much like what the pattern matches, and some that are not."""
    noise = random.Random(pattern)
    letters = "abc-1 .é" + "".join(char for char in pattern if char.isalnum())
    return ["", *("".join(noise.choices(letters, k=noise.randint(1, 5))) for _ in range(150))]


@pytest.fixture(scope="module")
def by_rules():
    """It has no reader of expressions but ours."""
    return Following("xgrammar")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_elsewhere(by_rules, pattern):
    least, most = lengths(whole(pattern))
    for text in texts(pattern):
        matched = re.fullmatch(pattern, text, re.ASCII) is not None
        assert accepts(by_rules, text, regex=pattern) is matched, text
        found = re.search(pattern, text, re.ASCII) is not None
        assert accepts(by_rules, f'"{text}"', json={"type": "string", "pattern": pattern}) is found, text
        assert not matched or (least <= len(text) and (most is None or len(text) <= most))


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(?=a)", "group"), ("(?!a)b", "group"), (r"(a)\1", "not supported"), (r"\bword", "not supported"),
        (r"\p{L}", "not supported"), ("(a", "unmatched"), ("a)", "unmatched"), ("[a", "unmatched"), ("*a", "repeat"),
        ("a^b", "middle"), ("(^a)*", "repeated"), ("a{3,2}", "order"), ("a{99999}", "order"), ("[b-a]", "range"),
        ("a++", "possessive"), (r"\ud800", "character"), ("(" * 100, "levels deep"), ("a" * 30_000, "too large"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused(pattern, word):
    with pytest.raises(ValueError, match=word):
        searched(pattern)


def test_every_character_and_no_half_of_one(by_rules):
    for text in ("\n", "é", "\U0010ffff", "\x7f"):
        assert accepts(by_rules, text, regex=r"[\s\S]")
    backend = by_rules.matcher(regex=r"[\s\S]")
    assert backend.accept([0xFF]) == 0
    assert backend.accept(list("é".encode())) == 2
