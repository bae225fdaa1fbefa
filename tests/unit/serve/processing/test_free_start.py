"""What may come before a form: as text, or as tokens where a mark is one."""

from collections.abc import Sequence

import pytest

from pagemill.messages.structured_outputs import FreeStart, FreeTokens, StructuredOutputsParams
from pagemill.serve.processing.free_start import free_before
from tests.fakes.fake_tokenizer import ByteTokenizer

NAMES = {"[T]": 290, "[/T]": 291, "[X]": 292}


class MarkTokenizer(ByteTokenizer):
    """Bytes, and three control tokens."""

    def encode(self, text: str, add_special_tokens: bool = True, *, rendered: bool = False) -> list[int]:
        for name, token in NAMES.items():
            before, found, after = text.partition(name)
            if found:
                return [*self.encode(before, False), token, *self.encode(after, False)]
        return super().encode(text, False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        names = {token: name for name, token in NAMES.items()}
        return "".join(names.get(token) or chr(token) for token in token_ids)

    def hides(self, text: str) -> bool:
        return text in NAMES


@pytest.mark.parametrize(
    ("reasoning", "tokens"),
    [
        (FreeStart((("</t>",),)), None),
        (FreeStart((("</t>",),), "<t>", True), None),
        (FreeStart((("[/T]",),)), FreeTokens((((291,),),))),
        (FreeStart((("[/T]",),), "[T]a"), FreeTokens((((291,),),), 290)),
        (FreeStart((("[/T]",),), "<t>"), FreeTokens((((291,),),))),
        (FreeStart((("[/T]a[X]", "b"), ("[X]",))), FreeTokens((((291, 97, 292), (98,)), ((292,),)))),
    ],
)
def test_reasoning(reasoning: FreeStart, tokens: FreeTokens | None) -> None:
    found = free_before(StructuredOutputsParams(choice=["a"]), reasoning, MarkTokenizer())
    assert found == ((reasoning, None) if tokens is None else (None, tokens))


def test_what_a_form_says_itself_comes_first() -> None:
    def of(end: str | Sequence[int]) -> tuple[FreeStart | None, FreeTokens | None]:
        form = StructuredOutputsParams(choice=["a"], free_until=end)
        return free_before(form, FreeStart((("</t>",),)), MarkTokenizer())

    assert of("now:") == (FreeStart((("now:",),)), None)
    assert of("[X]") == (None, FreeTokens((((292,),),)))
    assert of([5, 6]) == (None, FreeTokens((((5, 6),),)))


def test_nothing_is_free_unless_somebody_says_so() -> None:
    assert free_before(StructuredOutputsParams(choice=["a"]), None, MarkTokenizer()) == (None, None)
