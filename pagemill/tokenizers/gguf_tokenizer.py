"""A tokenizer from the metadata of a .gguf file: the pipeline of its kind, special tokens, chat template.
Knows nothing about architectures or weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import AddedToken

from pagemill.artifacts import gguf_metadata
from pagemill.artifacts.gguf_file import GgufFile, read_gguf
from pagemill.artifacts.gguf_keys import GgufKeys
from pagemill.errors import ModelError
from pagemill.tokenizers import fill_in, gguf_bpe, gguf_spm, gguf_wordpiece
from pagemill.tokenizers.gguf_vocab import CONTROL, USER_DEFINED, GgufVocab, read_vocab, token_id
from pagemill.tokenizers.hf_tokenizer import HfTokenizer, SpecialTokens
from pagemill.tokenizers.pre_tokenizers import pre_kind

_WORDPIECE: Final = "bert"
"""Puts tokens around texts itself."""
_BUILDERS: Final[dict[str, Callable[[GgufFile, GgufVocab], tokenizers.Tokenizer]]] = {
    "gpt2": gguf_bpe.build,
    "llama": gguf_spm.build,
    "gemma4": gguf_spm.build_merged,
    _WORDPIECE: gguf_wordpiece.build,
}
# Name in the file -> variable of chat templates.
_NAMED: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Of prompts with a gap: names in the file, the newer one first.
_FILL_IN: Final = {
    fill_in.PREFIX: ("fim_pre", "prefix"),
    fill_in.SUFFIX: ("fim_suf", "suffix"),
    fill_in.MIDDLE: ("fim_mid", "middle"),
    fill_in.PADDING: ("fim_pad",),
    fill_in.REPOSITORY: ("fim_rep",),
    fill_in.FILE: ("fim_sep",),
    fill_in.END: ("eot",),
}


def load(path: Path, chat_template: str | None = None) -> HfTokenizer:
    """Build it; `chat_template` replaces the file's. Raises ModelError for a damaged file or an unknown kind."""
    file = read_gguf(path)
    keys = GgufKeys(file)
    kind = keys.text("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise ModelError(
            f"{path}: tokenizer.ggml.model={kind!r} is not supported; supported: {', '.join(sorted(_BUILDERS))}"
        )
    vocab = read_vocab(file)
    pipeline = _BUILDERS[kind](file, vocab)
    # Longer added tokens win over shorter ones; control tokens are never shown.
    tokens = vocab.tokens
    pipeline.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in vocab.ids_of(CONTROL)])
    pipeline.add_tokens([AddedToken(tokens[i], normalized=False) for i in vocab.ids_of(USER_DEFINED)])
    template = chat_template if chat_template is not None else keys.text("tokenizer.chat_template", "")
    return HfTokenizer(pipeline, _special(file, keys, vocab, kind), template or None)


def _special(file: GgufFile, keys: GgufKeys, vocab: GgufVocab, kind: str) -> SpecialTokens:
    num_tokens = len(vocab.tokens)
    ids = {name: token_id(file, name, num_tokens) for name in _NAMED}
    frames = kind != _WORDPIECE
    default_bos = kind == "llama" or (frames and pre_kind(keys.text("tokenizer.ggml.pre", "default")).add_bos)
    return SpecialTokens(
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(i for i in gguf_metadata.eos_token_ids(file, vocab.tokens) if i < num_tokens),
        adds_bos=frames and keys.flag("tokenizer.ggml.add_bos_token", default_bos),
        adds_eos=frames and keys.flag("tokenizer.ggml.add_eos_token", False) and ids["eos"] is not None,
        named={_NAMED[name]: vocab.tokens[i] for name, i in ids.items() if i is not None},
        fill_in=_fill_in(file, num_tokens),
    )


def _fill_in(file: GgufFile, num_tokens: int) -> dict[str, int]:
    """Part of a prompt with a gap -> id, as far as the file says so."""
    found = {}
    for part, names in _FILL_IN.items():
        ids = [known for name in names if (known := token_id(file, name, num_tokens)) is not None]
        if ids:
            found[part] = ids[0]
    return found
