import importlib.util

import pytest

from pagemill.errors import ConfigError
from pagemill.grammar.backends.xgrammar import XGrammarBackend
from tests.fakes.byte_vocabulary import END, Following


def test_it_is_an_extra(monkeypatch):
    XGrammarBackend.check_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pagemill\[xgrammar\]'"):
        XGrammarBackend.check_installed()


def test_nothing_is_forced():
    assert Following("xgrammar").matcher(choice=["abc"]).forced() == []


def test_what_is_wrong_with_a_grammar_is_said():
    with pytest.raises(ValueError, match="nowhere"):
        Following("xgrammar").matcher(grammar="root ::= nowhere")


def test_a_control_token_is_not_its_name():
    matcher = Following("xgrammar").matcher(choice=["<end>"])
    assert matcher.count_allowed([END]) == 0
    assert matcher.count_allowed(list(b"<end>")) == 5
