"""Attention backends: name -> backend class (`AttentionBackend`)."""

from typing import Any

from pagemill.catalog.registry import Registry

ATTENTION: Registry[Any] = Registry(
    "attention backend",
    {
        "TRITON_ATTN": "pagemill.model.attention.backends.triton_attn:TritonBackend",
        "CPU_ATTN": "pagemill.model.attention.backends.cpu:CpuBackend",
        "TORCH_PAGED": "pagemill.model.attention.backends.torch_paged:TorchPagedBackend",
        "TORCH_CPU": "pagemill.model.attention.backends.torch_cpu:TorchCpuBackend",
    },
)
