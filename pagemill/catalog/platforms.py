"""Platforms: name -> platform class (`Platform`), the one to prefer first."""

from typing import Any

from pagemill.catalog.registry import Registry

CUDA = "cuda"
CPU = "cpu"
"""Names of our own; plug-ins add more to the table."""

PLATFORMS: Registry[Any] = Registry(
    "platform",
    {CUDA: "pagemill.platforms.cuda:CudaPlatform", CPU: "pagemill.platforms.cpu:CpuPlatform"},
)
