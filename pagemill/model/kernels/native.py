"""The compiled kernels as Python functions on tensors. Arguments are not checked here: callers are layers of ours.

`library()` is None where the kernels cannot be built or are switched off; reference.py then does the same in torch.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagemill import envs
from pagemill.errors import ConfigError
from pagemill.log import get_logger
from pagemill.model.kernels.build import build, prebuilt
from pagemill.model.kernels.mirrors import check_layouts

logger = get_logger(__name__)

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_FLOAT = ctypes.c_double
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Types that the kernels compute."""
KV_DTYPES = DTYPES | {torch.int8: 2}
"""Types of caches."""
ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu2": 5}
"""As PmActivation in cpu/kernels.h."""


@dataclass(frozen=True, slots=True)
class Library:
    """The exported functions, their argument types declared."""

    path: Path
    init: Callable[[bytes | None], int]
    """Choose an instruction set by name; None: the best there is. 0: done, 1: not available on this CPU."""
    isa: Callable[[], bytes]
    """Name of the instruction set in use."""
    parallel_runtime: Callable[[], int]
    """Address of a function of the OpenMP runtime in use."""
    rms_norm: Callable[..., None]
    layer_norm: Callable[..., None]
    activate: Callable[..., None]
    soft_cap: Callable[..., None]
    gated_activation: Callable[..., None]
    sum_rows: Callable[..., None]
    rope: Callable[..., None]
    argmax: Callable[..., None]
    sample: Callable[..., None]
    choose: Callable[..., None]
    mask: Callable[..., None]
    attention: Callable[..., int]
    linear: Callable[..., None]
    linear_rows: Callable[..., int]
    pack_linear: Callable[..., None]
    pack_codes: Callable[..., int]
    pack_words: Callable[..., None]
    pack_limits: Callable[..., int]
    run_plan: Callable[..., int]
    decode_accepts: Callable[..., int]
    decode_step: Callable[..., int]
    decode_logits: Callable[..., int]
    decode_choose: Callable[..., int]
    ngrams_extend: Callable[..., None]
    ngrams_find: Callable[..., int]
    ngrams_follow: Callable[..., None]
    trie_rehash: Callable[..., None]
    trie_extend: Callable[..., int]
    trie_propose: Callable[..., int]


ISAS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
"""Names for `Library.init`; this CPU may lack some."""


@functools.cache
def library() -> Library | None:
    """The loaded library, rather the prebuilt one. It uses torch's OpenMP runtime, which is in the process already, so
    there is one pool."""
    if not envs.native_kernels():
        return None
    for find in (prebuilt, build):
        path = find()
        if path is None:
            continue
        try:
            loaded = _load(path)
        except OSError as error:
            why = " ".join(str(error).split())
            logger.warning("CPU kernels cannot be loaded; without others, plain torch runs instead: %s", why)
            continue
        loaded.init(None)
        return loaded
    return None


def loaded_library() -> Library:
    """The library, where it is known to be there. Raises ConfigError where it is not."""
    found = library()
    if found is None:
        raise ConfigError("the CPU kernels are not available here")
    return found


