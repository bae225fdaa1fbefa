"""Hidden states of some tokens only: what they are among all, with less computed in the last layer."""

import pytest
import torch

from pagemill.model.layers.linear import Linear
from pagemill.model.quantization.unquantized import PlainWeight
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import SPECIFIC, make_checkpoint

TOKENS = list(range(3, 40))
ASKED = torch.tensor([36, 0, 17])


# layer by layer, as on a GPU
pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.cases(one_in=4)]


@pytest.mark.parametrize("architecture", SPECIFIC)
def test_every_architecture(tmp_path, architecture):
    path = make_checkpoint(tmp_path, architecture)
    everything = PagedModel.load(path).logits(TOKENS)
    some = PagedModel.load(path).logits(TOKENS, asked=ASKED)
    assert some.shape == (3, everything.shape[1])
    torch.testing.assert_close(some, everything[ASKED], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM"]
)
def test_the_last_layer_computes_no_others(tmp_path, monkeypatch, architecture):
    model = PagedModel.load(make_checkpoint(tmp_path, architecture))
    names = {id(layer.weight): name for name, layer in model.model.named_modules() if isinstance(layer, Linear)}
    seen = {}
    real = PlainWeight.apply

    def apply(self, x, bias):
        seen[names.get(id(self))] = len(x)
        return real(self, x, bias)

    monkeypatch.setattr(PlainWeight, "apply", apply)
    model.logits(TOKENS, asked=ASKED)
    last = max(int(name.split(".")[1]) for name in seen if name and name.startswith("layers."))
    after = {"self_attn.o_proj", "mlp.down_proj", "mlp.gate"}
    assert {seen[f"layers.{last}.{name}"] for name in after if f"layers.{last}.{name}" in seen} == {len(ASKED)}
    assert seen[f"layers.{last - 1}.self_attn.o_proj"] == len(TOKENS)
