"""Attention backends: name -> backend class (`AttentionBackend`)."""

from typing import Any

from pagemill.catalog.registry import Registry

ATTENTION: Registry[Any] = Registry(
    "attention backend",
    {"TORCH_CPU": "pagemill.model.attention.backends.torch_cpu:TorchCpuBackend"},
)
