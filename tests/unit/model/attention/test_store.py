"""Keys and values that are stored without attending lie where a step that attends writes them."""

import pytest
import torch
import torch.nn.attention.flex_attention

from pagemill.catalog.attention import ATTENTION
from pagemill.model.attention.capability import AttentionLayerSpec
from tests.fakes import triton_interpreter
from tests.fakes.paged_attention import PagedCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BACKENDS = ("CPU_ATTN", "TORCH_CPU", "TORCH_PAGED", "FLEX_ATTENTION", "TRITON_ATTN")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("requests", [[(16, 80), (1, 33), (5, 5)], [(1, 9), (1, 33)]], ids=["mixed", "decodes"])
def test_what_is_stored_is_what_a_step_writes(monkeypatch, name, requests):
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    backend = ATTENTION.resolve(name)
    device = triton_interpreter.DEVICE if name == "TRITON_ATTN" else "cpu"
    spec = AttentionLayerSpec(4, 2, 32, 32**-0.5)
    if name == "CPU_ATTN" and backend.unsupported(spec, "cpu", "float32"):
        pytest.skip(f"{name} is not here")
    attended, only = PagedCase(spec, requests, device=device, null_value=0.0).stored(backend)
    assert only.nan_to_num(9.0).ne(9.0).any()
    torch.testing.assert_close(only, attended, rtol=0, atol=0, equal_nan=True)
