"""`Attention`: the layer that models use. Owns its view of the KV cache; the backend does the work."""

from torch import Tensor, nn

from pagemill.errors import PagemillError
from pagemill.messages.kv_spec import FullAttentionSpec, SlidingWindowSpec
from pagemill.model.attention.interface import AttentionBackend, AttentionLayerSpec
from pagemill.model.forward_context import current_forward


class Attention(nn.Module):
    """Attention over the paged cache. Its name is the key of its metadata in the forward context."""

    def __init__(self, spec: AttentionLayerSpec, *, name: str, backend: type[AttentionBackend]) -> None:
        super().__init__()
        self.name = name
        self.spec = spec
        self.backend = backend
        self._impl = self.backend.impl(spec)
        self._cache: Tensor | None = None

    def kv_spec(self, block_size: int, dtype: str) -> FullAttentionSpec:
        """What the layer keeps per token."""
        spec = self.spec
        if spec.window is None:
            return FullAttentionSpec(block_size, spec.num_kv_heads, spec.head_size, dtype)
        return SlidingWindowSpec(block_size, spec.num_kv_heads, spec.head_size, dtype, spec.window)

    def bind(self, cache: Tensor) -> None:
        """Take the view of the cache, of the backend's shape."""
        self._cache = cache

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, H, D]; key, value [T, Hkv, D] -> [T, H, D]."""
        if self._cache is None:
            raise PagemillError(f"{self.name} has no KV cache yet")
        return self._impl.forward(query, key, value, self._cache, current_forward().attention[self.name])
