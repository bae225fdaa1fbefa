"""Families whose layers keep states - Mamba, Mamba-2, Jamba, Bamba, Granite 4, Falcon-H1, Qwen3-Next - against
transformers, in float32: logits whole, in chunks and token by token, and greedy continuations in batches, from the
prefix cache and after preemption; and two tensor-parallel ranks against one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.catalog.models import MODELS
from pagemill.model.distributed.init import init_distributed
from pagemill.model.distributed.parallel_groups import ParallelSizes
from tests.conformance.served_runs import PROMPTS, ask, check_tokens, serve
from tests.conformance.test_architectures import PROMPT, relative_error
from tests.fakes.paged import PagedModel
from tests.fakes.queued_platform import QueuedPlatform
from tests.fakes.ranks import run_ranks
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_states import STATES

ONE_OF_EACH = [case for case in STATES if "-" not in case or case in ("qwen3-next", "granite-hybrid", "falcon-h1")]
ALONE = ("mamba", "mamba2")
"""States and nothing else."""
ROOM = {"jamba": 9, "qwen3-next": 18}
"""Blocks, so few that requests which grow must give way."""
SETTINGS = {"max_num_batched_tokens": 24, "max_num_seqs": 3}


class Models:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}
        self._references: dict[str, Any] = {}

    def path(self, case: str) -> Path:
        if case not in self._made:
            architecture, changes = STATES[case]
            self._made[case] = make_checkpoint(self._folder / case, architecture, **changes)
        return self._made[case]

    def reference(self, case: str) -> Any:
        from transformers import AutoModelForCausalLM

        if case not in self._references:
            model = AutoModelForCausalLM.from_pretrained(
                self.path(case), dtype=torch.float32, attn_implementation="eager"
            )
            model.config.use_cache = False
            self._references[case] = model.eval()
        return self._references[case]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("case", STATES)
def test_logits_equal_the_reference_whole_chunked_and_one_by_one(models: Models, case: str) -> None:
    with torch.inference_mode():
        theirs = models.reference(case)(torch.tensor([PROMPT])).logits[0]
    model = PagedModel.load(models.path(case), max_len=512)
    assert relative_error(model.logits(PROMPT), theirs) < 1e-3
    assert relative_error(model.logits(PROMPT, chunk=13), theirs) < 1e-3
    assert relative_error(model.logits(PROMPT[:40], chunk=1), theirs[:40]) < 1e-3


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_batches_and_cached_prefixes_equal_the_reference(models: Models, case: str) -> None:
    """A prefix of a model with states ends where a block of them does, which are 512 tokens without attention."""
    shared = 520 if case in ALONE else 140
    begin = (PROMPT * 6)[:shared]
    prompts = {name: [*begin, *ids[:9]] for name, ids in PROMPTS.items()}
    client = serve(models.path(case), max_model_len=560 if case in ALONE else 200, **SETTINGS)
    ask(client, prompts=prompts)
    ask(client, "again", prompts=prompts)
    assert client.cached["longagain"] >= (512 if case in ALONE else 64)
    check_tokens(client, models.reference(case), ("", "again"), prompts=prompts)


@pytest.mark.parametrize("case", ROOM)
def test_preempted_requests_equal_the_reference(models: Models, case: str) -> None:
    prompts = {name: PROMPT[start : start + 30] for name, start in (("a", 0), ("b", 7), ("c", 20), ("d", 33))}
    client = serve(models.path(case), max_model_len=80, num_gpu_blocks_override=ROOM[case], max_num_seqs=4)
    ask(client, prompts=prompts)
    assert client.stats is not None
    assert client.stats.num_preemptions
    check_tokens(client, models.reference(case), prompts=prompts)


@pytest.mark.parametrize("case", ["bamba", "qwen3-next"])
def test_a_device_that_runs_ahead_computes_the_same(models: Models, case: str) -> None:
    client = serve(models.path(case), QueuedPlatform(), attention_backend="TORCH_PAGED", **SETTINGS)
    ask(client)
    ask(client, "again")
    check_tokens(client, models.reference(case), ("", "again"))


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_no_model_with_states_is_one_native_call(models: Models, case: str) -> None:
    assert not MODELS.resolve(STATES[case][0]).plans_natively


def _logits(rank: int, save: Any, paths: dict[str, Path], folder: Path) -> None:
    groups = init_distributed(rank, 2, rank, f"file://{folder}/meet", "gloo", ParallelSizes(tp=2))
    save({case: PagedModel.load(path, groups=groups, max_len=128).logits(PROMPT, 13) for case, path in paths.items()})


def test_two_tensor_parallel_ranks_equal_one(models: Models, tmp_path: Path) -> None:
    """Channels, heads and groups are dealt out; of a single group both ranks have all."""
    paths = {case: models.path(case) for case in STATES}
    for result in run_ranks(2, tmp_path, _logits, paths, tmp_path):
        for case, ours in result.items():
            expected = PagedModel.load(paths[case], max_len=128).logits(PROMPT, 13)
            assert relative_error(ours, expected) < 1e-4, case
