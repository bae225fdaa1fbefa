"""Heads that guess a block in one pass (DFlash) change no token, and guess what they do in plain PyTorch: with chunked
prompts, shared prefixes, preemption."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagemill.config.arguments import EngineArgs
from pagemill.errors import ModelError
from pagemill.launch import build_config
from pagemill.worker.spec_decode.block_heads import BlockHeadProposer
from tests.conformance.drafted_runs import noted_guesses
from tests.conformance.test_speculation_proposers import SHARED, Run, compare
from tests.fakes.made_heads import MadeHeads
from tests.fakes.tiny_block_heads import BLOCK, ReferenceBlockHead, make_block_head

pytestmark = pytest.mark.cases(one_in=4)
TIE = 2e-3
"""Logits this close may change places: sums in another order differ by as much."""
WINDOW = 24
WARM_UP = 0
"""With which no prompt begins, but texts of steps before the first request, whose blocks may be anybody's."""
KINDS = {
    "plain": {},
    "mapped": {"draft_vocab_size": 100, "own_embeddings": True, "attention_bias": True},
    "windows": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
    },
    "causal": {"dflash_config": {"causal": True, "block_size": BLOCK, "input_embedding_scale": 2.0}},
}


def make(folder, kind, seed):
    return make_block_head(folder, seed, **KINDS[kind])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return MadeHeads(tmp_path_factory, make)


@pytest.fixture
def guesses(monkeypatch):
    return noted_guesses(monkeypatch, BlockHeadProposer)


def check(guesses, target, head, one_in):
    """Compare with the reference; returns how many guesses there were."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    reference = ReferenceBlockHead(Path(head), model)
    count = 0
    for text, drafts in guesses[::one_in]:
        if not drafts or len(text) == 1 or text[0] == WARM_UP:
            continue
        for logits, draft in zip(reference.logits(text, len(drafts)), drafts, strict=True):
            assert logits.max() - logits[draft] < TIE, (text, drafts)
            count += 1
    return count


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_speculation_of_blocks_changes_no_text_and_guesses_as_published(made, guesses, kind, seed):
    target, head = made(kind, seed)
    _, drafted = compare(target, {"model": head}, depth=1 + seed % 2, num_gpu_blocks_override=200)
    assert drafted.stats.drafts.num_draft_tokens > 300
    assert check(guesses, target, head, 7) > 100
    assert {len(drafts) for _, drafts in guesses} >= {4}


def test_speculation_of_whole_blocks_by_default(made, guesses):
    target, head = made("plain")
    compare(target, {"model": head, "num_speculative_tokens": None})
    assert max(len(drafts) for _, drafts in guesses) == BLOCK - 1
    assert check(guesses, target, head, 7) > 100


def test_speculation_of_blocks_in_blocks_that_were_found(made, guesses):
    target, head = made("plain")
    prompts = {str(number): [*SHARED * 3, number + 30] for number in range(9)}
    _, drafted = compare(target, {"model": head}, prompts=prompts)
    assert drafted.stats.prefix_cache_hits > 6 * 48
    assert check(guesses, target, head, 7) > 100


def test_speculation_of_blocks_after_preemption(made, guesses):
    target, head = made("plain")
    _, drafted = compare(target, {"model": head}, num_gpu_blocks_override=19)
    assert drafted.stats.num_preemptions
    assert check(guesses, target, head, 11) > 30


def test_speculation_of_blocks_up_to_the_longest_text(made, guesses):
    target, head = made("plain")
    _, drafted = compare(target, {"model": head}, max_model_len=72, params={"max_tokens": 71})
    assert drafted.finish["first"].reason.value == "length"
    assert {len(drafts) for _, drafts in guesses} == {0, 1, 2, 3, 4}
    assert check(guesses, target, head, 7) > 100


def test_speculation_of_blocks_in_bfloat16(made):
    target, head = made("plain")
    _, drafted = compare(target, {"model": head}, dtype="bfloat16")
    assert drafted.stats.drafts.num_draft_tokens > 300


def test_speculation_of_blocks_is_known_from_the_checkpoint(made, guesses, tmp_path):
    target, head = made("plain")
    config = build_config(EngineArgs(target, device="cpu", spec_model=head))
    asked = config.speculation.speculative_config
    assert (asked.method, asked.num_speculative_tokens) == ("dflash", BLOCK - 1)
    paired = str(make_block_head(tmp_path / "paired", speculators=target, draft_vocab_size=100))
    config = build_config(EngineArgs(paired, device="cpu"))
    assert config.facts.name == target
    asked = config.speculation.speculative_config
    assert (asked.method, asked.num_speculative_tokens) == ("dflash", BLOCK - 1)
    compare(target, {"model": paired})
    assert check(guesses, target, paired, 7) > 100


def test_speculation_of_blocks_with_a_broken_head_only_loses_its_drafts(made, guesses, tmp_path):
    target, _ = made("plain")
    head = make_block_head(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    tensors["norm.weight"][:] = torch.nan
    save_file(tensors, head / "model.safetensors")
    compare(target, {"model": str(head)})
    assert {len(drafts) for _, drafts in guesses} == {0}


REFUSED = [
    ({"dflash_config": {"mask_token_id": 320}}, {}, "mask_token_id=320 is not within 0 to 319"),
    ({"dflash_config": {"mask_token_id": None}}, {}, "mask_token_id=None is not within 0 to 319"),
    (
        {"dflash_config": {"target_layer_ids": [0, 4]}},
        {},
        r"target_layer_ids=\[0, 4\] are not layers of .*ids are 0 to",
    ),
    ({"block_size": 1}, {}, "block_size=1 is not within 2 to 256"),
    ({"dflash_config": {"projector_type": "domino"}}, {}, "projector_type='domino' is not supported"),
    ({"dflash_config": {"causal": "no"}}, {}, "causal='no' is to be true or false"),
    (
        {"vocab_size": 300, "dflash_config": {"mask_token_id": 5}},
        {},
        "has a vocabulary of 300 tokens, and .* one of 320",
    ),
    ({"hidden_size": 32}, {}, "is a head for models of hidden size 32, and .* has 64"),
    ({"hidden_size": 32, "target_hidden_size": 64}, {}, "has no embeddings of its own, and its hidden_size=32"),
    (
        {},
        {"num_speculative_tokens": BLOCK},
        f"num_speculative_tokens={BLOCK} is more than .* guesses in a block; at most",
    ),
    (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": False},
        {},
        "layer 0 sees what follows and has a window",
    ),
    ({"layer_types": ["sliding_attention"] * 2}, {}, "layer 0 is of kind sliding_attention, and config.json has no"),
]


@pytest.mark.parametrize(("changes", "asked", "message"), REFUSED)
def test_speculation_refuses_a_head_for_blocks_that_does_not_fit(made, tmp_path, changes, asked, message):
    target, _ = made("plain")
    head = make_block_head(tmp_path / "head", **changes)
    with pytest.raises((ModelError, ValueError), match=f"speculative_config: .*({message})"):
        Run(target, {"model": str(head)} | asked)


def test_speculation_refuses_a_head_for_blocks_that_lacks_tensors(made, tmp_path):
    target, _ = made("plain")
    head = make_block_head(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    del tensors["layers.1.self_attn.k_norm.weight"]
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError, match=r"speculative_config: .*lacks tensors .*layers\.1\.self_attn\.k_norm"):
        Run(target, {"model": str(head)})
