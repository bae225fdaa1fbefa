"""Drafts change no token of models whose layers keep states - Mamba, Mamba-2, Jamba, Bamba, Granite 4, Falcon-H1,
Qwen3-Next - nor what of them is cached: states after drafts that are not accepted are never read."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.errors import ConfigError
from pagemill.launch import build_config
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.stats import SchedulerStats
from pagemill.worker.spec_decode.interface import Speculation
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.queued_platform import QueuedPlatform
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_states import STATES
from tests.fakes.toy_proposer import TEXTS, toy_proposer

SEEDS = [0, 1, 2]
CASES = ["mamba", "mamba2", "jamba", "bamba", "granite-hybrid", "falcon-h1", "qwen3-next"]
FEW = {"jamba": 9, "qwen3-next": 22}
"""KV cache blocks with which requests are preempted."""
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 4},
    "stopping": {"temperature": 0.0, "stop_token_ids": list(range(0, 300, 3))},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("states")
    return {case: str(make_checkpoint(folder / case, STATES[case][0], **STATES[case][1])) for case in CASES}


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    with toy_proposer():
        yield


def prompt_of(seed: int, place: int) -> list[int]:
    some: list[int] = np.random.default_rng([seed, place]).integers(4, 300, 7 + place).tolist()
    return (some * 9)[: 50 + 4 * place + seed]


def requests(seed: int, before: Client | None = None) -> list[EngineCoreRequest]:
    """One of each kind; with `before`, what goes on where those that it ran ended, so that what they left is found."""
    found = []
    for place, (name, params) in enumerate(ASKED.items()):
        prompt, most = prompt_of(seed, place), 28
        if before is not None:
            prompt, name, most = [*prompt, *before.tokens[name], 7, 8, 9], f"{name} on", 6
        found.append(core_request(name, prompt, **(params | {"max_tokens": most, "min_tokens": min(most, 5)})))
    return found


def run(checkpoint: str, seed: int, proposer: str | None = None, depth: int = 1, **settings: Any) -> Client:
    """What a fresh engine says to the requests of a seed, and to those that go on with them."""
    given = {
        "max_model_len": 160,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 80,
        "max_num_batched_tokens": 64,
        "cpu_threads": 1,
    }
    config = build_config(EngineArgs(checkpoint, device="cpu", dtype="float32", **(given | settings)))
    speculation = None if proposer is None else Speculation(proposer, 4, adaptive=False)
    core = EngineCore(config, UniprocExecutor(Worker(config, speculation=speculation)), depth=depth)
    client = Client(core)
    client.add(*requests(seed))
    client.run()
    client.add(*requests(seed, client))
    client.run()
    core.check_integrity()
    client.stats = core.stats()
    core.shutdown()
    return client


def stats_of(client: Client) -> SchedulerStats:
    assert client.stats is not None
    return client.stats


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_the_text_is_that_without_drafts(checkpoints: dict[str, str], case: str, seed: int) -> None:
    expected = run(checkpoints[case], seed)
    first = [request.prompt_token_ids for request in requests(seed)]
    second = [request.prompt_token_ids for request in requests(seed, expected)]
    TEXTS[:] = [[*prompt, *tokens] for prompt, tokens in zip([*first, *second], expected.tokens.values(), strict=True)]
    circumstances: list[dict[str, Any]] = [{}, {"depth": 2}, {"max_num_batched_tokens": 12}]
    if case in FEW:
        circumstances[0] = {"num_gpu_blocks_override": FEW[case]}
    for place in (seed, seed + 1):  # each of them with some seed
        given = circumstances[place % len(circumstances)]
        proposer = ["toy", "right", "random", "wrong"][(place + seed) % 4]
        found = run(checkpoints[case], seed, proposer, **given)
        assert found.tokens == expected.tokens, (proposer, given)
        assert {name: end.reason for name, end in found.finish.items()} == {
            name: end.reason for name, end in expected.finish.items()
        }
        counts = stats_of(found).drafts
        assert counts is not None and counts.num_draft_tokens > 20
        if proposer in ("toy", "right"):
            assert counts.num_accepted_tokens > counts.num_draft_tokens / 3
        if "num_gpu_blocks_override" in given:
            assert stats_of(found).num_preemptions
        elif "depth" in given:  # a step in flight may have computed the last token
            assert stats_of(found).prefix_cache_hits >= stats_of(expected).prefix_cache_hits
        elif "max_num_batched_tokens" not in given:
            assert stats_of(found).prefix_cache_hits == stats_of(expected).prefix_cache_hits
    assert stats_of(expected).prefix_cache_hits or case.startswith("mamba"), "a state of theirs is of 512 tokens"


def test_drafts_on_devices_that_run_ahead_are_refused(checkpoints: dict[str, str]) -> None:
    settings = {"max_model_len": 96, "num_gpu_blocks_override": 40, "attention_backend": "TORCH_PAGED"}
    config = build_config(EngineArgs(checkpoints["bamba"], device="cpu", dtype="float32", **settings))
    worker = Worker(config, platform=QueuedPlatform(), speculation=Speculation("ngram", 4))
    with pytest.raises(ConfigError, match=r"layer '.*' keeps a state, from which drafts are taken back on CPUs only"):
        EngineCore(config, UniprocExecutor(worker, overlap=True))
