"""`NoTokenizer`: for those who give prompts as token ids and want token ids back (`skip_tokenizer_init`).
Makes no text: every output's text is empty."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.errors import RequestError
from pagemill.tokenizers.fill_in import FillInTokens
from pagemill.tokenizers.pair_cut import PairCut


class NoText:
    """Implements `IncrementalDecoder`."""

    def step(self, token_ids: Sequence[int]) -> str:
        """Always empty."""
        return ""

    def flush(self) -> str:
        """Always empty."""
        return ""


class NoTokenizer:
    """Implements `pagemill.tokenizers.interface.Tokenizer` without one."""

    vocab_size = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    may_stall = False
    chat_template: str | None = None
    response_template: Any = None
    fill_in: FillInTokens | None = None

    def encode(self, text: str, add_special_tokens: bool = True, *, rendered: bool = False) -> list[int]:
        """Raises RequestError."""
        raise RequestError("skip_tokenizer_init=True: give the prompt as prompt_token_ids, not as text", "prompt")

    def encode_pair(self, first: str, second: str, cut: PairCut | None = None) -> tuple[list[int], int | None]:
        """Raises RequestError."""
        return self.encode(first), None

    def encode_literal(self, text: str) -> list[int]:
        """Raises RequestError."""
        return self.encode(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Always empty."""
        return ""

    def incremental(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> NoText:
        """A decoder that shows nothing."""
        return NoText()

    def token_bytes(self, token_id: int) -> bytes:
        """No bytes: there is no vocabulary to look a token up in."""
        return b""

    def vocabulary_bytes(self) -> None:
        """None: there is no vocabulary."""
        return

    def hides(self, text: str) -> bool:
        """No: there are no special tokens."""
        return False

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_variables: Any,
    ) -> str:
        """Raises RequestError."""
        raise RequestError("skip_tokenizer_init=True: conversations need a tokenizer", "messages")

    def template_variables(self, chat_template: str | None = None) -> frozenset[str] | None:
        """None: there is no template."""
        return None
