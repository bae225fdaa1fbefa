"""Heads that propose from one hidden state (Medusa, MLP speculators) change no token, and guess what they do in plain
PyTorch: with chunked prompts, preemption, a restart. test_speculation_every_head.py asks them for all else."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagemill.config.arguments import EngineArgs
from pagemill.errors import ConfigError, ModelError
from pagemill.launch import build_config
from pagemill.worker.spec_decode.row_heads import RowHeadsProposer
from tests.conformance.drafted_runs import noted_guesses
from tests.conformance.test_speculation_proposers import PROMPTS, Run, compare
from tests.fakes.made_heads import MadeHeads
from tests.fakes.tiny_row_heads import ReferenceRowHeads, make_medusa, make_mlp_speculator

pytestmark = pytest.mark.cases(one_in=4)
TIE = 2e-3
"""Logits this close may change places: sums in another order differ by as much."""
KINDS = {
    "medusa": (make_medusa, {}),
    "medusa without output heads": (make_medusa, {"layout": "numbers without heads", "num_layers": 1}),
    "medusa by names": (make_medusa, {"layout": "names"}),
    "medusa with one output head": (make_medusa, {"layout": "shared"}),
    "mlp": (make_mlp_speculator, {}),
    "mlp tied": (make_mlp_speculator, {"tie_weights": True, "scale_input": True}),
    "mlp of one size": (make_mlp_speculator, {"inner_dim": 0, "prefix": ""}),
}
BOTH = ["medusa", "mlp tied"]


def make(folder, kind, seed):
    make_heads, fields = KINDS[kind]
    return make_heads(folder, seed, **fields)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return MadeHeads(tmp_path_factory, make)


@pytest.fixture
def guesses(monkeypatch):
    return noted_guesses(monkeypatch, RowHeadsProposer)


def check(guesses, target, heads, one_in=1, most=3):
    """Compare with the reference; returns how many guesses there were."""
    reference = ReferenceRowHeads(Path(heads), AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval())
    count = 0
    for text, drafts in guesses[::one_in]:
        if len(text) == 1:
            continue  # a step that warms up
        assert len(drafts) == most
        for logits, draft in zip(reference.logits(text, drafts), drafts, strict=True):
            assert logits.max() - logits[draft] < TIE, (text, drafts)
            count += 1
    return count


def of(heads, **fields):
    return {"model": heads, "num_speculative_tokens": 3} | fields


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_speculation_by_row_heads_changes_no_text_and_guesses_as_published(made, guesses, kind, seed):
    target, heads = made(kind, seed)
    _, drafted = compare(target, of(heads), depth=1 + seed % 2)
    assert drafted.stats.drafts.num_draft_tokens > 300
    assert check(guesses, target, heads, 7) > 50


@pytest.mark.parametrize("kind", BOTH)
def test_speculation_by_row_heads_after_preemption(made, guesses, kind):
    target, heads = made(kind)
    _, drafted = compare(target, of(heads), num_gpu_blocks_override=19)
    assert drafted.stats.num_preemptions
    assert check(guesses, target, heads, 11) > 30


@pytest.mark.parametrize("kind", BOTH)
def test_speculation_by_row_heads_goes_on_after_a_restart(made, kind):
    target, heads = made(kind)
    plain = Run(target)
    first = Run(target, of(heads), params={"max_tokens": 13})
    prompts = {name: [*prompt, *first.tokens[name]] for name, prompt in PROMPTS.items()}
    second = Run(target, of(heads), params={"max_tokens": 27}, prompts=prompts)
    for name, tokens in plain.tokens.items():
        assert first.tokens[name] + second.tokens[name] == tokens, name


def certain(folder, target, token):
    """Medusa heads that always guess this token: of the one output, other rows are zeros."""
    heads = make_medusa(folder, num_layers=1)
    file = heads / "medusa_lm_head.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    for name, tensor in tensors.items():
        if name.endswith("linear.bias"):
            tensor[:] = 1000.0
        if name.endswith(".1.weight"):
            tensor[token] = 1.0
    save_file(tensors, file)
    return str(heads)


def test_speculation_by_row_heads_that_are_right_takes_fewer_steps(made, tmp_path):
    """A form that leaves one token to choose, and heads that know it."""
    target, _ = made("medusa")
    heads = certain(tmp_path / "heads", target, ord("7") + 3)
    params = {"max_tokens": 40, "logit_bias": {ord("7") + 3: 100.0}}
    plain, drafted = compare(target, of(heads), params=params)
    assert drafted.acceptance > 0.95
    assert drafted.num_steps < 0.5 * plain.num_steps


@pytest.mark.parametrize("kind", BOTH)
def test_speculation_by_row_heads_of_fewer_tokens(made, guesses, kind):
    target, heads = made(kind)
    compare(target, of(heads, num_speculative_tokens=2), prompts={"one": [9, 8, 7]})
    assert check(guesses, target, heads, most=2) > 20


@pytest.mark.parametrize(
    ("kind", "method"), [("medusa", "medusa"), ("medusa by names", "medusa"), ("mlp", "mlp_speculator")]
)
def test_speculation_by_row_heads_is_known_from_the_checkpoint(made, kind, method):
    target, heads = made(kind)
    config = build_config(EngineArgs(target, device="cpu", speculative_config={"model": heads}))
    asked = config.speculation.speculative_config
    assert (asked.method, asked.num_speculative_tokens) == (method, 3)
    named = build_config(EngineArgs(target, device="cpu", spec_method=method, spec_model=heads, spec_tokens=2))
    assert named.speculation.speculative_config.num_speculative_tokens == 2


def test_speculation_by_quantized_row_heads(made):
    target, heads = made("medusa")
    _, plain = compare(target, of(heads), dtype="bfloat16", prompts={"one": [9, 8, 7]})
    _, quantized = compare(target, of(heads, quantization="int8"), dtype="bfloat16", prompts={"one": [9, 8, 7]})
    assert quantized.stats.drafts.num_draft_tokens == plain.stats.drafts.num_draft_tokens


def changed(folder, kind, *, config=None, drop=(), add=(), nan=()):
    """Heads whose files are not as they should be."""
    make_heads, fields = KINDS[kind]
    heads = make_heads(folder, **fields)
    [file] = heads.glob("*.safetensors")
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in drop}
    tensors |= {name: torch.zeros(3) for name in add}
    for name in nan:
        tensors[name][:] = torch.nan
    save_file(tensors, file)
    found = json.loads((heads / "config.json").read_text()) | (config or {})
    (heads / "config.json").write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    return str(heads)


NOT_NUMBERS = [
    pytest.param("medusa", "1.0.linear.bias", 1, id="the second head of Medusa"),
    pytest.param("mlp", "speculator.ln.2.bias", 2, id="the third one of an MLP speculator"),
    pytest.param("mlp tied", "speculator.proj.0.weight", 0, id="the first one"),
]


@pytest.mark.parametrize(("kind", "name", "left"), NOT_NUMBERS)
def test_speculation_by_broken_row_heads_only_loses_its_drafts(made, guesses, tmp_path, kind, name, left):
    target, _ = made(kind)
    compare(target, of(changed(tmp_path / "heads", kind, nan=[name])))
    assert len(guesses) > 100
    assert {len(drafts) for _, drafts in guesses} == {left}


REFUSED = [
    ("medusa", {}, {"num_speculative_tokens": 4}, "num_speculative_tokens=4 is more than the 3 heads of .*; at most 3"),
    ("mlp", {}, {"num_speculative_tokens": 4}, "num_speculative_tokens=4 is more than the 3 heads of .*; at most 3"),
    ("mlp", {"config": {"emb_dim": 32}}, {}, "is a head for models of hidden size 32, and .* has 64"),
    ("mlp", {"config": {"vocab_size": 300}}, {}, "has a vocabulary of 300 tokens, and .* one of 320"),
    ("medusa by names", {"config": {"hidden_size": 32}}, {}, "is a head for models of hidden size 32, and .* has 64"),
    ("medusa", {"config": {"medusa_num_heads": 0}}, {}, "medusa_num_heads=0 .* is not an integer from 1 to 64"),
    ("medusa", {"config": {"medusa_num_heads": "x" * 999}}, {}, "medusa_num_heads='xxx.* is not an integer from"),
    ("mlp", {"config": {"n_predict": None}}, {}, "n_predict=None .* is not an integer from 1 to 64"),
    ("mlp", {"config": {"tie_weights": 1}}, {}, "tie_weights=1 .* is not true or false"),
    ("medusa by names", {"config": {"truncated_vocab_size": 100}}, {}, "truncated_vocab_size=100 is not supported"),
    ("medusa", {"config": {"medusa_num_heads": 2}}, {}, r"tensors that the architecture does not use: 2\.0\.linear"),
    ("medusa", {"drop": ["2.1.linear.bias"]}, {}, r"lacks tensors of the architecture: 2\.1\.linear\.bias"),
    ("medusa", {"drop": ["1.2.weight"]}, {}, r"lacks tensors of the architecture: 1\.2\.weight"),
    ("medusa by names", {"drop": ["lm_heads.1.weight"]}, {}, r"lacks tensors of the architecture: lm_heads\.1\.weight"),
    ("mlp", {"drop": ["speculator.proj.1.weight"]}, {}, r"lacks tensors of the architecture: speculator\.proj\.1"),
    ("mlp", {"add": ["speculator.more.weight"]}, {}, r"does not use: speculator\.more\.weight"),
    ("mlp", {"config": {"inner_dim": 47}}, {}, r"has shape \(320, 48\), expected \(320, 47\)"),
    ("mlp", {}, {"method": "medusa"}, r"its config\.json is not that of heads of method 'medusa'"),
    ("mlp", {}, {"prompt_lookup_min": 2}, "prompt_lookup_min=2 is not read by method='mlp_speculator'"),
    ("medusa", {}, {"max_model_len": 64}, "max_model_len=64 is not read by method='medusa'"),
    ("mlp", {}, {"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2 is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "fields", "message"), REFUSED)
def test_speculation_refuses_row_heads_that_do_not_go_with_the_model(made, tmp_path, kind, changes, fields, message):
    target, _ = made("medusa")
    heads = changed(tmp_path / "heads", kind, **changes)
    with pytest.raises((ConfigError, ModelError), match=f"speculative_config: .*{message}") as raised:
        Run(target, {"model": heads} | ({"num_speculative_tokens": None} | fields))
    assert "\n" not in str(raised.value)


def test_speculation_refuses_medusa_of_another_size(made, tmp_path):
    target, _ = made("medusa")
    heads = make_medusa(tmp_path / "heads", size=32)
    with pytest.raises(ConfigError, match=r"is a head for models of hidden size 32, and .* has 64"):
        Run(target, of(str(heads)))


def test_speculation_by_row_heads_needs_a_folder_of_them(made):
    target, _ = made("medusa")
    with pytest.raises(ConfigError, match="method='medusa' needs model"):
        Run(target, {"method": "medusa"})
    with pytest.raises(ModelError, match="no such file or folder"):
        Run(target, {"method": "medusa", "model": "/nowhere"})
