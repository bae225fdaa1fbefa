"""Drafts of a model of several pipeline stages: the last stage proposes and accepts, the others are told, and outputs
are those of one worker."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.messages.worker_rank import WorkerRank
from tests.fakes.engine_setup import core_request
from tests.fakes.made_heads import HEADS, OWN_LAYERS
from tests.fakes.masked_worker import forms, wide_table
from tests.fakes.ranks import Recording, Replay, record, replay, run_ranks
from tests.fakes.tiny_checkpoint import make_checkpoint

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.7, "seed": 5, "top_k": 12},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2},
}
FORM = {"looping": StructuredOutputsParams(regex="(ab){4,9}c")}
PROMPTS = {
    "looping": [7, 8, 9, 10] * 8,
    "short": [5],
    "chunked": [11, 12, 13] * 11 + [4],
    "late": [30, 31, 32, 33] * 3,
}
CUSTOM = {"method": "custom_class", "model": f"{__name__.rpartition('.')[0]}.late_proposer:LateNgram"}
METHODS: dict[str, tuple[dict[str, Any], int]] = {
    "ngram": ({"method": "ngram"}, 2),
    "suffix": ({"method": "suffix", "suffix_decoding_min_token_prob": 0.01}, 2),
    "custom": (CUSTOM, 2),
    "ngram, three stages": ({"method": "ngram"}, 3),
    "standard": ({"method": "ngram", "rejection_sample_method": "standard"}, 2),
}


NUM_PARTS = 2
"""Each with kinds of models over two stages and others over three."""


def requests(params: dict[str, Any]) -> list[Any]:
    return [core_request(name, ids, **{"max_tokens": 30} | params) for name, ids in PROMPTS.items()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


def replays(rank: int, save: Any, recordings: dict[str, Any], stages: dict[str, int], folder: Path) -> None:
    """All recordings on this rank, where it is one of their stages."""
    results = {}
    for number, (name, recording) in enumerate(recordings.items()):
        if rank < stages[name]:
            me = WorkerRank(
                rank=rank,
                local_rank=rank,
                world_size=stages[name],
                tensor_parallel_size=1,
                pipeline_parallel_size=stages[name],
                init_address=f"file://{folder}/rendezvous{number}",
            )
            results[name] = replay(recording, me)
    save(results)


def check_equal(recordings: dict[str, Recording], stages: dict[str, int], ranks: list[dict[str, Replay]]) -> None:
    """Tokens, and drafts after each step, on the last stage; none on the others."""
    for name, recording in recordings.items():
        *others, last = (results[name] for results in ranks[: stages[name]])
        for ours, expected in zip(last.outputs, recording.outputs, strict=True):
            for field in ("slots", "token_ids", "counts", "verified"):
                np.testing.assert_array_equal(getattr(ours, field), getattr(expected, field), f"{name}: {field}")
            assert (ours.drafts is None) == (expected.drafts is None), name
            if ours.drafts is not None and expected.drafts is not None:
                np.testing.assert_array_equal(ours.drafts.token_ids, expected.drafts.token_ids, name)
        assert not any(len(output.slots) for other in others for output in other.outputs)


@pytest.mark.slow
def test_outputs_and_drafts_are_those_of_one_worker(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 16}
    recordings, stages, plain = {}, {}, {}
    for sampling, params in SAMPLING.items():
        plain[sampling] = record(checkpoint, requests(params), **settings).tokens
        for method, (asked, count) in METHODS.items():
            if sampling != "greedy" and method not in ("ngram", "standard"):
                continue  # who proposes sees tokens, however they were sampled
            asked = {"num_speculative_tokens": 3, "adaptive": False} | asked
            name = f"{sampling}, {method}"
            made = record(checkpoint, requests(params), **settings, speculative_config=asked, depth=1 + len(stages) % 2)
            if method != "standard" or sampling != "drawn":
                assert made.tokens == plain[sampling], name
            assert sum(int(output.verified.sum()) for output in made.outputs if output.verified is not None) > 8, name
            recordings[name], stages[name] = made, count
    asked = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    recordings["formed"] = record(
        checkpoint, requests(SAMPLING["greedy"]), grammar_of=forms(FORM, wide_table()), **settings,
        speculative_config=asked,
    )  # fmt: skip
    stages["formed"] = 2
    ranks = run_ranks(3, tmp_path, replays, recordings, stages, tmp_path)
    check_equal(recordings, stages, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_models_propose_on_the_last_stage_what_they_do_on_one_worker(
    checkpoint: Path, tmp_path: Path, part: int
) -> None:
    """Drafts are accepted by chance: what a head guesses after them follows from hidden states of all stages."""
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 12}
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.5, 0.3]}
    recordings, stages = {}, {}
    for number, (kind, make) in list(enumerate((HEADS | OWN_LAYERS).items()))[part::NUM_PARTS]:
        made = make(tmp_path / kind, 0)
        path, asked = (checkpoint, {"model": str(made)}) if kind in HEADS else (made, {"method": "mtp"})
        asked |= {"num_speculative_tokens": 3, **rates}
        recording = record(path, requests(SAMPLING["greedy"]), **settings, speculative_config=asked)
        verified = [output for output in recording.outputs if output.verified is not None]
        assert sum(int((output.counts - 1).sum()) for output in verified if output.counts is not None) > 30, kind
        recordings[kind], stages[kind] = recording, 2 + number // NUM_PARTS % 2
    ranks = run_ranks(3, tmp_path, replays, recordings, stages, tmp_path)
    check_equal(recordings, stages, ranks)
