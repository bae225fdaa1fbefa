"""Deterministic token-id workloads, the same for every engine. Ids stay clear of SmolLM2's special tokens."""

import random

VOCAB_SIZE = 49152


def tokens(seed: int, count: int) -> list[int]:
    """`count` token ids drawn from `seed`."""
    rng = random.Random(seed)
    return [rng.randrange(300, VOCAB_SIZE - 10) for _ in range(count)]


def single(repetition: int) -> list[list[int]]:
    """One prompt of 32 tokens."""
    return [tokens(1000 + repetition, 32)]


def prefill(repetition: int) -> list[list[int]]:
    """One prompt of 512 tokens."""
    return [tokens(2000 + repetition, 512)]


def throughput(repetition: int) -> list[list[int]]:
    """64 prompts of 128 tokens."""
    return [tokens(100_000 * (repetition + 1) + index, 128) for index in range(64)]


def shared_prefix(repetition: int) -> list[list[int]]:
    """32 prompts of 512 shared and 32 own tokens."""
    head = tokens(7_000_000 + repetition, 512)
    return [head + tokens(7_100_000 + 1000 * repetition + index, 32) for index in range(32)]
