"""Every family of models against transformers, in float32, with the variants that its configurations have: logits of a
prompt whole, in chunks and token by token; greedy continuations in batches; and two tensor-parallel ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.errors import ModelError
from pagemill.messages.worker_rank import WorkerRank
from pagemill.model.kernels.native import library
from tests.conformance.reference import TIE_GAP, compare_greedy
from tests.conformance.test_architectures import PROMPT, relative_error
from tests.fakes.engine_setup import core_request
from tests.fakes.paged import PagedModel
from tests.fakes.ranks import record, replay, run_ranks
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_families import FAMILIES
from tests.fakes.tiny_states import STATES

PROMPTS = {f"r{size}": PROMPT[size : 2 * size] for size in (37, 5, 20)}
AT_ONCE = 8
"""Families that two processes replay one after the other."""


class Runs:
    """What is made of each family once: a checkpoint, the model of transformers, an engine's run, two ranks' runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths: dict[str, Path] = {}
        self._recordings: dict[str, Any] = {}
        self._ranks: dict[str, Any] = {}

    def path(self, case: str) -> Path:
        if case not in self._paths:
            architecture, changes = FAMILIES[case]
            self._paths[case] = make_checkpoint(self.folder / case, architecture, **changes)
        return self._paths[case]

    def reference(self, case: str) -> Any:
        """Falcon's own attention adds its ALiBi twice, and torch's, which adds it once, gets it in bfloat16."""
        from transformers import AutoModelForCausalLM
        from transformers.models.bloom import modeling_bloom
        from transformers.models.falcon import modeling_falcon

        modeling_falcon.build_alibi_tensor = modeling_bloom.build_alibi_tensor
        how = "sdpa" if case == "falcon-rw" else "eager"
        path = self.path(case)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=how).eval()

    def recording(self, case: str) -> Any:
        """Prompts in chunks beside each other, more of them than there are slots."""
        if case not in self._recordings:
            requests = [core_request(name, ids, max_tokens=8, temperature=0.0) for name, ids in PROMPTS.items()]
            self._recordings[case] = record(self.path(case), requests, max_num_seqs=2, max_num_batched_tokens=16)
        return self._recordings[case]

    def ranks(self, case: str) -> list[Any]:
        """What each of two ranks makes of the family's recording."""
        if case not in self._ranks:
            names = list(FAMILIES)
            first = names.index(case) // AT_ONCE * AT_ONCE
            cases = {name: self.recording(name) for name in names[first : first + AT_ONCE]}
            folder = self.folder / f"ranks{first}"
            folder.mkdir(exist_ok=True)
            results = run_ranks(2, folder, replays, cases, folder)
            for name in cases:
                self._ranks[name] = [result[name] for result in results]
        return self._ranks[case]


def replays(rank: int, save: Any, recordings: dict[str, Any], folder: Path) -> None:
    results = {}
    for number, (name, recording) in enumerate(recordings.items()):
        address = f"file://{folder}/rendezvous{number}"
        me = WorkerRank(
            rank=rank,
            local_rank=rank,
            world_size=2,
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            init_address=address,
        )
        results[name] = replay(recording, me)
    save(results)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_equal_the_reference_whole_chunked_and_one_by_one(runs: Runs, case: str) -> None:
    with torch.inference_mode():
        theirs = runs.reference(case)(torch.tensor([PROMPT])).logits[0]
    model = PagedModel.load(runs.path(case), max_len=512)
    assert relative_error(model.logits(PROMPT), theirs) < 1e-3
    assert relative_error(model.logits(PROMPT, chunk=16), theirs) < 1e-3
    assert relative_error(model.logits(PROMPT[:40], chunk=1), theirs[:40]) < 1e-3


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_continuations_in_a_batch_equal_the_reference(runs: Runs, case: str) -> None:
    found = runs.recording(case).tokens
    reference = runs.reference(case)
    for name, prompt in PROMPTS.items():
        assert len(found[name]) == 8 or found[name][-1] == 2
        difference = compare_greedy(reference, prompt, found[name])
        assert difference is None or difference.gap < TIE_GAP, difference


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("gemma3n", "hidden_activation", "silu"),
        ("llama4", "hidden_act", "gelu"),
        ("mamba", "hidden_act", "gelu"),
        ("mamba2", "hidden_act", "gelu"),
        ("jamba", "hidden_act", "relu"),
        ("bamba", "hidden_act", "relu"),
        ("granite-hybrid", "hidden_act", "gelu"),
        ("falcon-h1", "hidden_act", "gelu"),
        ("qwen3-next", "hidden_act", "gelu"),
        ("olmoe", "clip_qkv", 0.3),
        ("phi", "tie_word_embeddings", True),
    ],
)
def test_a_field_that_nothing_here_computes_is_refused_by_name(
    tmp_path: Path, case: str, field: str, value: object
) -> None:
    architecture, changes = (FAMILIES | STATES)[case]
    path = make_checkpoint(tmp_path, architecture, **{**changes, field: value})
    with pytest.raises(ModelError, match=f"{field}={value!r} is not supported for {architecture}"):
        PagedModel.load(path)


FIRST = {architecture: case for case, (architecture, _) in reversed(FAMILIES.items())}
"""Architecture -> the first of its cases."""


@pytest.mark.parametrize("case", [*FIRST.values(), "gemma4-experts", "phi-qk-norm", "llama4-two-experts"])
def test_layers_are_one_native_call_where_the_documentation_says_so(runs: Runs, case: str) -> None:
    found = library()
    if found is None or found.isa() == b"portable":
        pytest.skip("this machine has no native plan")
    model = PagedModel.load(runs.path(case), "bfloat16", max_len=128)
    model.logits(PROMPT[:8])
    assert (model.model._plan is not None) == model.model.plans_natively


@pytest.mark.parametrize("case", FAMILIES)
def test_two_tensor_parallel_ranks_equal_one(runs: Runs, case: str) -> None:
    recording = runs.recording(case)
    for result in runs.ranks(case):
        for ours, expected in zip(result.logits, recording.logits, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        for mine, wanted in zip(result.outputs, recording.outputs, strict=True):
            assert mine.token_ids.tolist() == wanted.token_ids.tolist()
