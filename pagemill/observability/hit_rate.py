"""`RecentHits`: the share of prompt tokens found in the prefix cache, over the most recent requests.

Does not know whose prompts they were.
"""

from collections import deque

NUM_QUERIES = 1000


class RecentHits:
    """The last `num_queries` prompts that were looked up."""

    def __init__(self, num_queries: int = NUM_QUERIES) -> None:
        self._queries: deque[tuple[int, int]] = deque()
        self._num_queries = num_queries
        self._num_tokens = self._num_hits = 0

    def add(self, num_tokens: int, num_hits: int) -> None:
        """A prompt was looked up, and so many of its tokens found."""
        self._queries.append((num_tokens, num_hits))
        self._num_tokens += num_tokens
        self._num_hits += num_hits
        if len(self._queries) > self._num_queries:
            oldest_tokens, oldest_hits = self._queries.popleft()
            self._num_tokens -= oldest_tokens
            self._num_hits -= oldest_hits

    @property
    def rate(self) -> float:
        """0 to 1; 0 before the first prompt."""
        return self._num_hits / self._num_tokens if self._num_tokens else 0.0
