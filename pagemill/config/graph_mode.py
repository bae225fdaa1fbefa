"""`GraphMode`: how much of a step is captured and replayed. Knows nothing about batches or devices."""

from enum import StrEnum


class GraphMode(StrEnum):
    """NONE, PIECEWISE and FULL are also what one step runs in; the other two choose between those by the batch."""

    NONE = "NONE"
    """Every kernel is launched by itself."""
    PIECEWISE = "PIECEWISE"
    """What lies between attention layers is replayed; attention is launched by itself."""
    FULL = "FULL"
    """The whole step is one graph."""
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    """FULL for uniform decode batches, NONE for the others."""
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"
    """FULL for uniform decode batches, PIECEWISE for the others."""

    @property
    def decode(self) -> "GraphMode":
        """What uniform decode batches run in, where there is a graph for them."""
        return GraphMode.FULL if self in _TWO_MODES else self

    @property
    def mixed(self) -> "GraphMode":
        """What all other batches run in, where there is a graph for them."""
        return _TWO_MODES.get(self, self)

    @property
    def uses_full(self) -> bool:
        """Whether some batches run as one graph, so that attention is captured."""
        return self.decode is GraphMode.FULL

    @property
    def uses_pieces(self) -> bool:
        """Whether some batches run piecewise."""
        return self.mixed is GraphMode.PIECEWISE


_TWO_MODES = {
    GraphMode.FULL_DECODE_ONLY: GraphMode.NONE,
    GraphMode.FULL_AND_PIECEWISE: GraphMode.PIECEWISE,
}
"""Of modes that choose by the batch: the mode of batches that are no uniform decode."""
