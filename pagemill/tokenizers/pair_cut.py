"""`PairCut`: how many tokens two texts that are read together may have. Knows no tokenizer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairCut:
    """Most tokens; None: as many as there are."""

    most: int | None = None
    """Of the two together, with the special tokens around them."""
    first: int | None = None
    """Of the first text alone, whose beginning is kept."""
    second: int | None = None
    """Of the second text alone, whose beginning is kept."""
    keep_end: bool = False
    """Whether `most` keeps the ends of the texts, not their beginnings."""


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each of two texts are kept, of which `room` are: the longer one loses tokens until both are
    equally long, then both do."""
    if first + second <= room:
        return first, second
    if first > second:
        kept, other = longest_first(second, first, room)
        return other, kept
    kept = min(first, room // 2)
    return kept, room - kept
