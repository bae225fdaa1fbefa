"""`LoadGate`: whether a new request may come in now. Does not know what requests ask for."""

from pagemill.config.sections import SchedulerConfig
from pagemill.errors import EngineOverloadedError, UnavailableError
from pagemill.observability.serving_metrics import ServingMetrics
from pagemill.serve.processing.output_processor import OutputProcessor


class LoadGate:
    """Compares what runs and waits with the limits, and closes when the server drains."""

    def __init__(self, scheduler: SchedulerConfig, outputs: OutputProcessor, metrics: ServingMetrics) -> None:
        self.draining = False
        """Whether no new request is taken any more."""
        self._outputs = outputs
        self._metrics = metrics
        self._max_in_flight = (
            scheduler.max_num_seqs + scheduler.max_num_queued_reqs if scheduler.max_num_queued_reqs else None
        )

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    def check(self) -> None:
        """Raises EngineOverloadedError when as many requests run and wait as the configuration allows,
        UnavailableError after `drain`."""
        if self.draining:
            raise UnavailableError("the server is shutting down and takes no new requests")
        in_flight = self._outputs.num_in_flight
        if self._max_in_flight is not None and in_flight >= self._max_in_flight:
            self._metrics.rejected()
            raise EngineOverloadedError(
                f"{in_flight} requests run and wait already, which is the limit "
                "(--max-num-seqs plus --max-num-queued-reqs); try again later"
            )
