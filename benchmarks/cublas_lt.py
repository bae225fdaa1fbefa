"""`SearchedLt`: what benchmarks ask of cuBLASLt besides products: what an algorithm is set to, and what is like it.

Numbers are those of NVIDIA's public header, cublasLt.h. Knows no shapes.
"""

import ctypes
from collections.abc import Iterator
from ctypes import c_size_t, c_uint32
from typing import NamedTuple

from pagemill.model.kernels.cublas_lt import CONFIG_TYPES, Algo, CublasLt

_TILE_IDS, _SPLIT_SUPPORT, _REDUCTIONS, _SWIZZLE_SUPPORT, _MOST_CUSTOM, _STAGES_IDS = 6, 0, 1, 2, 7, 13
"""cublasLtMatmulAlgoCapAttributes_t."""
CLUSTERS = (0, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12)
"""cublasLtClusterShape_t: automatic, 1x1, 2x1, 4x1, 1x2, 2x2, 4x2, 1x4, 2x4, 8x1, 1x8."""


class Config(NamedTuple):
    """What an algorithm is set to, as in CONFIG_TYPES."""

    algorithm: int
    tile: int
    split: int
    reduction: int
    swizzle: int
    custom: int
    stages: int
    inner: int
    cluster: int


class SearchedLt(CublasLt):
    """The library, for a search."""

    def version(self) -> int:
        """As 130100 for 13.1.0."""
        return self.status("GetVersion")

    def read(self, algo: Algo) -> Config:
        """What it is set to."""
        values = []
        for attribute, kind in enumerate(CONFIG_TYPES.values()):
            value, written = kind(), c_size_t()
            size = c_size_t(ctypes.sizeof(kind))
            self.call(
                "MatmulAlgoConfigGetAttribute", ctypes.byref(algo), attribute, ctypes.byref(value), size,
                ctypes.byref(written),
            )  # fmt: skip
            values.append(value.value)
        return Config(*values)

    def can(self, algo: Algo, attribute: int) -> int:
        """A capability of four bytes."""
        value, written = c_uint32(), c_size_t()
        size = c_size_t(4)
        arguments = ctypes.byref(algo), attribute, ctypes.byref(value), size, ctypes.byref(written)
        return 0 if self.status("MatmulAlgoCapGetAttribute", *arguments) else value.value

    def ids(self, algo: Algo, attribute: int) -> list[int]:
        """A capability that is a list of ids; none where it has none."""
        name, needed = "MatmulAlgoCapGetAttribute", c_size_t()
        if self.status(name, ctypes.byref(algo), attribute, None, c_size_t(0), ctypes.byref(needed)):
            return []
        values = (c_uint32 * (needed.value // 4))()
        if len(values):
            self.call(name, ctypes.byref(algo), attribute, values, needed, ctypes.byref(needed))
        return list(values)

    def neighbours(self, algo: Algo) -> Iterator[Algo]:
        """Algorithms that differ in one thing, whether they can run or not."""
        now = self.read(algo)
        changes: list[dict[str, int]] = [{"cluster": cluster} for cluster in CLUSTERS]
        changes += [{"tile": tile} for tile in self.ids(algo, _TILE_IDS)]
        changes += [{"stages": stages} for stages in self.ids(algo, _STAGES_IDS)]
        changes += [{"custom": custom} for custom in range(min(self.can(algo, _MOST_CUSTOM), 63) + 1)]
        if self.can(algo, _SWIZZLE_SUPPORT):
            changes += [{"swizzle": swizzle} for swizzle in (0, 1)]
        changes.append({"split": 1, "reduction": 0})
        if self.can(algo, _SPLIT_SUPPORT):
            schemes = [scheme for scheme in (1, 2) if self.can(algo, _REDUCTIONS) & scheme]
            changes += [{"split": split, "reduction": scheme} for split in (2, 3, 4) for scheme in schemes]
        for change in changes:
            if any(getattr(now, name) != value for name, value in change.items()):
                other = self.changed(algo, **change)
                if other is not None:
                    yield other
