"""Models of quantized files: in their own precision, dequantized, quantized at load; near the float32 model."""

from pathlib import Path

import pytest
import torch

from pagemill.model.kernels.linear import packs_natively
from pagemill.model.quantization.interface import LinearWeight
from pagemill.model.quantization.panels import PanelWeight
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint

TOKENS = torch.randint(3, 250, (60,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(autouse=True)
def native() -> None:
    if not packs_natively():
        pytest.skip("this machine computes no integers natively")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    return make_checkpoint(tmp_path / "model", "LlamaForCausalLM", **sizes)


def weights_of(model: PagedModel) -> list[LinearWeight]:
    found = [value for module in model.model.modules() for value in vars(module).values()]
    return [value for value in found if isinstance(value, LinearWeight)]


def formats_of(model: PagedModel) -> set[int]:
    return {value.native(None).struct.format for value in weights_of(model) if isinstance(value, PanelWeight)}
