"""`Cut`: how a prompt is cut that is too long, as requests and callers of `LLM` ask for it. Knows no tokenizer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pagemill.errors import RequestError
from pagemill.utils.text import shown

TOKENS, SIDE = "truncate_prompt_tokens", "truncation_side"
SIDES = ("left", "right")


class Cut(NamedTuple):
    """How many tokens of a prompt are kept, and of which end; arguments of `InputProcessor.tokenize_cut`."""

    most: int | None
    """Most tokens, special ones included; None: as many as the context has."""
    keep_end: bool = False

    @classmethod
    def of(cls, tokens: Any, side: Any = None) -> "Cut | None":
        """`tokens`: most tokens, -1: those of the context, None: nothing is cut. `side`: where they are taken off
        (None: right). Raises RequestError."""
        if side is not None and side not in SIDES:
            raise RequestError(f"{SIDE}={shown(side)} is not allowed: {', '.join(SIDES)}", SIDE)
        if tokens is None:
            return None
        if isinstance(tokens, bool) or not isinstance(tokens, int) or (tokens != -1 and tokens < 1):
            raise RequestError(
                f"{TOKENS}={shown(tokens)} is not allowed: a number of tokens, or -1 for those of the context", TOKENS
            )
        return cls(None if tokens == -1 else tokens, side == "left")

    @classmethod
    def of_arguments(cls, given: Mapping[str, Any] | None) -> "Cut | None":
        """From `tokenization_kwargs`. Raises RequestError for others than the two that cut."""
        for name in given or {}:
            if name not in (TOKENS, SIDE):
                raise RequestError(
                    f"tokenization_kwargs has {shown(name)}: {TOKENS} and {SIDE} are known; give prompt_token_ids for "
                    "other ways to tokenize",
                    "tokenization_kwargs",
                )
        return None if not given else cls.of(given.get(TOKENS), given.get(SIDE))
