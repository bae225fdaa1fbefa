"""CPU_MLA: attention over latent vectors by the native kernels, straight from the block table.

A token's entry of the cache is read by all heads: as its key, and, its last `latent_size` elements, as its value
(DeepSeek-V2, 2024, in the absorbed form). The kernels take the whole entry for a value too, and what they give beyond
the latent part is left: an eighth of a product at the usual sizes, for a cache that keeps each vector once.
"""

from torch import Tensor

from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.backends.cpu import CpuBackend, CpuImpl, CpuMetadata
from pagemill.model.attention.capability import Capability
from pagemill.model.kernels.plan_parts import keys_as_values


class CpuMlaImpl(CpuImpl):
    """One native call per layer."""

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: CpuMetadata
    ) -> Tensor:
        attended = super().forward(query, key, key, keys_as_values(kv_cache), metadata)
        return attended[..., -(self.spec.latent_size or self.spec.head_size) :]


class CpuMlaBackend(CpuBackend):
    """Native kernels on a CPU, over latent vectors."""

    name = "CPU_MLA"
    capability = Capability(devices=frozenset({"cpu"}), dtypes=frozenset({"float32", "bfloat16"}), mla=True)
    impl = CpuMlaImpl
    block_dim = 0

    @staticmethod
    def cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Of a layer's cache: [num_blocks, block_size, D]."""
        return (num_blocks, spec.block_size, spec.head_size)
