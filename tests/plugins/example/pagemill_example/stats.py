"""A stat logger of one's own."""

from pagemill.log import get_logger
from pagemill.observability.serving_metrics import ServingMetrics
from pagemill.observability.stat_logger import StatLogger

logger = get_logger("pagemill.example")


class TokenCounter(StatLogger):
    """Logs how many tokens were generated so far."""

    def __init__(self, metrics: ServingMetrics) -> None:
        self._metrics = metrics

    def report(self) -> None:
        logger.info("%d tokens were generated", self._metrics.total("num_generation_tokens"))
