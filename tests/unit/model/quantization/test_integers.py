"""Models of quantized files: in their own precision, dequantized, quantized at load; near the float32 model."""

from pathlib import Path

import pytest
import torch

from pagemill.artifacts.describe import describe
from pagemill.errors import ConfigError
from pagemill.model.factory import load_model
from pagemill.model.kernels.linear import packs_natively
from pagemill.model.quantization.choose import choose
from pagemill.model.quantization.integers import Integers
from pagemill.model.quantization.interface import LinearWeight, QuantMethod, Role
from pagemill.model.quantization.panels import PanelWeight
from pagemill.model.quantization.unquantized import Unquantized
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from tests.fakes.configs import model_config
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_gguf import convert

pytestmark = pytest.mark.cases(one_in=3)

TOKENS = torch.randint(3, 250, (60,), generator=torch.Generator().manual_seed(0)).tolist()
FORMATS = {"BF16": 0, "Q8_0": 1, "Q4_0": 2, "Q4_1": 3}


@pytest.fixture(autouse=True)
def native() -> None:
    if not packs_natively():
        pytest.skip("this machine computes no integers natively")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "LlamaForCausalLM")


def load(path: Path, dtype: str = "bfloat16", quantization: str | None = None) -> PagedModel:
    config = model_config(str(path), dtype=dtype, max_model_len=2048, quantization=quantization)
    return PagedModel(load_model(describe(str(path), path), config, CpuPlatform(), PhaseTimer()), dtype)


def formats_of(model: PagedModel) -> set[int]:
    values = [value for module in model.model.modules() for value in vars(module).values()]
    assert any(isinstance(value, LinearWeight) for value in values)
    return {value.native(None).struct.format for value in values if isinstance(value, PanelWeight)}


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference, of the standard deviation of the logits."""
    return float((found.float() - wanted.float()).square().mean().sqrt() / wanted.float().std())


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_file_runs_as_it_is_stored(tmp_path: Path, folder: Path, type_name: str) -> None:
    """Against the same weights in float32: what is lost is in the activations. Whole, in chunks and as one native plan
    the logits are the same, to the last bit."""
    path = convert(folder, tmp_path / "model.gguf", type_name)
    wanted = load(path, "float32").logits(TOKENS)
    model = load(path)
    assert formats_of(model) == {FORMATS[type_name]}
    assert isinstance(model.model.embed_tokens.weight, PanelWeight)
    assert model.model.lm_head.weight is model.model.embed_tokens.weight
    found = model.logits(TOKENS)
    assert model.model._plan is not None
    assert error_of(found, wanted) < 0.04
    assert error_of(load(path, quantization="none").logits(TOKENS), wanted) < 0.03
    for chunk in (1, 7):
        assert torch.equal(model.logits(TOKENS, chunk), found)


def test_none_dequantizes(tmp_path: Path, folder: Path) -> None:
    model = load(convert(folder, tmp_path / "model.gguf"), quantization="none")
    assert formats_of(model) == {FORMATS["BF16"]}
    assert model.model.lm_head.weight is model.model.embed_tokens.weight


def test_a_float_checkpoint_in_8_bits(folder: Path) -> None:
    wanted = load(folder, "float32").logits(TOKENS)
    model = load(folder, quantization="int8")
    assert formats_of(model) == {FORMATS["Q8_0"]}
    assert error_of(model.logits(TOKENS), wanted) < 0.06
    assert formats_of(load(folder)) == {FORMATS["BF16"]}


def test_inputs_that_are_not_whole_blocks_stay_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint(tmp_path / "model", "LlamaForCausalLM", intermediate_size=72)
    model = load(folder, quantization="int8")
    assert formats_of(model) == {FORMATS["BF16"], FORMATS["Q8_0"]}
    assert caplog.text.count("layers of 72 inputs stay floats: --quantization is of blocks of 32 inputs") == 1
    assert error_of(model.logits(TOKENS), load(folder, "float32").logits(TOKENS)) < 0.05


def test_inputs_that_are_not_whole_groups_have_8_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint(tmp_path / "model", "LlamaForCausalLM", intermediate_size=96)
    model = load(folder, quantization="int4_g64")
    assert formats_of(model) == {FORMATS["Q8_0"], FORMATS["Q4_1"]}
    assert (
        caplog.text.count("layers of 96 inputs become integers of 8 bits, not 4: they are no whole groups of 64") == 1
    )


def test_what_is_chosen() -> None:
    def method(wanted: str | None, dtype: torch.dtype, device: str) -> QuantMethod:
        return choose(wanted, {}, dtype, device).method("model.layers.0.mlp.up_proj", Role.LINEAR)

    assert isinstance(method(None, torch.bfloat16, "cpu"), Integers)
    assert isinstance(method("int8", torch.bfloat16, "cpu"), Integers)
    for wanted, dtype, device in (
        ("none", torch.bfloat16, "cpu"),
        (None, torch.float32, "cpu"),
        (None, torch.bfloat16, "cuda"),
    ):
        assert isinstance(method(wanted, dtype, device), Unquantized)
    with pytest.raises(ConfigError, match=r"quantization=int8.*dtype=float32"):
        choose("int8", {}, torch.float32, "cpu")
