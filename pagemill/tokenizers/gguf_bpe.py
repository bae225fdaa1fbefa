"""Byte-level BPE (`tokenizer.ggml.model` = gpt2) as a `tokenizers` pipeline.
Knows nothing about special tokens; `gguf_tokenizer` adds them."""

import tokenizers
from tokenizers import decoders, models

from pagemill.artifacts.gguf_file import GgufFile
from pagemill.artifacts.gguf_keys import GgufKeys
from pagemill.errors import ModelError
from pagemill.tokenizers.gguf_vocab import GgufVocab
from pagemill.tokenizers.pre_tokenizers import pre_kind


def build(file: GgufFile, vocab: GgufVocab) -> tokenizers.Tokenizer:
    """The pipeline. Raises ModelError for an unknown pre-tokenizer or merges that do not fit the vocabulary."""
    keys = GgufKeys(file)
    kind = pre_kind(keys.text("tokenizer.ggml.pre", "default"))
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in keys.strings("tokenizer.ggml.merges"))]
    try:
        model = models.BPE(vocab=vocab.table(), merges=merges, ignore_merges=kind.ignore_merges)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelError(f"{file.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    pipeline = tokenizers.Tokenizer(model)
    normalizer = kind.normalizer()
    if normalizer is not None:
        pipeline.normalizer = normalizer
    pipeline.pre_tokenizer = kind.pre_tokenizer()
    pipeline.decoder = decoders.ByteLevel()
    return pipeline
