"""`HfTokenizer`: the Tokenizer of every model, on top of the `tokenizers` package.
Knows nothing about where it was loaded from."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import AddedToken, Encoding, normalizers

from pagemill import envs
from pagemill.errors import RequestError
from pagemill.tokenizers.backtracking import may_stall
from pagemill.tokenizers.control_text import MARK, ControlText
from pagemill.tokenizers.fill_in import FillInTokens, find_fill_in
from pagemill.tokenizers.incremental import PieceDecoder, WindowDecoder
from pagemill.tokenizers.interface import IncrementalDecoder, VocabularyBytes
from pagemill.tokenizers.pair_cut import PairCut, longest_first
from pagemill.tokenizers.pieces import PieceTable, piece_rule
from pagemill.tokenizers.template_budget import MAX_VALUE

_PANIC = "PanicException"
"""What native code of the library raises when it fails; no Exception, and nowhere to be imported from."""


@dataclass(frozen=True)
class SpecialTokens:
    """A model's special tokens and which of them frame a text, besides what the pipeline's post-processor adds."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    adds_bos: bool = False
    """Every text begins with BOS; one that does already gets no second."""
    adds_eos: bool = False
    """Every text ends with the first EOS; one that does already gets no second."""
    named: dict[str, str] = field(default_factory=dict)
    """bos_token, eos_token, ... -> text, for chat templates."""
    fill_in: dict[str, int] = field(default_factory=dict)
    """Part of a prompt with a gap -> id, where the model says so itself (see `fill_in`)."""


