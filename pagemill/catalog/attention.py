"""Attention backends: name -> backend class (`AttentionBackend`), and in which order a GPU's are tried."""

from typing import Any

from pagemill.catalog.registry import Registry

_BACKENDS = "pagemill.model.attention.backends"

ATTENTION: Registry[Any] = Registry(
    "attention backend",
    {
        "FLASH_ATTN": f"{_BACKENDS}.flash_attn:FlashBackend",
        "FLASHINFER": f"{_BACKENDS}.flashinfer:FlashInferBackend",
        "TRITON_ATTN": f"{_BACKENDS}.triton_attn:TritonBackend",
        "TRITON_INVARIANT": f"{_BACKENDS}.triton_invariant:InvariantTritonBackend",
        "FLEX_ATTENTION": f"{_BACKENDS}.flex:FlexBackend",
        "CPU_ATTN": f"{_BACKENDS}.cpu:CpuBackend",
        "CPU_ENCODER": f"{_BACKENDS}.cpu_encoder:CpuEncoderBackend",
        "CPU_MLA": f"{_BACKENDS}.cpu_mla:CpuMlaBackend",
        "TORCH_PAGED": f"{_BACKENDS}.torch_paged:TorchPagedBackend",
        "TORCH_CPU": f"{_BACKENDS}.torch_cpu:TorchCpuBackend",
        "TORCH_SDPA": f"{_BACKENDS}.torch_sdpa:SdpaBackend",
        "TRITON_MLA": f"{_BACKENDS}.triton_mla:TritonMlaBackend",
        "TORCH_MLA": f"{_BACKENDS}.torch_mla:TorchMlaBackend",
    },
)
BLACKWELL_ORDER = ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "TRITON_INVARIANT", "FLEX_ATTENTION", "TORCH_PAGED")
HOPPER_ORDER = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TRITON_INVARIANT", "FLEX_ATTENTION", "TORCH_PAGED")
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
    """Names of backends for a GPU of this compute capability, best first; also of some that pagemill does not have
    (model/attention/known_elsewhere.py), so that an error says why none fits."""
    if compute[0] >= 10:
        return BLACKWELL_MLA_ORDER if mla else BLACKWELL_ORDER
    return HOPPER_MLA_ORDER if mla else HOPPER_ORDER


def register_backend(name: str, path: str) -> None:
    """Make a backend of one's own selectable by `--attention-backend NAME`, also in place of one that pagemill has.

    path: "module:class" of an `AttentionBackend`; it is imported when it is chosen. Call it from a plug-in
    (docs/plug-ins.md): those are loaded in every process. Raises ConfigError when the path is malformed.
    """
    ATTENTION.replace(name, path)
