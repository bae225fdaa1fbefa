"""`AttentionBackend`: three things - capability as data, a metadata builder (plan once per step and KV group), and
an implementation (run once per layer)."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.messages.kv_spec import FullAttentionSpec, KVCacheSpec
from pagemill.model.attention.capability import ANY_CONTEXT, AttentionContext, AttentionLayerSpec, Capability
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.kernels.kv_target import KVTarget
from pagemill.model.kernels.mirrors import Layer


@dataclass(slots=True)
class LayerTensors:
    """What belongs to one layer and kernels read. Set once; addresses do not change."""

    key_scale: Tensor | None = None
    """[1] float32 on the device: a cache of 1-byte floats holds key / key_scale."""
    value_scale: Tensor | None = None
    sinks: Tensor | None = None
    """[H], where the spec says so."""


class BatchLens(NamedTuple):
    """Lengths of a batch, int32 on the host. Those of a request that verifies drafts may be too large."""

    query_start: npt.NDArray[np.int32]
    """[R + 1]."""
    seq_lens: npt.NDArray[np.int32]
    """[R]."""


class LatentWeights(Protocol):
    """What makes keys and values of latent vectors, of the heads of this rank. A query or key is its rotary part, then
    its plain part."""

    sizes: tuple[int, int]
    """Of the plain part of a key, and of a value."""

    @property
    def num_heads(self) -> int:
        """Query heads, H in shapes."""

    def absorb(self, query: Tensor) -> Tensor:
        """[T, H, rotary + plain] -> [T, H, rotary + latent], for latent vectors in the place of keys."""

    def expand(self, latent: Tensor) -> Tensor:
        """Weighted sums of latent vectors [T, H * latent] -> those of values [T, H * value]."""

    def make(self, kept: Tensor, expanded: Tensor, first_head: int) -> None:
        """kept [S, rotary + latent] -> expanded [S, heads, plain + value], contiguous: the plain parts of keys, and
        values, of so many heads from the first one on."""


@dataclass(frozen=True, slots=True)
class CommonAttentionMetadata:
    """One step as every backend of one KV group sees it. Tensors are on the device of the layers; for a captured graph
    they keep their addresses, the counts are those it was captured for, and requests of the padding have no tokens or
    a length of 0."""

    query_start: Tensor
    """[R + 1] int32, exclusive prefix sum of the tokens per request."""
    seq_lens: Tensor
    """[R] int32, tokens computed before this step plus tokens of this step."""
    block_table: Tensor
    """[R, max blocks of the step] int32; unused entries are 0."""
    slot_mapping: Tensor
    """[T] int64, block id * block_size + offset: where the key and value of each token go; -1: nowhere, the token is
    padding."""
    num_requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    query_start_host: Tensor | None = None
    """`query_start` on the host, where it is elsewhere: for backends that plan there."""
    seq_lens_host: Tensor | None = None
    common_prefix_len: int = 0
    """Tokens, whole blocks of them, that all requests of the step share: the first entries of all rows of the block
    table are equal. A step that says so is not captured."""
    num_drafts_host: Tensor | None = None
    """[R] int64 on the host: of the tokens of each request, how many drafts they end with, for layers that keep states;
    None: nobody has any."""
    min_query_len: int = 0
    """Fewest tokens of a request, where the host knows it: what is for requests of less is left out."""
    decode_len: int = 1
    """More than 1: a step that goes on with all requests, and verifies drafts; none has more tokens than that."""
    batch_lens: BatchLens | None = None
    """As the host knows them; None: they may differ from one step to the next, as in captured graphs."""
    asks_for_ends: bool = False
    """Whether all rows that are asked for of the last layer are the last ones of their requests, as far as the host
    knows."""
    replayed: bool = False
    """A decode batch that is part of a captured graph: whoever plans on the host was told of it (`before_replay`)."""


@dataclass(frozen=True, slots=True)
class StepOnHost:
    """A step as the host knows it, for those who plan there."""

    seq_lens: Tensor
    """[R] int64 on the host, tokens of this step included. In a decode batch that is replayed, 1 for rows of the
    padding, whose block is the null block."""
    slots: Tensor
    """[R] int32 on the device: the rows of `block_table` that are meant."""
    block_table: Tensor
    """[slots, blocks] int32 on the device, of the KV group; unused entries are 0."""
    block_size: int


class StepPlanner(Protocol):
    """Plans one step for one KV group: what a layer finds in the forward context under its name."""

    def build(self, common: CommonAttentionMetadata) -> Any:
        """The plan of a step."""


@runtime_checkable
class CascadePlanner(Protocol):
    """A planner that can have keys which all requests share attended to once for all of them."""

    def cascades(self, prefix_len: int, num_requests: int) -> bool:
        """Whether it would, for `common_prefix_len` of a step in which so many requests decode."""


@runtime_checkable
class ReplayPlanner(Protocol):
    """A planner that plans on the host, of which nothing is in a graph: it is told of each step before its replay."""

    def before_replay(self, step: StepOnHost) -> None:
        """Leave the step's plan where the captured kernels read it. Queues work; waits for no step that is queued
        last."""


class CacheLayer(Protocol):
    """A layer that keeps something of each request, or reads what another keeps."""

    name: str

    def kv_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        """What the layer keeps, in blocks of `block_size` tokens and elements of `dtype`."""

    def bind(self, memory: Tensor, num_blocks: int, spec: KVCacheSpec) -> None:
        """Take the layer's memory: [num_blocks * page_bytes] uint8, block after block."""

    def planning(self) -> Hashable:
        """Equal for layers of a group for which one plan of a step will do."""

    def planner(self, device: torch.device) -> StepPlanner:
        """Makes that plan."""


