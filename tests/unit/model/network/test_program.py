"""New arrangements of the usual parts: as operations, and in plain modules of torch, on every path."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagemill.catalog.models import MODELS
from pagemill.model.kernels.native import library
from pagemill.model.kernels.packed import pack, reference_linear
from pagemill.model.kernels.packed_layer import LayerWeights
from pagemill.model.kernels.reference import rms_norm
from pagemill.model.network import program
from pagemill.model.network.operations import Network
from pagemill.model.network.program import Program
from pagemill.model.quantization.device import GroupedWeight
from tests.fakes.compressed_checkpoint import edit_config
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.toy_models import STYLES
from tests.unit.model.kernels.packed_cases import made

pytestmark = pytest.mark.cases(one_in=4)

TOKENS = [(7 * index) % 250 + 3 for index in range(45)]


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    names = [f"{plain}{style}ForCausalLM" for plain in ("", "Plain") for style in STYLES]
    for name in names:
        MODELS.add(name, f"tests.fakes.toy_models:{name}")
    yield
    for name in names:
        MODELS.remove(name)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "LlamaForCausalLM")


def model(checkpoint: Path, architecture: str, dtype: str = "float32") -> PagedModel:
    edit_config(checkpoint, architectures=[f"{architecture}ForCausalLM"])
    return PagedModel.load(checkpoint, dtype)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("chunk", [None, 7])
def test_operations_are_what_plain_modules_compute(checkpoint: Path, style: str, chunk: int | None) -> None:
    wanted = model(checkpoint, f"Plain{style}").logits(TOKENS)
    found = model(checkpoint, style).logits(TOKENS, chunk)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*STYLES, *(f"Plain{style}" for style in STYLES)])
def test_rows_that_are_asked_for(checkpoint: Path, name: str) -> None:
    everything = model(checkpoint, name).logits(TOKENS)
    asked = torch.tensor([2, 44])
    torch.testing.assert_close(model(checkpoint, name).logits(TOKENS, asked=asked), everything[asked])


@pytest.mark.parametrize("style", STYLES)
def test_what_has_a_native_form_runs_as_a_plan(checkpoint: Path, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new arrangement needs nothing for it; one that native code cannot run, and plain modules, run all the same."""
    found = library()
    if found is None or found.isa() == b"portable":
        pytest.skip("this machine has no native plan")
    toy = model(checkpoint, style, "bfloat16")
    logits = toy.logits(TOKENS, 4)  # so few rows that each thread computes the norms for itself
    assert toy.model._plan is not None
    plain = model(checkpoint, f"Plain{style}", "bfloat16")
    wanted = plain.logits(TOKENS)
    assert plain.model._plan is None
    assert (logits - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert torch.equal(toy.logits(TOKENS), logits)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "Gemma3ForCausalLM"])
def test_fusions_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Every operation can also be computed by itself."""
    path = make_checkpoint(tmp_path, architecture)
    fused = PagedModel.load(path).logits(TOKENS, 7)
    for name in ("fuse_gates", "fuse_attention", "fuse_sums", "fuse_norms", "fuse_chains"):
        monkeypatch.setattr(program, name, lambda graph: graph)
    torch.testing.assert_close(PagedModel.load(path).logits(TOKENS, 7), fused, rtol=1e-4, atol=1e-4)


def linear_of(outputs: int, inputs: int, gate: str | None = None, bias: torch.Tensor | None = None) -> Any:
    """A layer of packed integers, as far as programs look."""
    values, scales, zeros = made(outputs, inputs, 32, 4, False)
    weight = GroupedWeight(pack(values, scales, zeros, 32, 4), torch.float32, gate)
    return SimpleNamespace(weight=weight, gate=gate, own_bias=bias, num_columns=inputs, sums_over=None, name="")


def norm_of(eps: float) -> Any:
    weight = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.5
    return SimpleNamespace(weight=weight, eps=eps, centers=False)


class Recorded:
    """A kernel of several layers, by plain torch."""

    def __init__(self, weights: LayerWeights) -> None:
        self.weights = weights
        self.rows: list[int] = []

    def takes(self, x: torch.Tensor) -> bool:
        return len(x) <= 2

    def run(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows.append(len(attended))
        o, gate_up, down, qkv = self.weights.linears
        first = residual + reference_linear(attended, o)
        inner = reference_linear(rms_norm(first, self.weights.norm1, self.weights.eps[0]), gate_up, None, "silu")
        total = first + reference_linear(inner, down)
        return reference_linear(rms_norm(total, self.weights.norm2, self.weights.eps[1]), qkv), total


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_run_by_a_kernel_of_several_layers(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    net = Network({})
    bias = torch.ones(64) if biased else None
    first = net.inputs + net.linear(net.inputs, linear_of(64, 64, bias=bias))
    inner = net.linear(net.norm(first, norm_of(1e-6)), linear_of(256, 64, "silu"))
    x = first + net.linear(net.gated(inner, "silu"), linear_of(64, 128))
    net.result = net.linear(net.norm(x, norm_of(1e-3)), linear_of(96, 64))
    kernels: list[Recorded] = []

    def between(weights: LayerWeights) -> Recorded:
        kernels.append(Recorded(weights))
        return kernels[-1]

    plain = Program(net)
    monkeypatch.setattr(program, "between", between)
    fused = Program(net)
    for num_rows in (1, 2, 3):
        inputs = torch.randn(num_rows, 64)
        torch.testing.assert_close(fused.run(inputs.clone()), plain.run(inputs.clone()), rtol=1e-4, atol=1e-4)
    assert [kernel.rows for kernel in kernels] == ([] if biased else [[1, 2]])


def test_a_model_without_weights_says_so(checkpoint: Path) -> None:
    toy = model(checkpoint, "Usual")
    toy.model._program = None
    with pytest.raises(Exception, match="the model has no weights yet"):
        toy.logits(TOKENS)
