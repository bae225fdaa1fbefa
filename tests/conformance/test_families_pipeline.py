"""Every family over two pipeline stages: logits equal those of the whole model, and engines of two processes, one of
each kind of family, sample the same tokens."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.errors import ConfigError
from pagemill.launch import build_config
from pagemill.messages.worker_rank import WorkerRank
from pagemill.model.distributed.group import SoloGroup
from pagemill.model.distributed.parallel_groups import solo_groups
from tests.conformance.test_architectures import PROMPT, relative_error
from tests.fakes.engine_setup import core_request
from tests.fakes.paged import PagedModel
from tests.fakes.ranks import record, replay, run_ranks
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_families import FAMILIES
from tests.fakes.tiny_states import STATES

NEVER = ("gemma3n", "gemma3n-alone", "gemma4")
"""Layers that have more than hidden states in common."""
EVERY = {name: case for name, case in (FAMILIES | STATES).items() if name not in NEVER}
SERVED = ("stablelm-12b", "falcon-rw", "olmoe", "gpt-oss", "llama4", "mamba", "bamba", "falcon-h1")
"""Attention and MLP of one input, ALiBi, experts, sinks, chunks, states alone, states and attention in turn and side
by side."""
PROMPTS = {f"r{size}": PROMPT[size : 2 * size] for size in (37, 5, 20)}


class StageGroup(SoloGroup):
    """The group of one of two stages that a test carries hidden states between."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.rank = stage
        self.size = 2


class Checkpoints:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def path(self, case: str) -> Path:
        if case not in self._made:
            architecture, changes = (FAMILIES | STATES)[case]
            self._made[case] = make_checkpoint(self._folder / case, architecture, **changes)
        return self._made[case]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("stages"))


def stage_model(path: Path, stage: int) -> PagedModel:
    groups = dataclasses.replace(solo_groups(), pp=StageGroup(stage))
    return PagedModel.load(path, groups=groups, max_len=128)


def kept(model: PagedModel) -> dict[str, Any]:
    """What each layer keeps of a request."""
    return {name: layer.kv_spec(16, "float32") for name, layer in model.model.cache_layers().items()}


@pytest.mark.parametrize("case", EVERY)
def test_two_stages_compute_what_the_whole_model_does(checkpoints: Checkpoints, case: str) -> None:
    path = checkpoints.path(case)
    whole = PagedModel.load(path, max_len=128)
    first, last = (stage_model(path, stage) for stage in (0, 1))
    assert kept(first) | kept(last) == kept(whole)
    assert not kept(first).keys() & kept(last).keys()
    found = last.logits(PROMPT, 32, hidden=first.hidden(PROMPT, 32))
    assert relative_error(found, whole.logits(PROMPT, 32)) < 1e-5


def test_served_by_two_processes_the_tokens_are_those_of_one(checkpoints: Checkpoints, tmp_path: Path) -> None:
    requests = [core_request(name, ids, max_tokens=8, temperature=0.0) for name, ids in PROMPTS.items()]
    settings = {"depth": 2, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 96}
    recordings = {case: record(checkpoints.path(case), requests, **settings) for case in SERVED}
    _, last = run_ranks(2, tmp_path, replays, recordings, tmp_path)
    for case, recording in recordings.items():
        result = last[case]
        for ours, wanted in zip(result.outputs, recording.outputs, strict=True):
            assert ours.token_ids.tolist() == wanted.token_ids.tolist(), case
        for ours, wanted in zip(result.logits, recording.logits, strict=True):
            assert relative_error(ours, wanted) < 1e-4, case


@pytest.mark.parametrize(
    ("case", "why"), [("gemma3n", "num_kv_shared_layers=2"), ("gemma3n-alone", "hidden_size_per_layer_input=8")]
)
def test_layers_that_cannot_be_apart_are_refused(checkpoints: Checkpoints, case: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size=2 does not fit .* for {why} ties"):
        build_config(EngineArgs(str(checkpoints.path(case)), dtype="float32", pipeline_parallel_size=2))
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size=2: .*{why}"):
        stage_model(checkpoints.path(case), 0)


def replays(rank: int, save: Any, recordings: dict[str, Any], folder: Path) -> None:
    results = {}
    for number, (case, recording) in enumerate(recordings.items()):
        me = WorkerRank(
            rank=rank,
            local_rank=rank,
            world_size=2,
            tensor_parallel_size=1,
            pipeline_parallel_size=2,
            init_address=f"file://{folder}/rendezvous{number}",
        )
        results[case] = replay(recording, me)
    save(results)
