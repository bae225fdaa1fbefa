"""SentencePiece BPE (`tokenizer.ggml.model` = llama) as a `tokenizers` pipeline: scores become merges; of Gemma 4
(gemma4), the file has them.
Knows nothing about special tokens; `gguf_tokenizer` adds them.

SentencePiece joins, again and again, the neighbours whose concatenation is the token of the best score. The same with
merges: every way to cut a token into two tokens is a merge, ranked by the token's score. A vocabulary of 262,144 has
half a million of them, found with numpy in well under a second by comparing hashes of substrings.
"""

from typing import Any, Final

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers

from pagemill.artifacts.gguf_file import GgufFile
from pagemill.artifacts.gguf_keys import GgufKeys
from pagemill.errors import ModelError
from pagemill.tokenizers.gguf_vocab import BYTE, NORMAL, UNKNOWN, GgufVocab

_SPACE_MARK: Final = "\u2581"
# Base of the substring hash and a factor that spreads code points over 64 bits; both odd, otherwise arbitrary.
_BASE: Final = 0xD6E8FEB86659FD93
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)

_Array = np.ndarray[Any, Any]


def build(file: GgufFile, vocab: GgufVocab) -> tokenizers.Tokenizer:
    """The pipeline. Raises ModelError when scores are missing."""
    scores = GgufKeys(file).numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocab.tokens):
        raise ModelError(f"{file.path}: {len(vocab.tokens)} tokens, but {len(scores)} scores")
    return _pipeline(file, vocab, merges_from_scores(vocab, scores), adds_space=True)


def build_merged(file: GgufFile, vocab: GgufVocab) -> tokenizers.Tokenizer:
    """The pipeline of files with merges. Raises ModelError when they are missing, or do not fit the vocabulary."""
    found = GgufKeys(file).strings("tokenizer.ggml.merges")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in found)]
    return _pipeline(file, vocab, merges, adds_space=False)


def _pipeline(
    file: GgufFile, vocab: GgufVocab, merges: list[tuple[str, str]], *, adds_space: bool
) -> tokenizers.Tokenizer:
    """`adds_space`: whether texts begin with one where the file does not say."""
    keys = GgufKeys(file)
    unknown = vocab.ids_of(UNKNOWN)
    unknown_id = keys.integer("tokenizer.ggml.unknown_token_id", unknown[0] if unknown else 0)
    try:
        model = models.BPE(
            vocab=vocab.table(),
            merges=merges,
            unk_token=vocab.tokens[unknown_id] if 0 <= unknown_id < len(vocab.tokens) else None,
            byte_fallback=bool((vocab.kinds == BYTE).any()),
            fuse_unk=True,
        )
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelError(f"{file.path}: the tokens make no vocabulary: {error}") from error
    adds_space = keys.flag("tokenizer.ggml.add_space_prefix", adds_space)
    pipeline = tokenizers.Tokenizer(model)
    pipeline.normalizer = _normalizer(adds_space)
    pipeline.decoder = _decoder(adds_space)
    return pipeline


def merges_from_scores(vocab: GgufVocab, scores: _Array) -> list[tuple[str, str]]:
    """All cuts of every ordinary token into two ordinary tokens; best score first, then lower id, then longer left."""
    normal = np.flatnonzero(vocab.kinds == NORMAL)
    order = normal[np.argsort(-scores[normal].astype(np.float64), kind="stable")]
    words = [vocab.tokens[i] for i in order]
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    hashes = _SubstringHashes("".join(words))
    index = _HashIndex(hashes.of(starts, ends))
    num_cuts = np.maximum(lengths - 1, 0)
    owner = np.repeat(np.arange(len(words)), num_cuts)
    cut = np.arange(len(owner)) - np.repeat(np.cumsum(num_cuts) - num_cuts, num_cuts) + 1 + starts[owner]
    left = index.find(hashes.of(starts[owner], cut))
    known = left >= 0
    left, cut, owner = left[known], cut[known], owner[known]
    right = index.find(hashes.of(cut, ends[owner]))
    known = right >= 0
    texts = np.array(words, dtype=object)
    return list(zip(texts[left[known]].tolist(), texts[right[known]].tolist(), strict=True))


class _SubstringHashes:
    """Polynomial hashes modulo 2^64 of substrings of one text, from prefix sums."""

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
        codes = (codes + np.uint64(1)) * _SPREAD
        codes ^= codes >> np.uint64(29)
        powers = _powers(_BASE, len(codes))
        # The base is odd, so it has an inverse: a substring's sum can be shifted back to position 0.
        self._inverse_powers = _powers(pow(_BASE, -1, 1 << 64), len(codes) + 1)
        self._sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(codes * powers, out=self._sums[1:])

    def of(self, starts: _Array, ends: _Array) -> _Array:
        """uint64 [N] for N substrings [start, end)."""
        hashes: _Array = (self._sums[ends] - self._sums[starts]) * self._inverse_powers[starts]
        return hashes


class _HashIndex:
    """hash -> position in the list it was made from."""

    def __init__(self, hashes: _Array) -> None:
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]

    def find(self, hashes: _Array) -> _Array:
        """int64 [N]: positions, -1 where there is none."""
        if len(self._sorted) == 0:
            return np.full(len(hashes), -1)
        at = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        return np.where(self._sorted[at] == hashes, self._order[at], -1)


def _powers(base: int, count: int) -> _Array:
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors)


def _normalizer(adds_space: bool) -> normalizers.Normalizer:
    marks = normalizers.Replace(" ", _SPACE_MARK)
    return normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), marks]) if adds_space else marks


def _decoder(adds_space: bool) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
