"""Heads that propose from hidden states change no token, and guess what they do in plain PyTorch: with chunked prompts,
shared prefixes, preemption, forms and stops."""

import json
import shutil
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagemill.errors import ConfigError, ModelError
from pagemill.worker.spec_decode.heads import HeadProposer
from tests.conformance.drafted_runs import noted_guesses
from tests.conformance.test_speculation_proposers import Run, compare
from tests.fakes.made_heads import MadeHeads
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_heads import ReferenceHead, make_head
from tests.fakes.tiny_mtp import ReferenceMTP, ReferenceQwenMTP, make_mtp, make_qwen_mtp

TIE = 2e-3
"""Logits this close may change places: sums in another order differ by as much."""
KINDS = {
    "eagle3": ("eagle3", {"draft_vocab_size": 100}),
    "before residual": ("eagle3", {"draft_vocab_size": 100, "norm_before_residual": True, "norm_before_fc": True}),
    "output norm": ("eagle3", {"norm_output": True, "fc_norm": True, "own_embeddings": True}),
    "eagle": ("eagle", {}),
}


def make(folder, kind, seed, **changes):
    name, fields = KINDS[kind]
    return make_head(folder, name, seed, **fields | changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return MadeHeads(tmp_path_factory, make)


@pytest.fixture
def guesses(monkeypatch):
    return noted_guesses(monkeypatch, HeadProposer)


def check(guesses, target, head, one_in=1):
    """Compare with the reference; returns how many guesses there were."""
    reference = ReferenceHead(head, AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval())
    count = 0
    for text, drafts in guesses[::one_in]:
        for logits, draft in zip(reference.logits(text, drafts), drafts, strict=True):
            assert logits.max() - logits[draft] < TIE, (text, drafts)
            count += 1
    return count


def of(head, method=None, **fields):
    return {"model": head} | ({} if method is None else {"method": method}) | fields


@pytest.mark.parametrize(
    ("kind", "seed"), [*product(("eagle3", "eagle"), range(3)), ("before residual", 0), ("output norm", 0)]
)
def test_speculation_by_a_head_changes_no_text_and_guesses_as_published(made, guesses, tmp_path, kind, seed):
    target, head = made(kind, seed)
    compare(target, of(head), depth=1 + seed % 2)
    assert check(guesses, target, tmp_path / head, 7) > 100


def test_speculation_by_a_head_after_preemption(made, guesses, tmp_path):
    target, head = made("eagle3")
    _, drafted = compare(target, of(head), num_gpu_blocks_override=19)
    assert drafted.stats.num_preemptions
    assert check(guesses, target, tmp_path / head, 11) > 50


def test_speculation_by_a_head_in_blocks_that_were_found(made):
    target, head = made("eagle3")
    shared = [11, 12, 13, 14] * 15
    prompts = {str(number): [*shared, number + 30] for number in range(9)}
    plain, drafted = compare(target, of(head), prompts=prompts, params={"max_tokens": 12})
    assert drafted.stats.prefix_cache_hits == plain.stats.prefix_cache_hits > 6 * 48


def test_speculation_by_a_head_that_is_right(tmp_path):
    """A model whose next token follows from the last one, nearly, and a head that knows how."""
    target = make_checkpoint(tmp_path / "model", "LlamaForCausalLM", tie_word_embeddings=False)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.002
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    head = make_head(tmp_path / "head", "eagle")
    weights = load_file(head / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    size = len(weights["fc.weight"])
    weights["fc.weight"] = torch.cat((torch.diag(tensors["model.norm.weight"]), torch.zeros(size, size)), -1)
    save_file(weights, head / "model.safetensors")
    plain, drafted = compare(str(target), of(str(head)), depth=2)
    assert drafted.acceptance > 0.6
    assert drafted.num_steps < 0.7 * plain.num_steps
    sampled = {"temperature": 0.3, "top_k": 5, "seed": 3, "repetition_penalty": 1.1}
    compare(str(target), of(str(head)), params=sampled)
    stops = {"stop_token_ids": list(range(0, 320, 9)), "min_tokens": 4}
    compare(str(target), of(str(head)), params=stops, max_num_batched_tokens=16)


def test_speculation_by_a_head_as_far_as_it_knows_positions(made, guesses, tmp_path):
    target, head = made("eagle3")
    compare(target, of(head, max_model_len=40), prompts={"chunked": list(range(20, 50)), "short": [5]})
    assert max(len(text) for text, drafts in guesses if drafts) == 41
    assert {len(drafts) for _, drafts in guesses} == {0, 1, 2, 3, 4}


def test_speculation_by_a_checkpoint_that_says_what_it_is_for(made, guesses, tmp_path):
    target, _ = made("eagle3")
    head = make_head(tmp_path / "head", "eagle3", speculators=target, draft_vocab_size=100)
    plain = Run(target)
    assert Run(str(head), {"num_speculative_tokens": 2}).tokens == plain.tokens
    assert max(len(drafts) for _, drafts in guesses) == 2
    guesses.clear()
    assert Run(target, of(str(head))).tokens == plain.tokens
    assert check(guesses, target, head, 11) > 50


def test_speculation_by_a_broken_head_only_loses_its_drafts(made, guesses, tmp_path):
    target, head = made("eagle3")
    broken = tmp_path / "broken"
    shutil.copytree(head, broken)
    weights = load_file(broken / "model.safetensors")
    weights["midlayer.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(weights, broken / "model.safetensors")
    _, drafted = compare(target, of(str(broken)), prompts={"a": [5, 6], "b": [9]})
    assert guesses
    assert drafted.stats.drafts.num_draft_tokens == 0


def edited(head, folder, config=None, weights=None):
    """A copy with fields of its configuration changed, and tensors: those that are None are left out."""
    shutil.copytree(head, folder)
    found = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(found))
    tensors = load_file(folder / "model.safetensors") | (weights or {})
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    return str(folder)


REFUSED = [
    ({"vocab_size": 300}, {}, ConfigError, "has a vocabulary of 300 tokens, and .* one of 320"),
    ({"target_hidden_size": 32}, {}, ConfigError, "is a head for models of hidden size 32, and .* has 64"),
    ({"draft_vocab_size": 400}, {}, ModelError, "draft_vocab_size=400 is not within 1 to 320"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 5]}, {}, ModelError, r"\[1, 5\] are not layers of .*, which has 4"),
    ({"architectures": ["MedusaModel"]}, {}, ModelError, "'MedusaModel' is no head of method 'eagle3'"),
    ({}, {"norm.weight": None}, ModelError, "lacks tensors of the architecture: .*norm.weight"),
    ({}, {"more.weight": torch.ones(1)}, ModelError, "does not use: more.weight"),
    ({}, {"d2t": torch.full((100,), 221)}, ModelError, "d2t has values from 221 to 221, not within 0 to 220"),
]


