"""What a benchmark asks: prompts as token ids and how much to generate. The same seed makes the same workload."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagemill.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of a workload."""

    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class RandomShape:
    """How random requests look. Lengths vary uniformly by +- `range_ratio`; all share the first `prefix_len` tokens."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    vocab_size: int = 10_000
    """Token ids are drawn below this."""


def random_workload(num_prompts: int, shape: RandomShape, seed: int = 0) -> list[WorkItem]:
    """Requests with random token ids. Raises ConfigError when a length or the ratio cannot be."""
    _check(num_prompts, shape)
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, shape.vocab_size, shape.prefix_len).tolist()
    input_lens = _lengths(rng, shape.input_len, shape.range_ratio, num_prompts)
    output_lens = _lengths(rng, shape.output_len, shape.range_ratio, num_prompts)
    return [
        WorkItem(prefix + rng.integers(0, shape.vocab_size, num_inputs).tolist(), num_outputs)
        for num_inputs, num_outputs in zip(input_lens, output_lens, strict=True)
    ]


def read_workload(path: Path, num_prompts: int | None = None) -> list[WorkItem]:
    """The first `num_prompts` requests of a JSON Lines file of
    {"prompt_token_ids": [1, 2], "num_output_tokens": 16}. Raises ConfigError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the workload {path}: {error}") from None
    items = list(_parse(path, [line for line in lines if line.strip()][:num_prompts]))
    if not items:
        raise ConfigError(f"the workload {path} holds no request")
    return items


def _parse(path: Path, lines: list[str]) -> Iterator[WorkItem]:
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            token_ids = entry["prompt_token_ids"]
            num_outputs = entry["num_output_tokens"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path}, request {number}: not an object with prompt_token_ids and num_output_tokens"
            ) from None
        if not token_ids or not all(_is_count(token) for token in token_ids) or not _is_count(num_outputs, 1):
            raise ConfigError(f"{path}, request {number}: token ids must be integers, num_output_tokens at least 1")
        yield WorkItem(token_ids, num_outputs)


def _is_count(value: Any, low: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _lengths(rng: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    low = max(1, round(length * (1 - ratio)))
    high = round(length * (1 + ratio))
    lengths: list[int] = rng.integers(low, high + 1, count).tolist()
    return lengths


def _check(num_prompts: int, shape: RandomShape) -> None:
    least = {"num_prompts": (num_prompts, 1), "input_len": (shape.input_len, 1), "output_len": (shape.output_len, 1)}
    least |= {"prefix_len": (shape.prefix_len, 0), "vocab_size": (shape.vocab_size, 1)}
    for name, (value, low) in least.items():
        if value < low:
            raise ConfigError(f"{name}={value} is too small: at least {low}")
    if not 0 <= shape.range_ratio < 1:
        raise ConfigError(f"range_ratio={shape.range_ratio} is not in [0, 1)")
