"""Minus infinity for the tokens that a mask of bits refuses. Logits are not read, and only those are written."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch

_BITS = tl.constexpr(32)
_WORDS = 64
"""Of a row that a program takes: 2,048 tokens."""


@triton.jit
def _mask(logits, stride, words, words_stride, V, WORDS: tl.constexpr, PDL: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    cols = part * (WORDS * _BITS) + tl.arange(0, WORDS * _BITS)
    inside = cols < V
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    word = tl.load(words + row.to(tl.int64) * words_stride + cols // _BITS, inside, -1)
    refused = ((word >> (cols % _BITS)) & 1) == 0
    tl.store(logits + row.to(tl.int64) * stride + cols, float("-inf"), inside & refused)


def mask_(logits: Tensor, words: Tensor) -> None:
    """[L, V] float32, rows of any stride, in place, by [L, ceil(V / 32)] int32: token t of a row stays if bit t % 32 of
    the row's word t // 32 is 1."""
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    parts = triton.cdiv(vocab_size, _WORDS * _BITS.value)
    launch.on(_mask, (num_rows, parts))(
        logits, logits.stride(0), words, words.stride(0), vocab_size, WORDS=_WORDS, PDL=launch.dependent(),
        **launch.options(4),
    )  # fmt: skip
