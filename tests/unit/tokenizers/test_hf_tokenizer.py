"""With and without threads of the tokenizers package, the ids of a text are the same, and so is what is refused."""

import pytest

from pagemill.errors import RequestError
from pagemill.tokenizers.control_text import MARK
from pagemill.tokenizers.hf_tokenizer import HfTokenizer, SpecialTokens
from tests.unit.tokenizers.vocabularies import CONTROL, byte_level

TEXTS = ("one two", f"{CONTROL}x{CONTROL[:3]}{MARK}{CONTROL[3:]}", "é\u0301 日本\n\n  x", " ")


def of(monkeypatch: pytest.MonkeyPatch, threads: str) -> HfTokenizer:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
    return HfTokenizer(byte_level(), SpecialTokens(bos_token_id=1, adds_bos=True), None)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("rendered", [False, True])
@pytest.mark.parametrize("special", [False, True])
def test_ids_are_the_same(monkeypatch: pytest.MonkeyPatch, text: str, rendered: bool, special: bool) -> None:
    one, several = of(monkeypatch, "false"), of(monkeypatch, "true")
    found = one.encode(text, special, rendered=rendered)
    assert found == several.encode(text, special, rendered=rendered) != []
    assert one.encode_literal(text) == several.encode_literal(text) != []


@pytest.mark.parametrize("threads", ["false", "true"])
def test_lone_surrogates_are_refused(monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    ours = of(monkeypatch, threads)
    with pytest.raises(RequestError, match=r"lone surrogate U\+D800 at character 1"):
        ours.encode("x\ud800")
    with pytest.raises(RequestError, match=r"lone surrogate U\+D800 at character 2"):
        ours.encode_pair("x", "y\ud800")