@pytest.mark.parametrize(("config", "weights", "error", "message"), REFUSED)
def test_speculation_refuses_a_head_that_does_not_go_with_the_model(made, tmp_path, config, weights, error, message):
    target, head = made("eagle3")
    with pytest.raises(error, match=f"(?s)^[^\n]*{message}[^\n]*$"):
        Run(target, of(edited(head, tmp_path / "other", config, weights), "eagle3"))


def test_speculation_refuses_settings_that_a_head_does_not_go_with(made, tmp_path):
    target, head = made("eagle3")
    with pytest.raises(ConfigError, match="method='eagle3' needs model"):
        Run(target, {"method": "eagle3"})
    with pytest.raises(ModelError, match=r"method='mtp' needs layers that predict more tokens .* LlamaForCausalLM"):
        Run(target, {"method": "mtp"})
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=128 is more than fit .* at most 127"):
        Run(target, of(head, num_speculative_tokens=128))
    other = make_head(tmp_path / "head", "eagle3", speculators=target)
    with pytest.raises(
        ConfigError, match=r"is a head for .*, and model='another' of speculative_config is another one"
    ):
        Run(str(other), of("another"))


OWN_LAYERS = {"deepseek_mtp": (make_mtp, ReferenceMTP), "qwen3_next_mtp": (make_qwen_mtp, ReferenceQwenMTP)}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", OWN_LAYERS)
def test_speculation_by_the_layer_of_the_model_itself(guesses, tmp_path, name, seed):
    make, make_reference = OWN_LAYERS[name]
    target = make(tmp_path / "model", seed)
    _, drafted = compare(str(target), {"method": ("mtp", name)[seed % 2]}, depth=1 + seed % 2)
    assert drafted.stats.drafts.num_draft_tokens > 100
    reference = make_reference(target)
    for text, drafts in guesses[::9]:
        for logits, draft in zip(reference.logits(text, drafts), drafts, strict=True):
            assert logits.max() - logits[draft] < TIE, (text, drafts)
