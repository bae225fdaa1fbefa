"""The loop of one engine's process: read a job from stdin, run it, answer with one JSON line on stdout.

Knows no engine: each file beside this one hands `serve_jobs` a function that builds its `Generate`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import workload

Generate = Callable[[list[list[int]], int], None]
"""Greedily generate exactly num_tokens for each prompt of token ids."""


def _timed(generate: Generate, prompts: list[list[int]], num_tokens: int) -> float:
    start = time.perf_counter()
    generate(prompts, num_tokens)
    return time.perf_counter() - start


def single_decode(generate: Generate, repetition: int) -> float:
    """Tokens per second of one stream: 128 tokens, less the time of the first."""
    first = _timed(generate, workload.single(repetition), 1)
    whole = _timed(generate, workload.single(repetition + 50), 128)
    return 127 / (whole - first)


def prefill(generate: Generate, repetition: int) -> float:
    """Prompt tokens per second of one prompt of 512."""
    return 512 / _timed(generate, workload.prefill(repetition), 1)


def throughput(generate: Generate, repetition: int) -> float:
    """Output tokens per second of 64 requests of 128 in, 128 out."""
    return 64 * 128 / _timed(generate, workload.throughput(repetition), 128)


def shared_prefix(generate: Generate, repetition: int) -> float:
    """Requests per second: 32 at once, 512 shared and 32 own tokens in, 32 out."""
    return 32 / _timed(generate, workload.shared_prefix(repetition), 32)


WORKS = {work.__name__: work for work in (single_decode, prefill, throughput, shared_prefix)}


def serve_jobs(build: Callable[[], Generate]) -> None:
    """Build the engine, warm up, say "ready", then answer `{"work": name, "repetition": n}` lines until stdin ends.

    Answers go to the process's original stdout; whatever the engine prints goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = build()
    generate([workload.tokens(1, 16)], 8)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(WORKS[job["work"]](generate, job["repetition"])), file=answers)
