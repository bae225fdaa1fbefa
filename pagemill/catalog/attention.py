"""Attention backends: name -> backend class (`AttentionBackend`), and in which order a GPU's are tried."""

from typing import Any

from pagemill.catalog.registry import Registry

_BACKENDS = "pagemill.model.attention.backends"
_LISTED = "pagemill.model.attention.listed"

ATTENTION: Registry[Any] = Registry(
    "attention backend",
    {
        "FLASH_ATTN": f"{_BACKENDS}.flash_attn:FlashBackend",
        "FLASHINFER": f"{_BACKENDS}.flashinfer:FlashInferBackend",
        "TRITON_ATTN": f"{_BACKENDS}.triton_attn:TritonBackend",
        "FLEX_ATTENTION": f"{_BACKENDS}.flex:FlexBackend",
        "CPU_ATTN": f"{_BACKENDS}.cpu:CpuBackend",
        "TORCH_PAGED": f"{_BACKENDS}.torch_paged:TorchPagedBackend",
        "TORCH_CPU": f"{_BACKENDS}.torch_cpu:TorchCpuBackend",
        "TRITON_MLA": f"{_BACKENDS}.triton_mla:TritonMlaBackend",
        "TORCH_MLA": f"{_BACKENDS}.torch_mla:TorchMlaBackend",
    },
)
for _name in (
    "FLASH_ATTN_DIFFKV",
    "TREE_ATTN",
    "ROCM_AITER_FA",
    "ROCM_AITER_UNIFIED_ATTN",
    "ROCM_ATTN",
    "CUTLASS_MLA",
    "FLASHINFER_MLA",
    "FLASHINFER_MLA_SPARSE",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA",
    "ROCM_AITER_MLA",
    "ROCM_AITER_MLA_SPARSE",
    "ROCM_AITER_TRITON_MLA",
):
    ATTENTION.add(_name, f"{_LISTED}:{_name}")

BLACKWELL_ORDER = ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_PAGED")
HOPPER_ORDER = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_PAGED")
"""Of compute capability 8 and 9, and of everything older."""
BLACKWELL_MLA_ORDER = (
    "FLASHINFER_MLA",
    "CUTLASS_MLA",
    "FLASH_ATTN_MLA",
    "FLASHMLA",
    "TRITON_MLA",
    "FLASHMLA_SPARSE",
    "FLASHINFER_MLA_SPARSE",
)
HOPPER_MLA_ORDER = ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA", "FLASHMLA_SPARSE")


def cuda_order(compute: tuple[int, int], mla: bool = False) -> tuple[str, ...]:
    """Names of backends for a GPU of this compute capability, best first; those that the catalogue has."""
    orders = (BLACKWELL_ORDER, BLACKWELL_MLA_ORDER) if compute[0] >= 10 else (HOPPER_ORDER, HOPPER_MLA_ORDER)
    order: tuple[str, ...] = orders[mla]
    return tuple(name for name in order if name in ATTENTION)


def register_backend(name: str, path: str) -> None:
    """Make a backend of one's own selectable by `--attention-backend NAME`, also in place of one that pagemill has.

    path: "module:class" of an `AttentionBackend`; it is imported when it is chosen. Call it from a plug-in
    (docs/plug-ins.md): those are loaded in every process. Raises ConfigError when the path is malformed.
    """
    ATTENTION.replace(name, path)
