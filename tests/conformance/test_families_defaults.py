"""What families are where a config.json does not say how positions are turned, or what caps logits: what transformers
makes of the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.errors import ModelError
from tests.conformance.test_architectures import PROMPT, relative_error
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_families import FAMILIES
from tests.fakes.tiny_states import STATES

CASES = FAMILIES | STATES | {"mixtral": ("MixtralForCausalLM", {"num_hidden_layers": 2})}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
OWN_DEFAULTS = (
    "mixtral", "cohere", "cohere2", "olmo3", "smollm3", "llama4", "gpt-oss", "stablelm", "glm4", "glm4-moe", "phi",
    "bamba", "qwen3-next",
)  # fmt: skip


def edit(folder: Path, **changes: Any) -> None:
    """Change config.json; None takes a field away."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


@pytest.mark.parametrize(
    ("case", "absent"),
    [
        *((case, ROPE) for case in OWN_DEFAULTS),
        ("gemma2-uncapped", CAPS),
        ("cohere", ("logit_scale",)),
        ("exaone4", ("sliding_window",)),
        ("phi3-longrope-within", ("original_max_position_embeddings",)),
        ("gemma3n", CAPS),
        ("llama4-two-experts", ("no_rope_layers",)),
    ],
)
def test_a_config_without_settings_that_a_family_has_of_its_own(
    tmp_path: Path, case: str, absent: tuple[str, ...]
) -> None:
    from transformers import AutoModelForCausalLM

    architecture, changes = CASES[case]
    folder = make_checkpoint(tmp_path, architecture, **changes)
    edit(folder, **dict.fromkeys(absent))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        theirs = reference(torch.tensor([PROMPT])).logits[0]
    assert relative_error(PagedModel.load(folder, max_len=512).logits(PROMPT), theirs) < 1e-3


def test_mistral_without_a_window_has_one_of_4096(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "MistralForCausalLM", num_hidden_layers=1)
    edit(folder, sliding_window=None)
    (layer,) = PagedModel.load(folder).model.cache_layers().values()
    assert layer.kv_spec(16, "float32").window == 4096


def test_null_is_a_setting_that_is_not_there(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM", num_hidden_layers=1)
    edit(folder, rope_parameters=None, rope_theta=1e4)
    wanted = PagedModel.load(folder).logits(PROMPT)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": None, "rope_scaling": None}))
    assert torch.equal(PagedModel.load(folder).logits(PROMPT), wanted)


@pytest.mark.parametrize(
    ("case", "field"), [("gemma4", "num_attention_heads"), ("gemma3n", "hidden_size_per_layer_input")]
)
def test_a_field_that_a_gemma_needs_is_named(tmp_path: Path, case: str, field: str) -> None:
    architecture, changes = FAMILIES[case]
    folder = make_checkpoint(tmp_path, architecture, **changes)
    edit(folder, **{field: None})
    with pytest.raises(ModelError, match=f"the model's config has no {field}, which its architecture needs"):
        PagedModel.load(folder)