class HfTokenizer:
    """Implements `pagemill.tokenizers.interface.Tokenizer`."""

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens, chat_template: str | None) -> None:
        self._backend = backend
        self._special = special
        self.chat_template = chat_template
        self.response_template: Any = None
        self.bos_token_id = special.bos_token_id
        self.eos_token_ids = special.eos_token_ids
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.max_chat_chars = MAX_VALUE
        """Characters of a conversation as text, and of whatever its template makes."""
        self.may_stall = any(map(may_stall, (backend.normalizer, backend.pre_tokenizer)))
        self._hidden = frozenset(token_id for token_id, token in added.items() if token.special)
        control = [token for token in added.values() if token.special]
        self._control = ControlText(token.content for token in control)
        self.fill_in: FillInTokens | None = find_fill_in(backend.token_to_id, special.fill_in)
        normalized = [token.content for token in control if token.normalized]
        self._finds_in_normalized = bool(
            normalized and backend.normalizer and all(backend.normalizer.normalize_str(t) == t for t in normalized)
        )
        """Whether control tokens are found in what normalization makes of a text too, such as of wide characters."""
        self.parses_control_tokens_of_prompts = True
        """Whether a control token spelled out in a prompt's text is one."""
        self.parses_control_tokens_of_chats = False
        """Whether one spelled out in a conversation is."""
        self._batches_have_threads = envs.tokenizers_have_threads()
        self._rule = piece_rule(backend)
        self._pieces = PieceTable(backend.id_to_token, self._rule.to_bytes) if self._rule else None

    def encode(self, text: str, add_special_tokens: bool = True, *, rendered: bool = False) -> list[int]:
        """Token ids of a text. Control tokens spelled out in a prompt are recognised unless the settings say otherwise;
        of a text that `render_chat` made, those of the template.

        Raises RequestError for text with lone surrogates, which is no valid Unicode, and where the library gives up.
        """
        if not rendered and not self.parses_control_tokens_of_prompts:
            text = self._control.as_text(text)
            rendered = True
        backend = self._backend
        marked = MARK in text or self._finds_in_normalized
        if rendered and marked and not self.parses_control_tokens_of_chats:
            backend = self._marked_backend
            while text.startswith(MARK):  # nothing is before it; pipelines may treat the very first word differently
                text = text.removeprefix(MARK)
        ids = self._encoded(backend, text, add_special_tokens)
        return self._framed(ids) if add_special_tokens else ids

    def encode_pair(self, first: str, second: str, cut: PairCut | None = None) -> tuple[list[int], int | None]:
        """Token ids of two texts, joined as the tokenizer's own template does, and the first position that it says is
        of the second text; None where it tells none apart. Raises RequestError as `encode` does."""
        with _refusing(first, second):
            if cut is None:
                found = self._backend.encode(first, second, add_special_tokens=True)
            else:
                found = self._cut_pair(first, second, cut)
        types: list[int] = found.type_ids
        return found.ids, types.index(1) if 1 in types else None

    def _cut_pair(self, first: str, second: str, cut: PairCut) -> Encoding:
        pair = [self._backend.encode(text, add_special_tokens=False) for text in (first, second)]
        for text, most in zip(pair, (cut.first, cut.second), strict=True):
            if most is not None:
                text.truncate(most)
        if cut.most is not None:
            room = max(cut.most - self._backend.num_special_tokens_to_add(is_pair=True), 0)
            for text, most in zip(pair, longest_first(len(pair[0]), len(pair[1]), room), strict=True):
                text.truncate(most, direction="left" if cut.keep_end else "right")
        return self._backend.post_process(pair[0], pair[1], add_special_tokens=True)

    def encode_literal(self, text: str) -> list[int]:
        """Token ids of a part of a text, in which nothing is a control token, or one of `fill_in`, whatever it spells.
        Raises RequestError as `encode` does."""
        marked = self._literal.as_text(text)
        if MARK not in marked and not self._finds_in_normalized:
            return self._encoded(self._backend, text, add_special_tokens=False)
        return self._encoded(self._marked_backend, marked, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token show nothing, bytes that are no character show as U+FFFD."""
        if self._pieces is None:
            return self._decode_whole(token_ids, skip_special_tokens)
        decoder = self.incremental((), skip_special_tokens)
        return decoder.step(token_ids) + decoder.flush()

    def incremental(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for what follows the prompt; see `incremental` for exactly what its pieces add up to."""
        if self._rule is None or self._pieces is None:
            return WindowDecoder(lambda ids: self._decode_whole(ids, skip_special_tokens), prompt_token_ids)
        skipped = self._hidden if skip_special_tokens else frozenset[int]()
        return PieceDecoder(self._pieces, skipped, self._rule.strips_first_space, prompt_token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, special tokens included; nothing for ids without a token."""
        if self._pieces is None:
            return self._decode_whole([token_id], skip_special_tokens=False).encode()
        return self._pieces[token_id]

    def vocabulary_bytes(self) -> VocabularyBytes | None:
        """The bytes of all tokens; None when the decoder does not work token by token."""
        if self._pieces is None:
            return None
        return VocabularyBytes([self._pieces[token] for token in range(self.vocab_size)], sorted(self._hidden))

    def hides(self, text: str) -> bool:
        """Whether a text is a special token, which decoding leaves out unless told otherwise."""
        return self._backend.token_to_id(text) in self._hidden

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_variables: Any,
    ) -> str:
        """Messages as one text, special tokens included (encode it with add_special_tokens=False and rendered=True;
        `control_text.unmarked` is what people see of it).

        `content` may be a string or a list of {"type": "text", "text": ...}; it is given to the template in the form
        that the template handles. Raises RequestError when the model has no template, or the template refuses.
        """
        # jinja2 takes long to import; completions do not need it.
        from pagemill.tokenizers.chat_template import render

        if not self.parses_control_tokens_of_chats:
            messages = self._control.messages(messages)
            template_variables = self._control.variables(template_variables)
        source = chat_template if chat_template is not None else self.chat_template
        if source is None:
            raise RequestError("this model has no chat template; give one with --chat-template, or use completions")
        return render(
            source,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._special.named, **template_variables},
            max_value=self.max_chat_chars,
        )

    def template_variables(self, chat_template: str | None = None) -> frozenset[str] | None:
        """Names that the model's chat template, or the one given, reads; None when there is none. Raises RequestError
        for a malformed template."""
        # jinja2 takes long to import; completions do not need it.
        from pagemill.tokenizers.chat_template import variables_of

        source = chat_template if chat_template is not None else self.chat_template
        return None if source is None else variables_of(source)

    @functools.cached_property
    def _literal(self) -> ControlText:
        """The control tokens, and those of `fill_in`, which vocabularies may count among the others."""
        ids = self._hidden if self.fill_in is None else self._hidden | self.fill_in.all
        return ControlText(text for token in ids if (text := self._backend.id_to_token(token)) is not None)

    @functools.cached_property
    def _marked_backend(self) -> tokenizers.Tokenizer:
        """The pipeline for texts with marks: it removes them after it has looked for control tokens, which it does
        before anything else. Shares the vocabulary, which is nearly all of a pipeline."""
        plain = self._backend
        added = [token for _, token in sorted(plain.get_added_tokens_decoder().items())]
        marked = tokenizers.Tokenizer(plain.model)
        for token in added:
            copy = AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized and not token.special,
                special=token.special,
            )
            (marked.add_special_tokens if token.special else marked.add_tokens)([copy])
        for part in ("pre_tokenizer", "post_processor", "decoder"):
            if getattr(plain, part) is not None:
                setattr(marked, part, getattr(plain, part))
        steps = [normalizers.Replace(MARK, ""), *([plain.normalizer] if plain.normalizer is not None else [])]
        marked.normalizer = normalizers.Sequence(steps)
        return marked

    def _encoded(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text, without where each is in it where that can be had: it is a quarter of the time."""
        with _refusing(text):
            if self._batches_have_threads:  # and would be started for this one text
                ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                ids = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _framed(self, ids: list[int]) -> list[int]:
        bos = self._special.bos_token_id
        ends = self._special.eos_token_ids
        if self._special.adds_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if self._special.adds_eos and ends and ids[-1:] != [ends[0]]:
            ids = [*ids, ends[0]]
        return ids

    def _decode_whole(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


@contextlib.contextmanager
def _refusing(*texts: object) -> Iterator[None]:
    """Raises RequestError for lone surrogates in what is tokenized, and where the library gives up."""
    try:
        yield
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestError(f"the text is not valid Unicode: {_surrogate(texts)}", "prompt") from error
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise RequestError(f"the model's tokenizer gives up on this text: {str(error)[:200]}", "prompt") from error


def _surrogate(texts: Sequence[object]) -> str:
    text = "".join(part for part in texts if isinstance(part, str)) if len(texts) > 1 else texts[0]
    if not isinstance(text, str):
        return f"it is a {type(text).__name__}"
    where = next((i for i, char in enumerate(text) if 0xD800 <= ord(char) <= 0xDFFF), None)
    return "it cannot be encoded" if where is None else f"lone surrogate U+{ord(text[where]):04X} at character {where}"
