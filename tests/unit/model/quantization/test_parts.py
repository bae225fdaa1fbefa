"""Layers whose parts are stored in different ways: what their dequantized weights give, and one line that says so."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagemill.model.kernels.linear import packs_natively
from tests.fakes.compressed_checkpoint import edit_config
from tests.fakes.paged import PagedModel
from tests.fakes.stored_formats import Stored, gptq, store
from tests.fakes.tiny_checkpoint import make_checkpoint

TOKENS = [5, 80, 31, 200, 7, 7, 90]
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}

native = pytest.mark.skipif(not packs_natively(), reason="this machine computes no integers natively")


def in_any_order(weight: Tensor) -> Stored:
    """Queries have more outputs than keys, and so another order."""
    return gptq(weight, 4, 32, ordered=True, seed=len(weight))


def checkpoint(tmp_path: Path) -> tuple[Path, Path]:
    folder = make_checkpoint(tmp_path / "model", "LlamaForCausalLM", hidden_size=64, intermediate_size=96)
    return store(folder, tmp_path, CONFIG, in_any_order)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()]


@native
def test_orders_that_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Queries, keys and values become floats, each by its own order; the other layers stay integers."""
    packed, plain = checkpoint(tmp_path)
    model = PagedModel.load(packed, "bfloat16")
    assert lines(caplog) == [
        "layers that are computed together (queries, keys and values; gate and up) but stored as 4-bit integers in an "
        "order of their own beside others are dequantized to bfloat16"
    ]
    found, wanted = model.logits(TOKENS), PagedModel.load(plain).logits(TOKENS)
    assert model.model._plan is not None
    assert float((found.float() - wanted).square().mean().sqrt() / wanted.std()) < 0.04


@native
def test_a_part_that_is_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, plain = checkpoint(tmp_path)
    stored, dequantized = (load_file(folder / "model.safetensors") for folder in (packed, plain))
    parts = [name for name in dequantized if name.endswith("v_proj.weight")]
    kept = {name: tensor for name, tensor in stored.items() if ".v_proj." not in name}
    save_file(kept | {name: dequantized[name] for name in parts}, packed / "model.safetensors", {"format": "pt"})
    edit_config(packed, quantization_config=CONFIG | {"modules_to_not_convert": ["v_proj"]})
    found, wanted = PagedModel.load(packed, "bfloat16").logits(TOKENS), PagedModel.load(plain).logits(TOKENS)
    assert len(lines(caplog)) == 1
    assert "beside floats are dequantized to bfloat16" in lines(caplog)[0]
    assert float((found.float() - wanted).square().mean().sqrt() / wanted.std()) < 0.04
    exact = PagedModel.load(packed).logits(TOKENS)
    torch.testing.assert_close(exact, wanted, rtol=1e-4, atol=1e-4)
