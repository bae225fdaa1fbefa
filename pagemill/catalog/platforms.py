"""Platforms: name -> platform class (`Platform`)."""

from typing import Any

from pagemill.catalog.registry import Registry

PLATFORMS: Registry[Any] = Registry("platform", {"cpu": "pagemill.platforms.cpu:CpuPlatform"})
