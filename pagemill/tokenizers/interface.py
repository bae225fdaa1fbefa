"""What the front end asks of a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pagemill.tokenizers.fill_in import FillInTokens
from pagemill.tokenizers.pair_cut import PairCut


class VocabularyBytes(NamedTuple):
    """What the tokens of a vocabulary stand for."""

    tokens: list[bytes]
    """By id; nothing for an id without a token."""
    special: list[int]
    """Ids of the control tokens, whose bytes are their names, and no text."""


class IncrementalDecoder(Protocol):
    """Text of one growing token sequence. Concatenated, the pieces equal the decoded whole; no piece ever holds a
    broken character: bytes of an incomplete character wait for the next token."""

    def step(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that is now certain (may be empty)."""

    def flush(self) -> str:
        """The text still held back when the sequence ends; U+FFFD for bytes that never became a character."""


class Tokenizer(Protocol):
    """One model's tokenizer, loaded from its folder or GGUF file."""

    vocab_size: int
    """Number of ids that decode to something; may be less than the logits width."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    may_stall: bool
    """Whether a short text may take very long to encode: patterns of the tokenizer's file backtrack."""
    chat_template: str | None
    """Jinja source; None when the model has none."""
    response_template: Any
    """How answers are told apart, as the model's files have it for transformers; None when they do not say."""
    fill_in: FillInTokens | None
    """Of which prompts with a gap are made; None when the model has no such tokens."""

    def encode(self, text: str, add_special_tokens: bool = True, *, rendered: bool = False) -> list[int]:
        """Token ids of a text: of a prompt, or `rendered` by `render_chat`, whose marks keep text that spells a control
        token from being one (see `control_text`)."""

    def encode_pair(self, first: str, second: str, cut: PairCut | None = None) -> tuple[list[int], int | None]:
        """Token ids of two texts, joined as the model joins them, and the position of the first token of the second,
        where the model tells the two apart by that. `cut`: how many of them are kept."""

    def encode_literal(self, text: str) -> list[int]:
        """Token ids of a part of a text, in which nothing is a control token, or one of `fill_in`."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""

    def incremental(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for what follows the prompt; a leading space is kept exactly when decoding prompt + output
        together would show it."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, special tokens included; nothing for ids without a token."""

    def vocabulary_bytes(self) -> VocabularyBytes | None:
        """The bytes of all tokens; None when the decoder does not work token by token, or there is none."""

    def hides(self, text: str) -> bool:
        """Whether a text is a special token, which decoding leaves out unless told otherwise."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_variables: Any,
    ) -> str:
        """Messages as one text, special tokens included (encode it with add_special_tokens=False and rendered=True).

        Raises RequestError when the model has no template, or the template refuses the messages.
        """

    def template_variables(self, chat_template: str | None = None) -> frozenset[str] | None:
        """Names that the model's chat template, or the one given, reads; None when that cannot be said. Raises
        RequestError for a malformed template."""
