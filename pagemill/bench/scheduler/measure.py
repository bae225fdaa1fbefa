"""Puts schedulers through the same work, in turn within every repetition.

Knows what they are called with, not how they work, and no output format."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from pagemill.bench.scheduler.own import OwnScheduler
from pagemill.bench.scheduler.work import SAMPLED_TOKEN, STOP_TOKEN_IDS, SchedulerWork
from pagemill.config.choices import HashAlgorithm
from pagemill.errors import ConfigError

Call = Callable[..., Any]
"""(method of `OwnScheduler`, its arguments) -> its result."""
Values = dict[str, list[float]]
"""Figure -> its value in each repetition."""


class Side:
    """One scheduler, its settings, and its figures so far."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.settings: dict[str, Any] = call("settings")
        self.values: Values = {}

    def note(self, name: str, value: float) -> None:
        """One repetition's value of a figure."""
        self.values.setdefault(name, []).append(value)


@dataclass(frozen=True, slots=True)
class Measured:
    """All sides after the work."""

    own: Side
    peer: Side | None
    num_cached_blocks: int
    """In our prefix cache after the last step."""


def measure(work: SchedulerWork, peer_call: Call | None = None) -> Measured:
    """Do the work on our scheduler, and on the peer's in turn with it. Raises ConfigError for work that cannot be."""
    work.check()
    begin = (work.settings(), SAMPLED_TOKEN, list(STOP_TOKEN_IDS))
    scheduler = OwnScheduler(*begin)
    own = Side(lambda method, *args: getattr(scheduler, method)(*args))
    peer = None
    if peer_call is not None:
        peer_call("__init__", *begin)
        peer = Side(peer_call)
    sides = [own] if peer is None else [own, peer]
    with _unfrozen_afterwards():
        _fill(work, sides)
        _admissions(work, sides)
        for first, end in work.groups():
            _decodes(work, sides, first, end)
        num_cached_blocks = scheduler.num_cached_blocks()
        _hashes(work, sides)
    return Measured(own, peer, num_cached_blocks)


@contextmanager
def _unfrozen_afterwards() -> Iterator[None]:
    """Undo `gc.freeze`, by which a scheduler keeps what stays out of the collector's way, as a server does."""
    try:
        yield
    finally:
        gc.unfreeze()


def _fill(work: SchedulerWork, sides: list[Side]) -> None:
    """Give every block of the pool some content."""
    for index in range(work.num_fillers()):
        prompt = work.prompt(index)
        for side in sides:
            side.call("run", prompt)
    for side in sides:
        side.call("settle")


def _admissions(work: SchedulerWork, sides: list[Side]) -> None:
    """A long prompt that is new, then the same again; the first repetition is the warm-up."""
    name = f"admit_{work.admitted_tokens // 1024}k"
    full_hit = (work.admitted_tokens - 1) // work.block_size * work.block_size
    for repetition in range(work.num_repetitions + 1):
        prompt = work.prompt(work.num_fillers() + repetition)
        for kind, expected in (("new", 0), ("cached", full_hit)):
            for side in sides:
                got = side.call("admit", prompt)
                if got["cached_tokens"] != expected:
                    raise RuntimeError(f"{side.settings['engine']} found {got['cached_tokens']} tokens, not {expected}")
                if repetition:
                    suffix = "_new" if kind == "new" else ""
                    side.note(f"{name}{suffix}_ms", got["seconds"] * 1e3)
                    side.note(f"{name}{suffix}_bytes", got["bytes"])


def _decodes(work: SchedulerWork, sides: list[Side], first: int, end: int) -> None:
    """Steady decodes of `end` requests, those before `first` run already."""
    prompts = work.short_prompts(first, end)
    for side in sides:
        side.call("start", prompts, work.settings()["max_model_len"])
        side.call("settle")
        side.call("steps", work.num_warmup_steps)
    for _ in range(work.num_repetitions):
        for side in sides:
            times_ms = [seconds * 1e3 for seconds in side.call("steps", work.num_steps)]
            side.note(f"step_ms_{end}", median(times_ms))
            side.note(f"step_mean_ms_{end}", mean(times_ms))
    for side in sides:
        side.note(f"step_bytes_{end}", side.call("step_bytes", work.block_size))


def _hashes(work: SchedulerWork, sides: list[Side]) -> None:
    """Every algorithm that an engine has; the first repetition is the warm-up."""
    prompt = work.prompt(0)
    for algorithm in HashAlgorithm:
        for repetition in range(work.num_repetitions + 1):
            for side in sides:
                try:
                    seconds = side.call("hash_seconds", algorithm, prompt)
                except ConfigError:  # a package that is optional
                    continue
                if repetition:
                    side.note(f"hash_ns_per_token_{algorithm}", seconds * 1e9 / len(prompt))
