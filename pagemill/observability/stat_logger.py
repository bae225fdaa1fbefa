"""`StatLogger`: what is told the figures of a front end from time to time. Knows nothing about where they go."""

from abc import ABC, abstractmethod

from pagemill.observability.serving_metrics import ServingMetrics


class StatLogger(ABC):
    """One per front end for each line of catalog/stat_loggers.py, built with the front end's metrics."""

    @abstractmethod
    def __init__(self, metrics: ServingMetrics) -> None:
        """`metrics` goes on counting; it is read with `engines`, `total` and `text`."""

    @abstractmethod
    def report(self) -> None:
        """Called on the front end's event loop every PAGEMILL_LOG_STATS_INTERVAL seconds; must not wait. A logger
        that raises is named in the log and not called again."""
