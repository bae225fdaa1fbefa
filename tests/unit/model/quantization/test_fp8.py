"""Weights of 8-bit floats: what quantizing costs, which layers it spares, and a model that runs with them."""

import pytest
import torch

from pagemill.artifacts.describe import describe
from pagemill.model.factory import load_model
from pagemill.model.kernels import fp8, reference
from pagemill.model.kernels.fp8 import FP8, linear, quantize
from pagemill.model.layers.moe.router import Router
from pagemill.model.quantization.choose import choose
from pagemill.model.quantization.fp8 import Fp8, Fp8Weight
from pagemill.model.quantization.interface import Role
from pagemill.model.quantization.unquantized import Unquantized
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from tests.fakes.configs import model_config
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.cases(one_in=4)

TOKENS = [3 + (index * 37) % 250 for index in range(40)]


def test_rows_are_scaled_to_the_whole_range():
    rows = torch.randn(5, 40) * torch.tensor([1e-6, 1.0, 100.0, 1e4, 0.0]).unsqueeze(1)
    floats, factors = quantize(rows)
    assert floats.dtype == FP8
    assert (floats.float().abs().amax(1)[:4] == 448).all()
    # Three bits of mantissa: half a step is a sixteenth; below the smallest normal number steps are even.
    error = (floats.float() * factors.unsqueeze(1) - rows).abs()
    assert (error <= rows.abs() / 16 + factors.unsqueeze(1) * 2**-10).all()
    assert not floats[4].float().any()


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
def test_products_are_close_to_those_of_the_weight(gate):
    x, weight, bias = torch.randn(6, 128), torch.randn(64, 128) / 8, torch.randn(64)
    expected = torch.nn.functional.linear(x, weight, bias)
    if gate is not None:
        first, second = expected.chunk(2, -1)
        act = torch.nn.functional.silu if gate == "silu" else lambda y: torch.nn.functional.gelu(y, approximate="tanh")
        expected = act(first) * second
    result = linear(x, *quantize(weight), bias, gate)
    assert float((result - expected).norm() / expected.norm()) < 0.1


def test_an_embedding_and_an_output_head_are_not_quantized():
    quantization = choose("fp8", {}, torch.float32, "cpu")
    assert isinstance(quantization.method("model.layers.0.mlp.up_proj", Role.LINEAR), Fp8)
    for module, role in (("lm_head", Role.HEAD), ("model.embed_tokens", Role.EMBEDDING)):
        assert isinstance(quantization.method(module, role), Unquantized)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_model_in_8_bits_is_close_to_itself(tmp_path, architecture):
    folder = make_checkpoint(tmp_path, architecture)
    config = model_config(str(folder), dtype="float32", quantization="fp8", max_model_len=2048)
    model = load_model(describe(str(folder), folder), config, CpuPlatform(), PhaseTimer())
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        spared = name.endswith("norm") or isinstance(module, Router) or name in ("embed_tokens", "lm_head")
        if weight is not None:
            assert isinstance(weight, Fp8Weight) is not spared, name
    ours = PagedModel(model, "float32").logits(TOKENS)
    theirs = PagedModel.load(folder).logits(TOKENS)
    alike = torch.nn.functional.cosine_similarity(ours, theirs)
    assert float(alike.min()) > 0.9
    assert not torch.equal(ours, theirs)


class Kernels:
    """What a GPU's kernels do to rows that are quantized, in plain torch; counts calls."""

    def __init__(self) -> None:
        self.norms = self.gates = 0

    def quantizes(self, num_rows, dtype, weight):
        return num_rows > 32

    def norm_linear(self, x, residual, norm, weight, factors, bias):
        self.norms += 1
        return fp8.reference_linear(reference.rms_norm(x, *norm, residual), weight, factors, bias)

    def gated_linear(self, x, gate, weight, factors, bias):
        self.gates += 1
        return fp8.reference_linear(reference.gated(x, gate == "gelu_tanh"), weight, factors, bias)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM"]
)
def test_norms_and_activations_quantize_what_they_write(tmp_path, monkeypatch, architecture):
    folder = make_checkpoint(tmp_path, architecture)
    config = model_config(str(folder), dtype="float32", quantization="fp8", max_model_len=2048)
    model = load_model(describe(str(folder), folder), config, CpuPlatform(), PhaseTimer())
    expected = PagedModel(model, "float32").logits(TOKENS)
    kernels = Kernels()
    monkeypatch.setattr(fp8, "triton_kernels", lambda name: kernels)
    monkeypatch.setattr(fp8, "quantizes", lambda x, weight: kernels.quantizes(len(x), x.dtype, weight))
    found = PagedModel(model, "float32").logits(TOKENS)
    names = [name.rpartition(".")[2] for name, _ in model.named_modules()]
    assert kernels.norms == names.count("qkv_proj") + names.count("gate_up_proj")
    # Experts beside them: it depends on how many tokens chose one.
    assert kernels.gates >= names.count("down_proj") > 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    counted = kernels.norms
    PagedModel(model, "float32").logits(TOKENS[:32])
    assert kernels.norms == counted
