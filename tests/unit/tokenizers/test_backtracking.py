"""Regular expressions that take for ever are told from those of models."""

import pytest
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from pagemill.tokenizers.backtracking import may_backtrack, may_stall
from pagemill.tokenizers.pre_tokenizers import PRE_KINDS

OF_MODELS = [
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+(?:'[sS]|'[tT])?""",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r" ?[^(\s|[.,!?\u2026\u3002\u3001])]+",
    r"(?=(\d{3})+(?!\d))",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[\p{Han}&&[^\u3000]]+|[[:alpha:]]+",
    r"\s{2,}|\d",
    "",
]
HOSTILE = [
    r"(a+)+$", r"(?:a|a)*b", r"(a|aa)+$", r"(a?){25}a{25}", r"(\w+\s?)*$", r"\w*\w*\w*!", r"\w*\w*!", r"(?=(a*)*b)",
    r"((((a*)))*)b", r"x|(y|(z+)*)!", r"(a)\1*", r"(?<x>a\g<x>?b)", "[a", "(a", "a)", r"(?(1)a|b)", r"(?:a{1,300}){9}b",
    "(" * 60 + ")" * 60, "[" * 60, r"a{1,99}a{1,99}b",
]  # fmt: skip


@pytest.mark.parametrize("pattern", [*OF_MODELS, *(item for kind in PRE_KINDS.values() for item in kind.patterns)])
def test_expressions_of_models_do_not_backtrack_far(pattern):
    assert not may_backtrack(pattern)


@pytest.mark.parametrize("pattern", HOSTILE)
def test_repeats_of_what_matches_in_several_ways_may_take_for_ever(pattern):
    assert may_backtrack(pattern)


def test_expressions_are_found_wherever_they_stand_in_a_pipeline():
    bad = Regex("(a+)+!")
    split = pre_tokenizers.Split(bad, behavior="isolated")
    assert may_stall(pre_tokenizers.Sequence([pre_tokenizers.Digits(), split]))
    assert may_stall(normalizers.Sequence([normalizers.NFC(), normalizers.Replace(bad, "a")]))
    assert may_stall(decoders.Replace(bad, "a"))
    assert not may_stall(pre_tokenizers.ByteLevel())
    assert not may_stall(normalizers.Replace("(a+)+!", "a"))
    assert not may_stall(None)
