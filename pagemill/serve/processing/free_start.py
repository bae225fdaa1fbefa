"""`free_before`: what may come before a form, as text or as tokens. Does not know which formats of reasoning there
are."""

from pagemill.messages.structured_outputs import FreeStart, FreeTokens, StructuredOutputsParams
from pagemill.tokenizers.interface import Tokenizer


def free_before(
    form: StructuredOutputsParams, reasoning: FreeStart | None, tokenizer: Tokenizer
) -> tuple[FreeStart | None, FreeTokens | None]:
    """What the form's own `free_until` says, or else `reasoning`: by tokens where a mark is one that no text has, so
    that a grammar of texts cannot have it; otherwise as text. At most one of the two is given."""
    end = form.free_until
    if end is not None and not isinstance(end, str):
        return None, FreeTokens(((tuple(end),),))
    start = reasoning if end is None else FreeStart(((end,),))
    if start is None:
        return None, None
    tokens = _as_tokens(start, tokenizer)
    return (start, None) if tokens is None else (None, tokens)


def _as_tokens(start: FreeStart, tokenizer: Tokenizer) -> FreeTokens | None:
    ends = tuple(tuple(_ids(text, tokenizer) for text in step) for step in start.ends)
    if not any(_is_control(token, tokenizer) for step in ends for ids in step for token in ids):
        return None
    begin = None if start.begin is None else _ids(start.begin, tokenizer)[0]
    if begin is not None and not _is_control(begin, tokenizer):
        begin = None  # text, which the grammar would have to know: what comes first is free then
    return FreeTokens(ends, begin)


def _ids(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False, rendered=True))


def _is_control(token: int, tokenizer: Tokenizer) -> bool:
    return tokenizer.hides(tokenizer.token_bytes(token).decode(errors="replace"))
