"""The loop of one engine's process: read a job from stdin, run it, answer with one JSON line on stdout.

Knows no engine: each file beside this one hands `serve_jobs` a function that builds its `Generate`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import workload
from workload import FULL, Sizes

Generate = Callable[[list[list[int]], int], None]
"""Greedily generate exactly num_tokens for each prompt of token ids."""
Works = dict[str, Callable[[int, Sizes], float]]
"""Name -> (repetition, sizes) -> the rate that was reached."""


def timed(generate: Generate, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds."""
    start = time.perf_counter()
    generate(prompts, num_tokens)
    return time.perf_counter() - start


def single_decode(generate: Generate, repetition: int, sizes: Sizes) -> float:
    """Tokens per second of one stream: 128 tokens, less the time of the first."""
    first = timed(generate, workload.single(repetition), 1)
    whole = timed(generate, workload.single(repetition + 100_000), sizes.decoded)
    return (sizes.decoded - 1) / (whole - first)


def prefill(generate: Generate, repetition: int, sizes: Sizes) -> float:
    """Prompt tokens per second of one prompt of 512."""
    return sizes.prefill / timed(generate, workload.prefill(repetition, sizes), 1)


def throughput(generate: Generate, repetition: int, sizes: Sizes) -> float:
    """Output tokens per second of 64 requests of 128 in, 128 out."""
    seconds = timed(generate, workload.throughput(repetition, sizes), sizes.output)
    return sizes.requests * sizes.output / seconds


def shared_prefix(generate: Generate, repetition: int, sizes: Sizes) -> float:
    """Requests per second: 32 at once, 512 shared and 32 own tokens in, 32 out."""
    return sizes.sharing / timed(generate, workload.shared_prefix(repetition, sizes), sizes.own)


def wear_in(generate: Generate, repetition: int, sizes: Sizes) -> float:
    """Prompt tokens per second of as many as fill a KV cache."""
    return sizes.worn * sizes.worn_tokens / timed(generate, workload.wearing_in(sizes), 1)


def steady_decode(generate: Generate, repetition: int, sizes: Sizes) -> float:
    """Tokens per second of `requests` that decode together behind prompts of `prompt` tokens. The prompts are in the
    prefix cache, so that all start in the same step; what that step takes is left out."""
    prompts = workload.throughput(repetition, sizes)
    generate(prompts, 1)
    first = timed(generate, prompts, 1)
    whole = timed(generate, prompts, sizes.output)
    return sizes.requests * (sizes.output - 1) / (whole - first)


def serve_jobs(build: Callable[[], Generate]) -> None:
    """Build the engine, warm up, and answer jobs of the works above."""

    def works() -> Works:
        generate = build()
        generate([workload.tokens(1, 16)], 8)
        known = (single_decode, prefill, throughput, shared_prefix, wear_in, steady_decode)
        return {work.__name__: partial(work, generate) for work in known}

    answer_jobs(works)


def answer_jobs(make_works: Callable[[], Works]) -> None:
    """Say "ready" when the works are made, then answer `{"work": name, "repetition": n, "sizes": {...}}` lines until
    stdin ends. Answers go to the process's original stdout; whatever the engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    works = make_works()
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        sizes = Sizes(**job["sizes"]) if "sizes" in job else FULL
        print(json.dumps(works[job["work"]](job["repetition"], sizes)), file=answers)
