"""WordPiece (`tokenizer.ggml.model` = bert) as a `tokenizers` pipeline, with the tokens around a text or two.

Files have a mark where a word begins instead of one where it goes on, and do not say whether upper case is told from
lower: it is if a token has some.
"""

from typing import Final

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from pagemill.artifacts.gguf_file import GgufFile
from pagemill.errors import ModelError
from pagemill.tokenizers.gguf_vocab import NORMAL, GgufVocab, token_id

_BEGINS: Final = "▁"
_GOES_ON: Final = "##"
_NAMED: Final = (("cls", "bos"), ("seperator", "eos"), ("unknown",))
"""What is before a text, what behind it, and what stands for words that cannot be written, as files spell it, by the
first of its names that there is."""
_MOST_LETTERS: Final = 100
"""Of a word; longer ones are unknown."""


def build(file: GgufFile, vocab: GgufVocab) -> tokenizers.Tokenizer:
    """The pipeline. Raises ModelError where one of the tokens is not named that it cannot do without."""
    ids = [_token_id(file, names, len(vocab.tokens)) for names in _NAMED]
    first, last, unknown = (vocab.tokens[found] for found in ids)
    # Those that are named are what they are called, of whatever kind.
    words = {vocab.tokens[found]: found for found in ids}
    table = vocab.table()
    for token, found in table.items():
        if vocab.kinds[found] != NORMAL:
            words.setdefault(token, found)
    for token, found in table.items():
        if vocab.kinds[found] == NORMAL and found not in ids:
            words.setdefault(token[1:] if token.startswith(_BEGINS) else _GOES_ON + token, found)
    pipeline = tokenizers.Tokenizer(
        models.WordPiece(
            words, unk_token=unknown, max_input_chars_per_word=_MOST_LETTERS, continuing_subword_prefix=_GOES_ON
        )
    )
    pipeline.normalizer = normalizers.BertNormalizer(lowercase=not _has_upper_case(vocab))
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # By their ids: a template would read some texts of tokens as places.
    pipeline.post_processor = processors.BertProcessing((last, ids[1]), (first, ids[0]))
    pipeline.decoder = decoders.WordPiece(prefix=_GOES_ON)
    return pipeline


def _token_id(file: GgufFile, names: tuple[str, ...], num_tokens: int) -> int:
    found = [known for name in names if (known := token_id(file, name, num_tokens)) is not None]
    if not found:
        raise ModelError(f"{file.path}: tokenizer.ggml.{names[0]}_token_id is missing")
    return found[0]


def _has_upper_case(vocab: GgufVocab) -> bool:
    """Whether a token does that is no name in brackets, such as [UNK] and [unused1]."""
    words = (vocab.tokens[index].removeprefix(_BEGINS) for index in vocab.ids_of(NORMAL))
    return any(word != word.lower() for word in words if not word.startswith("["))