class AttentionImpl(ABC):
    """Runs attention for one layer."""

    def __init__(self, spec: AttentionLayerSpec) -> None:
        self.spec = spec
        self.tensors = LayerTensors()

    def native(self) -> Layer | None:
        """The layer for a native plan of the whole forward pass (kernels/layer_plan.py); None: it has no place in
        one."""
        return None

    def write_target(self, kv_cache: Tensor, metadata: Any) -> KVTarget | None:
        """The cache as the kernel before attention takes it, which then writes key and value; `forward` gets None for
        both. None: `forward` writes them itself."""
        return None

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: Any
    ) -> Tensor:
        """Write key and value to their slots, then attend; both are None where another layer wrote them already.

        query [T, H, D]; key, value [T, Hkv, D]; kv_cache as `cache_shape` says. Returns [T, H, D]. Where the spec has a
        latent_size, a key is a value too, or its last latent_size elements are, and the result is [T, H, latent_size].
        """

    def for_asked_rows(self, metadata: Any) -> Any:
        """The metadata with which attention may leave out rows that are not asked for, of which it then returns
        anything; by default, that of all rows."""
        return metadata

    def attend_latents(
        self, query: Tensor, kept: Tensor, kv_cache: Tensor, metadata: Any, weights: LatentWeights
    ) -> Tensor:
        """The same where the spec has a latent_size, for queries in the space of keys, [T, H, rotary + plain]; kept
        [T, 1, rotary + latent]. Returns [T, H * value]."""
        attended = self.forward(weights.absorb(query), kept, kept, kv_cache, metadata)
        return weights.expand(attended.flatten(1))

    def store(self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        """Write key and value, [T, Hkv, D], to their slots and attend to nothing; by default, attend for nobody."""
        self.forward(key.new_zeros(len(key), self.spec.num_heads, self.spec.head_size), key, value, kv_cache, metadata)


class MetadataBuilder(ABC):
    """Plans one step for one KV group; what it returns is handed to every layer of the group."""

    graph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    """Batches for which planning and attention may be part of a captured graph."""
    most_replayed: ClassVar[int | None] = None
    """Tokens of a batch that does more than decode, up to which that is as fast; None: always."""

    def __init__(self, spec: AttentionLayerSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device

    @abstractmethod
    def build(self, common: CommonAttentionMetadata) -> Any:
        """Metadata for `AttentionImpl.forward`."""


class AttentionBackend(ABC):
    """A named triple. Adding one: this class in a new file of backends/, and a line in catalog/attention.py."""

    name: ClassVar[str]
    capability: ClassVar[Capability]
    metadata_builder: ClassVar[type[MetadataBuilder]]
    impl: ClassVar[type[AttentionImpl]]
    block_dim: ClassVar[int] = 1
    package: ClassVar[str | None] = None
    """A package that must be installed."""

    @classmethod
    def unsupported(
        cls, spec: AttentionLayerSpec, device: str, dtype: str, where: AttentionContext = ANY_CONTEXT
    ) -> list[str]:
        """Reasons why the backend cannot run this layer here; empty when it can. A backend that needs more than its
        capability says (a compiled library) adds its reason."""
        reasons = cls.capability.unsupported(spec, device, dtype, where)
        lacks = cls.package is not None and find_spec(cls.package) is None
        return [*reasons, f"the package {cls.package} is not installed"] if lacks else reasons

    @classmethod
    def configured(cls, spec: AttentionLayerSpec, where: AttentionContext) -> "type[AttentionBackend]":
        """What runs where this backend is chosen: itself, or a variant of it. Equal choices give the same class."""
        return cls

    @staticmethod
    @abstractmethod
    def cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Shape in which a layer's cache (num_blocks * page_bytes bytes) is viewed, elements of spec.dtype. Dimension
        `block_dim` counts blocks. In memory it comes first, whatever its place in the shape: a block is one piece, so
        that it can be another layer's later."""
