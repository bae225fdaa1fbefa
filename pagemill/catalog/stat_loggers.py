"""Stat loggers: name -> class (`StatLogger`) that is told a front end's figures from time to time."""

from typing import Any

from pagemill.catalog.registry import Registry

STAT_LOGGERS: Registry[Any] = Registry("stat logger", {"log": "pagemill.observability.stats_log:StatsLog"})
