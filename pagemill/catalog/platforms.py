"""Platforms: name -> platform class (`Platform`), the one to prefer first."""

from typing import Any

from pagemill.catalog.registry import Registry

PLATFORMS: Registry[Any] = Registry(
    "platform",
    {"cuda": "pagemill.platforms.cuda:CudaPlatform", "cpu": "pagemill.platforms.cpu:CpuPlatform"},
)