def _load(path: Path) -> Library:
    """Short kernels keep the interpreter's lock: giving it up and waiting for it again costs more than they do, and
    much more when another thread takes it. Attention, argmax and sampling, which may be long, give it up."""
    holding = ctypes.PyDLL(str(path))
    releasing = ctypes.CDLL(str(path))

    def function(dll: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(dll, name)
        found.argtypes = arguments  # type: ignore[attr-defined]
        found.restype = result  # type: ignore[attr-defined]
        return found

    check_layouts(function(holding, "pm_layout", _INT, ctypes.c_char_p, _POINTER, _INT))
    return Library(
        path=path,
        init=function(holding, "pm_init", ctypes.c_int, ctypes.c_char_p),
        isa=function(holding, "pm_isa", ctypes.c_char_p),
        parallel_runtime=function(holding, "pm_parallel_runtime", _POINTER),
        rms_norm=function(holding, "pm_rms_norm", None, *[_POINTER] * 4, _FLOAT, *[_INT] * 7),
        layer_norm=function(holding, "pm_layer_norm", None, *[_POINTER] * 5, _FLOAT, *[_INT] * 6),
        activate=function(holding, "pm_activate", None, *[_POINTER] * 2, *[_INT] * 4),
        soft_cap=function(holding, "pm_soft_cap", None, *[_POINTER] * 2, _INT, _FLOAT, _INT),
        gated_activation=function(holding, "pm_gated_activation", None, *[_POINTER] * 2, *[_INT] * 6),
        sum_rows=function(holding, "pm_sum_rows", None, *[_POINTER] * 4, *[_INT] * 4),
        rope=function(holding, "pm_rope", None, *[_POINTER] * 3, *[_INT] * 9),
        argmax=function(releasing, "pm_argmax", None, *[_POINTER] * 2, *[_INT] * 5),
        sample=function(releasing, "pm_sample", None, *[_POINTER] * 7, *[_INT] * 4),
        choose=function(releasing, "pm_choose", None, *[_POINTER] * 9, *[_INT] * 4),
        mask=function(releasing, "pm_mask", None, *[_POINTER] * 2, *[_INT] * 5),
        linear_rows=function(holding, "pm_linear_rows", ctypes.c_int, *[_POINTER] * 3, *[_INT] * 2),
        pack_linear=function(releasing, "pm_pack_linear", None, *[_POINTER] * 3, *[_INT] * 2),
        pack_codes=function(releasing, "pm_pack_codes", _INT, *[_POINTER] * 6, *[_INT] * 2),
        pack_words=function(releasing, "pm_pack_words", None, *[_POINTER] * 5, *[_INT] * 3),
        pack_limits=function(releasing, "pm_pack_limits", _INT, *[_POINTER] * 4, *[_INT] * 8, _FLOAT),
        linear=function(releasing, "pm_linear", None, *[_POINTER] * 3, *[_INT] * 5),
        run_plan=function(releasing, "pm_run_plan", ctypes.c_int, _POINTER, _INT, _POINTER, _INT),
        decode_accepts=function(holding, "pm_decode_accepts", ctypes.c_int, *[_POINTER] * 3, _INT),
        decode_step=function(releasing, "pm_decode_step", ctypes.c_int, *[_POINTER] * 3, _INT, *[_POINTER] * 2, _INT),
        decode_logits=function(releasing, "pm_decode_logits", ctypes.c_int, *[_POINTER] * 3, _INT, _INT),
        decode_choose=function(
            releasing, "pm_decode_choose", ctypes.c_int, *[_POINTER] * 2, _INT, *[_POINTER] * 2, _INT
        ),
        ngrams_extend=function(holding, "pm_ngrams_extend", None, _POINTER, _INT, _INT),
        ngrams_find=function(holding, "pm_ngrams_find", _INT, _POINTER, _INT, _INT),
        ngrams_follow=function(holding, "pm_ngrams_follow", None, _POINTER, _INT, *[_POINTER] * 4),
        trie_rehash=function(holding, "pm_trie_rehash", None, _POINTER),
        trie_extend=function(holding, "pm_trie_extend", _INT, _POINTER, _INT, _INT),
        trie_propose=function(
            holding, "pm_trie_propose", _INT, *[_POINTER, _INT] * 2, _INT, _FLOAT, _FLOAT, _INT, _POINTER, _POINTER
        ),
        attention=function(
            releasing, "pm_attention", ctypes.c_int, *[_POINTER] * 5, *[_INT] * 7, *[_POINTER] * 2, _INT
        ),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """[..., N] -> [..., N], contiguous. `residual`, of x's shape and contiguous, becomes x + residual first.

    x may be a slice of a wider tensor, as long as its last dimensions are contiguous within a row. A float32 weight
    beside another type of x means that the product is rounded once (Gemma).
    """
    out = torch.empty_like(x)
    cols = x.shape[-1]
    loaded_library().rms_norm(
        out.data_ptr(), x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), eps,
        out.numel() // cols, cols, 1 if x.dim() == 2 else x.shape[1], x.stride(0), DTYPES[x.dtype],
        DTYPES[weight.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """[..., N] -> [..., N], contiguous; weight and bias have x's type. x and `residual` as `rms_norm` takes them."""
    out = torch.empty_like(x)
    cols = x.shape[-1]
    loaded_library().layer_norm(
        out.data_ptr(), x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(),
        None if bias is None else bias.data_ptr(), eps, out.numel() // cols, cols, 1 if x.dim() == 2 else x.shape[1],
        x.stride(0), DTYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def activated(x: Tensor, activation: str) -> Tensor:
    """act of each element of a contiguous tensor, by its name in `ACTIVATIONS`."""
    out = torch.empty_like(x)
    loaded_library().activate(
        out.data_ptr(), x.data_ptr(), x.numel(), DTYPES[x.dtype], ACTIVATIONS[activation], torch.get_num_threads()
    )
    return out


def soft_cap(x: Tensor, limit: float) -> Tensor:
    """limit * tanh(x / limit) of float32 logits, [L, V], contiguous."""
    out = torch.empty_like(x)
    loaded_library().soft_cap(out.data_ptr(), x.data_ptr(), x.numel(), limit, torch.get_num_threads())
    return out


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of [T, H, D] in place, pairs (d, d + n/2); cos and sin [T, n], n <= D: the elements beyond n
    stay. A float32 table beside another type of x means that the result is rounded once."""
    num_tokens, num_heads, head_size = x.shape
    loaded_library().rope(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), num_tokens, num_heads, head_size, x.stride(0), DTYPES[x.dtype],
        cos.shape[-1] // 2, cos.stride(0), DTYPES[cos.dtype], torch.get_num_threads(),
    )  # fmt: skip


def gated(x: Tensor, gelu: bool) -> Tensor:
    """[T, 2 * I] -> [T, I]: act(first half) * second half."""
    rows = x.shape[0]
    cols = x.shape[1] // 2
    out = torch.empty(rows, cols, dtype=x.dtype)
    loaded_library().gated_activation(
        out.data_ptr(), x.data_ptr(), rows, cols, x.stride(0), DTYPES[x.dtype], gelu, torch.get_num_threads()
    )
    return out


def sum_rows_(sums: Tensor, x: Tensor, starts: Tensor, slots: Tensor) -> None:
    """As `reference.sum_rows_`; all contiguous."""
    loaded_library().sum_rows(
        sums.data_ptr(), x.data_ptr(), starts.data_ptr(), slots.data_ptr(), len(slots), x.shape[1], DTYPES[x.dtype],
        torch.get_num_threads(),
    )  # fmt: skip


def argmax(logits: Tensor) -> Tensor:
    """[L, V] -> [L] int64: the first index of the largest, or of a NaN."""
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    loaded_library().argmax(
        out.data_ptr(), logits.data_ptr(), *logits.shape, logits.stride(0), DTYPES[logits.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def sample(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor
) -> Tensor:
    """[L, V] float32 and, for each row, temperature, min_p, top_p (float32), top_k (int32; 0: no limit) and a number in
    (0, 1) (float64) -> [L] int32: one draw each, as `reference.sample`."""
    out = torch.empty(logits.shape[0], dtype=torch.int32)
    loaded_library().sample(
        out.data_ptr(), logits.data_ptr(), temperature.data_ptr(), min_p.data_ptr(), top_k.data_ptr(),
        top_p.data_ptr(), uniforms.data_ptr(), *logits.shape, logits.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return out


def choose(
    logits: Tensor, greedy: Tensor, settings: Sequence[Tensor], uniforms: Tensor, words: Tensor, rows: Tensor
) -> Tensor:
    """[L, V] float32 -> [L] int32, as `reference.choose`: `greedy` [L] bool; `settings`: temperature, min_p, top_k and
    top_p as for `sample`; `words` [M, W] int32, contiguous; `rows` [L] int32. Raises ValueError for masks that are too
    short."""
    if len(words) and words.shape[1] * 32 < logits.shape[1]:
        raise ValueError(f"masks of {words.shape[1]} words for {logits.shape[1]} logits")
    masks = torch.where(rows < 0, 0, words.data_ptr() + rows.long() * (4 * words.stride(0)))
    out = torch.empty(logits.shape[0], dtype=torch.int32)
    loaded_library().choose(
        out.data_ptr(), logits.data_ptr(), greedy.data_ptr(), *(values.data_ptr() for values in settings),
        uniforms.data_ptr(), masks.data_ptr(), *logits.shape, logits.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return out


def mask_(logits: Tensor, words: Tensor) -> None:
    """[L, V] float32, rows of any stride, in place, by [L, ceil(V / 32)] int32; see `ops.mask_`."""
    loaded_library().mask(
        logits.data_ptr(), words.data_ptr(), *logits.shape, logits.stride(0), words.stride(0), torch.get_num_threads()
    )


def attention(
    query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, batch: int, layer: int
) -> Tensor:
    """Write key and value to their slots, when given, then attend: [T, H, D] -> [T, H, D].

    kv_cache [2, num_blocks, Hkv, block_size, D], of int8 D + 4, contiguous from Hkv on, laid out as cpu/segment.h says
    (`reference.packed_cache` makes such a one of rows). `batch` and `layer` are the addresses of a
    `mirrors.Batch` and a `mirrors.Layer`. Rows of query, key and value may be slices of a wider tensor. Raises
    MemoryError.
    """
    out = torch.empty_like(query)
    if key is None or value is None:
        addresses: tuple[int | None, ...] = (None, None)
        strides: tuple[int, ...] = (0, 0)
    else:
        addresses = (key.data_ptr(), value.data_ptr())
        strides = (key.stride(0), value.stride(0))
    failed = loaded_library().attention(
        out.data_ptr(), query.data_ptr(), *addresses, kv_cache.data_ptr(), query.stride(0), *strides,
        kv_cache.stride(0), kv_cache.stride(1), DTYPES[query.dtype], KV_DTYPES[kv_cache.dtype], batch, layer,
        torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for the working space of attention")
    return out
