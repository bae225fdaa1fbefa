"""`GraphStats`: how many steps ran in which mode, and how much of them was padding. Knows no graph."""

from collections import Counter
from dataclasses import dataclass, field

from pagemill.config.graph_mode import GraphMode


@dataclass
class GraphStats:
    """Counts since the start."""

    steps: Counter[GraphMode] = field(default_factory=Counter)
    """Mode -> steps."""
    tokens: Counter[GraphMode] = field(default_factory=Counter)
    """Mode -> tokens of these steps, without padding."""
    padded_tokens: Counter[GraphMode] = field(default_factory=Counter)
    """Mode -> tokens of these steps, with padding."""
    num_missed: int = 0
    """Steps whose own graph was not captured yet."""
    num_captured: int = 0
    capture_seconds: float = 0.0

    def record(self, mode: GraphMode, num_tokens: int, padded: int) -> None:
        """Count one step."""
        self.steps[mode] += 1
        self.tokens[mode] += num_tokens
        self.padded_tokens[mode] += padded

    def padding(self, mode: GraphMode) -> float:
        """Share of the tokens of a mode that were padding."""
        return 1 - self.tokens[mode] / self.padded_tokens[mode] if self.padded_tokens[mode] else 0.0

    def line(self) -> str:
        """The counts as a line for the log."""
        parts = [
            f"{mode.value} {self.steps[mode]} steps ({self.padding(mode):.0%} padding)"
            for mode in GraphMode
            if self.steps[mode]
        ]
        captured = f"{self.num_captured} captured in {self.capture_seconds:.1f} s"
        return f"CUDA graphs: {', '.join(parts) or 'no steps'}; {captured}; {self.num_missed} steps did without theirs"
