"""Heads that guess all tokens in one pass (P-EAGLE) change no token, and guess what they do in plain PyTorch: with
chunked prompts, shared prefixes, preemption."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagemill.config.arguments import EngineArgs
from pagemill.errors import ModelError
from pagemill.launch import build_config
from pagemill.worker.spec_decode.parallel_heads import ParallelHeadProposer
from tests.conformance.drafted_runs import noted_guesses
from tests.conformance.test_speculation_proposers import Run, compare
from tests.fakes.made_heads import MadeHeads
from tests.fakes.tiny_parallel_heads import ReferenceParallelHead, make_parallel_head

pytestmark = pytest.mark.cases(one_in=4)
TIE = 2e-3
"""Logits this close may change places: sums in another order differ by as much."""
KINDS = {
    "mapped": {"draft_vocab_size": 100},
    "normed": {"norm_before_residual": True, "norm_before_fc": True, "key": "ptd_token_id"},
    "normed apart": {"fc_norm": True},
    "own embeddings": {"own_embeddings": True, "norm_output": True, "key": "pard_token"},
}


def make(folder, kind, seed, **changes):
    return make_parallel_head(folder, seed, **KINDS[kind] | changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return MadeHeads(tmp_path_factory, make)


@pytest.fixture
def guesses(monkeypatch):
    return noted_guesses(monkeypatch, ParallelHeadProposer)


def check(guesses, target, head, one_in):
    """Compare with the reference; returns how many guesses there were."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    reference = ReferenceParallelHead(Path(head), model)
    count = 0
    for text, drafts in guesses[::one_in]:
        if not drafts or len(text) == 1:
            continue
        for logits, draft in zip(reference.logits(text, drafts), drafts, strict=True):
            assert logits.max() - logits[draft] < TIE, (text, drafts)
            count += 1
    return count


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_speculation_in_one_pass_changes_no_text_and_guesses_as_published(made, guesses, kind, seed):
    target, head = made(kind, seed)
    _, drafted = compare(target, {"model": head}, depth=1 + seed % 2)
    assert drafted.stats.drafts.num_draft_tokens > 300
    assert check(guesses, target, head, 7) > 100


def test_speculation_in_one_pass_after_preemption(made, guesses):
    target, head = made("mapped")
    plain, drafted = compare(target, {"model": head}, num_gpu_blocks_override=19)
    assert drafted.stats.num_preemptions
    assert drafted.stats.prefix_cache_hits >= 0 < plain.stats.num_preemptions
    assert check(guesses, target, head, 11) > 30


def test_speculation_in_one_pass_is_known_from_the_checkpoint(made, tmp_path):
    target, head = made("mapped")
    config = build_config(EngineArgs(target, device="cpu", spec_model=head))
    assert config.speculation.speculative_config.method == "peagle"
    paired = make_parallel_head(tmp_path / "paired", speculators=target, draft_vocab_size=100)
    config = build_config(EngineArgs(str(paired), device="cpu"))
    assert config.facts.name == target
    asked = config.speculation.speculative_config
    assert (asked.method, asked.num_speculative_tokens) == ("peagle", 3)


def test_speculation_in_one_pass_with_a_broken_head_only_loses_its_drafts(made, guesses, tmp_path):
    target, _ = made("mapped")
    head = make_parallel_head(tmp_path / "head", draft_vocab_size=100)
    tensors = load_file(head / "model.safetensors")
    tensors["mask_hidden"][:] = torch.nan
    save_file(tensors, head / "model.safetensors")
    compare(target, {"model": str(head)})
    assert {len(drafts) for _, drafts in guesses} <= {0, 1}
    assert any(drafts for _, drafts in guesses)


REFUSED = [
    ({"key": "mask_token_id", "mask_token_id": 320}, (), "mask_token_id=320 is not within 0 to 319"),
    ({"mask_token_id": "x"}, (), "mask_token_id='x' is not within 0 to 319"),
    ({}, ("mask_hidden",), "lacks tensors of the architecture: mask_hidden"),
    ({"hidden_size": 32, "head_dim": 8}, (), r"mask_hidden has shape|is a head for models of hidden size 32"),
]


@pytest.mark.parametrize(("changes", "drop", "message"), REFUSED)
def test_speculation_refuses_a_head_for_one_pass_that_is_none(made, tmp_path, changes, drop, message):
    target, _ = made("mapped")
    head = make_parallel_head(tmp_path / "head", **changes)
    tensors = load_file(head / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in drop}, head / "model.safetensors")
    with pytest.raises((ModelError, ValueError), match=f"speculative_config: .*({message})"):
        Run(target, {"model": str(head)})
