"""What an attention backend can do, as data, and what is asked of it. Knows no backend."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

DECODER = "decoder"
ENCODER = "encoder"
ENCODER_ONLY = "encoder_only"
ENCODER_DECODER = "encoder_decoder"
ALL_TYPES = frozenset({DECODER, ENCODER, ENCODER_ONLY, ENCODER_DECODER})
ONE_BYTE_KV = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})
INT8_KV = frozenset({"int8", "int8_per_token_head"})
"""Integers with a scale for each token and head; two names for the same."""
SAME_KV = frozenset({"auto", "bfloat16", "float16", "float32"})
"""A cache of the model's own type; `bfloat16` and the like say which one is expected."""

KV_DTYPES = SAME_KV | ONE_BYTE_KV | INT8_KV

Compute = tuple[int, int]
"""Compute capability of a GPU, such as (9, 0)."""


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """Block sizes: all multiples of a number."""

    number: int


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """Requirements on a backend other than the layer's own shape."""

    compute: Compute | None = None
    """None: not a CUDA GPU."""
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    """None: not known yet."""
    attention_type: str = DECODER
    mla: bool = False
    sparse: bool = False
    mm_prefix: bool = False
    """Tokens of an image see each other in both directions."""
    decode_context_parallel: bool = False
    flash_attn_version: int | None = None
    """2 or 3; None: the newest that is here."""
    deterministic: bool = False
    """A row has the same bits alone, in any batch, and however its prompt was cut into steps."""


ANY_CONTEXT = AttentionContext()
_PLAIN_FIELDS = 4
"""Those of `AttentionLayerSpec` that every layer has."""


@dataclass(frozen=True, slots=True)
class AttentionLayerSpec:
    """What one attention layer computes."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    """Multiplies query x key."""
    window: int | None = None
    """A token sees the last `window` tokens, itself included; None: all."""
    soft_cap: float | None = None
    """scores = soft_cap * tanh(scores / soft_cap), before the mask."""
    chunk_size: int | None = None
    """A token sees those with the same position // chunk_size, up to itself; None: all."""
    has_sinks: bool = False
    """Each head has a learnt logit that takes its share of the softmax and adds nothing."""
    alibi_slopes: tuple[float, ...] | None = None
    """Of each head: scores += slope * (position of the key - position of the query)."""
    latent_size: int | None = None
    """Of multi-head latent attention: there is no value, the last so many elements of the one key are. None: keys and
    values are apart."""
    expanded_sizes: tuple[int, int] | None = None
    """Of multi-head latent attention: elements of a head's key, without its rotary part, and of its value, as a latent
    vector may be expanded to; None: it is not."""
    bidirectional: bool = False
    """A token sees those after it too: an encoder's. The window is then the largest distance, in both directions, and
    nothing is kept from one step to the next."""

    @property
    def words(self) -> str:
        """For messages: how many heads of which size, and what else differs from plain attention."""
        said = {field.name: getattr(self, field.name) for field in fields(self)[_PLAIN_FIELDS:]}
        others = [
            f"{name}={value}" if isinstance(value, (int, float)) and value is not True else name
            for name, value in said.items()
            if value is not None and value is not False and name != "expanded_sizes"
        ]
        plain = f"{self.num_heads} heads ({self.num_kv_heads} of keys) of size {self.head_size}"
        return ", ".join([plain, *others])

    def first_seen(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk_size is None else max(first, position // self.chunk_size * self.chunk_size)


@dataclass(frozen=True)
class Capability:
    """What a backend can do."""

    devices: frozenset[str]
    dtypes: frozenset[str]
    head_sizes: Sequence[int] | None = None
    """None: any."""
    kv_dtypes: frozenset[str] = SAME_KV
    block_sizes: Sequence[int] | MultipleOf | None = None
    """None: any."""
    sliding_window: bool = False
    chunked_local: bool = False
    soft_cap: bool = False
    sinks: bool = False
    alibi: bool = False
    mla: bool = False
    """Whether it is for multi-head latent attention, and then for nothing else."""
    sparse: bool = False
    mm_prefix: bool = False
    decode_context_parallel: bool = False
    deterministic: bool = False
    """Whether a row has the same bits alone, in any batch, and however its prompt was cut into steps."""
    attention_types: frozenset[str] = frozenset({DECODER})
    compute: tuple[Compute, Compute] | None = None
    """Lowest and highest compute capability; None: any."""

    def unsupported(
        self, spec: AttentionLayerSpec, device: str, dtype: str, where: AttentionContext = ANY_CONTEXT
    ) -> list[str]:
        """Reasons why the backend cannot run this layer; empty when it can."""
        wants = {
            f"device {device} not supported": device not in self.devices,
            "compute capability not supported": not self._computes_on(where.compute),
            f"dtype {dtype} not supported": dtype not in self.dtypes,
            f"kv cache dtype {where.kv_cache_dtype} not supported (allowed: {self._kept(dtype)})": not self._keeps(
                where.kv_cache_dtype, dtype
            ),
            f"block size {where.block_size} not supported": not self._takes_blocks(where.block_size),
            f"head size {spec.head_size} not supported": self.head_sizes is not None
            and spec.head_size not in self.head_sizes,
            "MLA not supported": where.mla and not self.mla,
            "non-MLA not supported": self.mla and not where.mla,
            "sparse attention not supported": where.sparse and not self.sparse,
            "non-sparse attention not supported": self.sparse and not where.sparse,
            "sliding window not supported": spec.window is not None and not self.sliding_window,
            "chunked local attention not supported": spec.chunk_size is not None and not self.chunked_local,
            "soft cap not supported": spec.soft_cap is not None and not self.soft_cap,
            "sinks not supported": spec.has_sinks and not self.sinks,
            "ALiBi not supported": spec.alibi_slopes is not None and not self.alibi,
            "multimodal prefix not supported": where.mm_prefix and not self.mm_prefix,
            "decode context parallel not supported": where.decode_context_parallel and not self.decode_context_parallel,
            "deterministic attention not supported": where.deterministic and not self.deterministic,
            f"attention type {where.attention_type} not supported": where.attention_type not in self.attention_types,
        }
        return [reason for reason, lacks in wants.items() if lacks]

    def _computes_on(self, compute: Compute | None) -> bool:
        if self.compute is None or compute is None:
            return True
        return self.compute[0] <= compute <= self.compute[1]

    def _keeps(self, kv_cache_dtype: str, dtype: str) -> bool:
        return kv_cache_dtype == dtype or kv_cache_dtype in self.kv_dtypes - (SAME_KV - {"auto"})

    def _kept(self, dtype: str) -> str:
        return ", ".join(sorted((self.kv_dtypes - SAME_KV) | {"auto", dtype}))

    def _takes_blocks(self, block_size: int | None) -> bool:
        if block_size is None or self.block_sizes is None:
            return True
        if isinstance(self.block_sizes, MultipleOf):
            return block_size % self.block_sizes.number == 0
        return block_size in self.block_sizes
