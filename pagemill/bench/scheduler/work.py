"""What the schedulers are given to do. Knows sizes and token ids, no scheduler."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pagemill.errors import ConfigError

SAMPLED_TOKEN = 7
STOP_TOKEN_IDS = (1, 2)
"""Looked for in every step and never sampled."""


@dataclass(frozen=True, slots=True)
class SchedulerWork:
    """Sizes. The defaults are those of the documentation; tests use smaller ones."""

    num_steps: int = 160
    """Measured steps of a repetition."""
    num_repetitions: int = 5
    decodes: tuple[int, ...] = (256, 1024)
    """Requests that decode at once, ascending: those of one size go on running at the next."""
    num_cached_blocks: int = 131_072
    """Blocks with cached content, those that running requests filled included; at every step at least so many."""
    admitted_tokens: int = 32_768
    block_size: int = 16
    num_warmup_steps: int = 16

    @property
    def num_blocks(self) -> int:
        """Of the pool. Without known content are: at most one block of each request, one that each long prompt computes
        a second time, and the null block."""
        return self.num_cached_blocks + self.decodes[-1] + self.num_repetitions + 2

    def settings(self) -> dict[str, int]:
        """Of either scheduler."""
        return {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "max_num_seqs": self.decodes[-1],
            "max_num_batched_tokens": 2 * self.admitted_tokens,
            "max_model_len": 2 * self.admitted_tokens,
        }

    def prompt(self, index: int) -> list[int]:
        """A long prompt; different indexes share no block."""
        ids: list[int] = np.random.default_rng(index).integers(10, 100_000, self.admitted_tokens).tolist()
        return ids

    def num_fillers(self) -> int:
        """Long prompts that together fill the pool."""
        return -(-self.num_blocks // (self.admitted_tokens // self.block_size))

    def short_prompts(self, first: int, end: int) -> list[list[int]]:
        """Of requests that decode. Their lengths differ, so that in every step a few of them need a block."""
        rng = np.random.default_rng(1_000_000 + first)
        return [rng.integers(10, 100_000, 128 + index % self.block_size).tolist() for index in range(first, end)]

    def groups(self) -> list[tuple[int, int]]:
        """(first, end) of the requests that join at each size."""
        return list(pairwise((0, *self.decodes)))

    def check(self) -> None:
        """Raise ConfigError for counts that cannot be, and for so many steps that the requests outgrow the pool."""
        for name in ("num_steps", "num_repetitions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is too small: at least 1")
        per_size = 2 * self.num_warmup_steps + self.num_steps * self.num_repetitions
        sizes_left = range(len(self.decodes), 0, -1)
        longest = 128 + self.block_size + per_size * len(self.decodes)
        blocks = sum(
            (end - first) * (2 + (128 + self.block_size + per_size * left) // self.block_size)
            for (first, end), left in zip(self.groups(), sizes_left, strict=True)
        )
        # A hundredth stays free on admission, and somewhat more is no harm.
        if blocks > 0.95 * self.num_cached_blocks or longest >= self.settings()["max_model_len"]:
            raise ConfigError(
                f"num_steps={self.num_steps} times num_repetitions={self.num_repetitions} is too much: the running "
                f"requests would outgrow the {self.num_cached_blocks} blocks"
            )
