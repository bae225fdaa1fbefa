"""Deterministic token-id workloads, the same for every engine. Ids stay clear of SmolLM2's special tokens."""

import random
from dataclasses import dataclass

VOCAB_SIZE = 49152


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each work is; the defaults are what is measured."""

    decoded: int = 128
    """Tokens of the single stream."""
    prefill: int = 512
    requests: int = 64
    """At once, with `prompt` tokens in and `output` out; those served are that long too."""
    prompt: int = 128
    output: int = 128
    served: int = 32
    concurrency: int = 8
    sharing: int = 32
    """At once, with `shared` and `own` tokens in, `own` out."""
    shared: int = 512
    own: int = 32
    worn: int = 34
    """Prompts of `worn_tokens` that a KV cache is written with, once: as many tokens as pagemill's has by default."""
    worn_tokens: int = 2000


FULL = Sizes()
TINY = Sizes(
    decoded=16, prefill=64, requests=8, prompt=16, output=16, served=6, concurrency=3, sharing=4, shared=64, worn=2,
    worn_tokens=64,
)  # fmt: skip
"""To see whether a benchmark works."""


def tokens(seed: int, count: int) -> list[int]:
    """`count` token ids drawn from `seed`."""
    rng = random.Random(seed)
    return [rng.randrange(300, VOCAB_SIZE - 10) for _ in range(count)]


def single(repetition: int) -> list[list[int]]:
    """One prompt of 32 tokens."""
    return [tokens(1000 + repetition, 32)]


def prefill(repetition: int, sizes: Sizes = FULL) -> list[list[int]]:
    """One prompt of 512 tokens."""
    return [tokens(500_000 + repetition, sizes.prefill)]


def throughput(repetition: int, sizes: Sizes = FULL) -> list[list[int]]:
    """64 prompts of 128 tokens."""
    return [tokens(1_000_000 + 1000 * repetition + index, sizes.prompt) for index in range(sizes.requests)]


def served(repetition: int, sizes: Sizes = FULL) -> list[list[int]]:
    """32 prompts of 128 tokens."""
    return [tokens(5_000_000 + 1000 * repetition + index, sizes.prompt) for index in range(sizes.served)]


def wearing_in(sizes: Sizes = FULL) -> list[list[int]]:
    """34 prompts of 2,000 tokens."""
    return [tokens(11_000_000 + index, sizes.worn_tokens) for index in range(sizes.worn)]


def shared_prefix(repetition: int, sizes: Sizes = FULL) -> list[list[int]]:
    """32 prompts of 512 shared and 32 own tokens."""
    head = tokens(7_000_000 + repetition, sizes.shared)
    return [head + tokens(9_000_000 + 1000 * repetition + index, sizes.own) for index in range(sizes.sharing)]
