"""The forms in which a prompt may be given: text, token ids, or a dict naming either (for LLM.generate)."""

from collections.abc import Sequence
from typing import TypedDict


class TextPrompt(TypedDict):
    """A prompt to be tokenized."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int]


Prompt = str | list[int] | TextPrompt | TokensPrompt
Prompts = Prompt | Sequence[Prompt]
