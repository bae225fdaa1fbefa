"""A tokenizer whose tokens are bytes, so that characters and stop strings split over tokens in every way."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.errors import RequestError
from pagemill.tokenizers.fill_in import FillInTokens
from pagemill.tokenizers.interface import VocabularyBytes
from pagemill.tokenizers.pair_cut import PairCut, longest_first

BOS, EOS, IM_END = 256, 257, 258
VOCAB_SIZE = 300
"""Width of the logits; 259 to 299 decode to nothing."""


class ByteDecoder:
    """Incremental UTF-8."""

    def __init__(self, skip_special_tokens: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._skip = skip_special_tokens

    def step(self, token_ids: Sequence[int]) -> str:
        return "".join(self._one(token) for token in token_ids)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _one(self, token: int) -> str:
        if token < 256:
            return self._decoder.decode(bytes([token]))
        name = {BOS: "<s>", EOS: "</s>", IM_END: "<|im_end|>"}.get(token, "")
        return "" if self._skip else name


class ByteTokenizer:
    """Token id = byte; 256 begins a text, 257 and 258 end it."""

    vocab_size = 259
    bos_token_id: int | None = BOS
    eos_token_ids: tuple[int, ...] = (EOS,)
    may_stall = False
    chat_template: str | None = "fake"
    response_template: Any = None
    fill_in: FillInTokens | None = None

    def encode(self, text: str, add_special_tokens: bool = True, *, rendered: bool = False) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def encode_pair(self, first: str, second: str, cut: PairCut | None = None) -> tuple[list[int], int | None]:
        cut = cut or PairCut()
        ids, others = self.encode(first, False)[: cut.first], self.encode(second, False)[: cut.second]
        if cut.most is not None:
            sizes = longest_first(len(ids), len(others), cut.most - 2)
            ids, others = ids[: sizes[0]], others[: sizes[1]]
        return [BOS, *ids, BOS, *others], len(ids) + 1

    def encode_literal(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoder = ByteDecoder(skip_special_tokens)
        return decoder.step(token_ids) + decoder.flush()

    def incremental(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> ByteDecoder:
        return ByteDecoder(skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self.decode([token_id], False).encode()

    def vocabulary_bytes(self) -> VocabularyBytes:
        tokens = [self.token_bytes(token) for token in range(self.vocab_size)]
        return VocabularyBytes(tokens, [256, 257, 258])

    def hides(self, text: str) -> bool:
        return text in ("<s>", "</s>", "<|im_end|>")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_variables: Any,
    ) -> str:
        if chat_template == "broken":
            raise RequestError("the template failed at /nowhere/template.py, <object at 0x7f00deadbeef>", "messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError("the last message is already begun", "continue_final_message")
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        return (
            text + "".join(f"({k}={v})" for k, v in template_variables.items()) + "[assistant]" * add_generation_prompt
        )

    def template_variables(self, chat_template: str | None = None) -> frozenset[str] | None:
        return None  # all of them are shown
