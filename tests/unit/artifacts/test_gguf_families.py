"""A family of GGUF files is one record: every record, and a toy one that is added and loaded."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagemill.artifacts.gguf_families import FAMILIES, GgufFamily
from pagemill.catalog.models import ENCODERS, MODELS
from pagemill.errors import ModelError
from pagemill.utils.text import shown_name
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_gguf import convert

TOKENS = list(range(3, 43))


@pytest.mark.slow
def test_a_record_is_enough_for_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One like Llama, whose files have another name for a layer."""
    folder = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    path = convert(folder, tmp_path / "toy.gguf", "F32", family="toy", up="feed_up")
    with pytest.raises(ModelError, match=r"architecture 'toy' is not supported; supported: .*gemma3, .*llama, .*qwen3"):
        PagedModel.load(path)
    llama = FAMILIES["llama"]
    layer = {name: place for name, place in llama.layer.items() if name != "ffn_up"}
    toy = GgufFamily(
        lambda file, keys, config: {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        ("LlamaForCausalLM",),
        layer=layer | {"feed_up": "mlp.up_proj"},
        paired_heads=llama.paired_heads,
    )
    monkeypatch.setitem(FAMILIES, "toy", toy)
    wanted = PagedModel.load(folder).logits(TOKENS)
    torch.testing.assert_close(PagedModel.load(path).logits(TOKENS), wanted, rtol=1e-4, atol=1e-4)
    monkeypatch.setitem(FAMILIES, "toy", replace(toy, paired_heads={}))
    assert not torch.allclose(PagedModel.load(path).logits(TOKENS), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("llama", "token_embd.weight", "model.embed_tokens.weight"),
        ("llama", "blk.12.attn_k.bias", "model.layers.12.self_attn.k_proj.bias"),
        ("qwen3", "blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen2", "blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("bert", "blk.1.layer_output_norm.bias", "encoder.layer.1.output.LayerNorm.bias"),
        ("gemma3", "blk.0.ffn_norm.weight", "model.layers.0.pre_feedforward_layernorm.weight"),
    ],
)
def test_names(family: str, name: str, expected: str) -> None:
    assert FAMILIES[family].hf_name(name) == expected


LONG = "9" * 5000
"""More digits than Python reads as a number."""


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ssm_conv.weight", "layer.0.attn_q.weight", "attn_q.weight", "x", f"blk.{LONG}.attn_q.weight",
        f"blk.0.ffn_gate.{LONG}.weight",
    ],
)  # fmt: skip
def test_a_name_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"GGUF tensor {re.escape(shown_name(name))} is not known") as caught:
        FAMILIES["llama"].hf_name(name)
    assert len(str(caught.value)) < 300


def test_every_family_is_of_an_architecture_that_runs() -> None:
    assert {name for family in FAMILIES.values() for name in family.architectures} <= {*MODELS, *ENCODERS}
