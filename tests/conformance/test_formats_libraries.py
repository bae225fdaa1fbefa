"""Weights that the publishing libraries have compressed, dequantized here and by them: the same numbers.

compressed-tensors is always there; bitsandbytes and torchao are compared with where they are installed.
"""

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    disable_quantization,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from torch import Tensor

from pagemill.artifacts.describe import describe
from pagemill.model.factory import load_model
from pagemill.model.loading.packed_weight import Inputs, PackedWeight
from pagemill.model.loading.quantized_tensor import floats
from pagemill.model.loading.stored import WeightPart
from pagemill.model.quantization.choose import choose
from pagemill.model.quantization.interface import QuantMethod, Role
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from tests.fakes.compressed_checkpoint import edit_config
from tests.fakes.configs import model_config
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_families import FAMILIES

SHAPE = (96, 256)
PRESETS = {
    "W4A16": "pack-quantized",
    "W4A16_ASYM": "pack-quantized",
    "W8A16": "pack-quantized",
    "W3A16": "pack-quantized",
    "W8A8": "int-quantized",
    "FP8": "float-quantized",
    "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "NVFP4": "nvfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized",
    "MXFP8A16": "mxfp8-quantized",
}
INPUTS = {"W8A8": Inputs.INT8, "FP8": Inputs.FP8, "FP8_DYNAMIC": Inputs.FP8, "FP8_BLOCK": Inputs.FP8}


def random_weight() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()


def grouped(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, tuple[int, ...]]:
    """The weight with what shares a scale in the last dimensions, and these."""
    args = scheme.weights
    strategy = str(args.strategy)
    if strategy == "tensor":
        return weight, (0, 1)
    if strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -len(weight) % rows))
        return padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)), (1, 3)
    size = args.group_size if args.group_size and args.group_size > 0 else weight.shape[1]
    return weight.unflatten(1, (-1, size)), (2,)


def compressed(scheme: QuantizationScheme, format_name: str) -> tuple[dict[str, Tensor], Tensor]:
    """(what the library stores of a weight, what it makes of that)"""
    weight = random_weight()
    groups, dims = grouped(weight.float(), scheme)
    state: dict[str, Tensor] = {"weight": weight}
    global_scale = None
    if format_name.startswith("nvfp4"):
        global_scale = (448 * 6 / weight.abs().max().float()).reshape(1)
        state["weight_global_scale"] = global_scale
    scales, zeros = calculate_qparams(groups.amin(dims), groups.amax(dims), scheme.weights, global_scale)
    if str(scheme.weights.strategy) == "tensor":
        scales = scales.reshape(1)
        zeros = zeros.reshape(1)
    state |= {"weight_scale": scales, "weight_zero_point": zeros}
    library = BaseCompressor.get_value_from_registry(format_name)
    stored = library.compress(state, scheme)
    return stored, library.decompress(stored, scheme)["weight"]


def config_of(scheme: QuantizationScheme, format_name: str) -> dict[str, Any]:
    """What the library writes into a config.json."""
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=format_name, ignore=["lm_head"])
    return dict(config.model_dump(mode="json")) | {"quantization_status": "compressed"}


def method_of(config: Mapping[str, Any]) -> QuantMethod:
    return choose(None, config, torch.float32, "cpu").method("model.layers.0.mlp.up_proj", Role.LINEAR)


def read(method: QuantMethod, stored: Mapping[str, Tensor], part: WeightPart) -> Tensor:
    """What the method makes of its part of the stored tensors, in float32."""
    taken = {}
    for declared in method.tensors(part.shape):
        if declared.unused:
            continue
        tensor = stored[declared.kind]
        assert declared.takes(tuple(tensor.shape)), (declared, tensor.shape)
        assert tensor.dtype in declared.dtypes, (declared, tensor.dtype)
        wanted = declared.part_for(part)
        assert wanted is not None
        taken[declared.kind] = tensor if declared.max_length else wanted.of(tensor)
    return floats(method.decode(taken, part, torch.float32), torch.float32)


def parts(shape: tuple[int, int]) -> list[WeightPart]:
    """All of a weight, a rank's rows, and a rank's columns."""
    rows = range(shape[0])
    columns = range(shape[1])
    return [
        WeightPart(shape, rows, columns),
        WeightPart(shape, rows[40:72], columns),
        WeightPart(shape, rows, columns[64:160]),
    ]


def assert_same(method: QuantMethod, stored: Mapping[str, Tensor], wanted: Tensor) -> None:
    """`wanted` may be rounded to its type."""
    for part in parts(tuple(wanted.shape)):
        found = read(method, stored, part)
        mine = wanted[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
        torch.testing.assert_close(
            found.to(wanted.dtype), mine, rtol=2**-7 if wanted.dtype != torch.float32 else 1e-6, atol=1e-6
        )
        assert found.abs().max() > 0.5


@pytest.mark.parametrize("preset", PRESETS)
def test_formats_of_compressed_tensors(preset: str) -> None:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    stored, wanted = compressed(scheme, PRESETS[preset])
    method = method_of(config_of(scheme, PRESETS[preset]))
    assert_same(method, stored, wanted)
    weight = method.decode({name: stored[name] for name in stored}, parts(SHAPE)[0], torch.float32)
    assert isinstance(weight, PackedWeight)
    assert weight.inputs is INPUTS.get(preset, Inputs.FLOATS)


def test_formats_of_quark_in_4_bits() -> None:
    """The same numbers as compressed-tensors', under another name."""
    stored, wanted = compressed(preset_name_to_scheme("MXFP4A16", ["Linear"]), "mxfp4-pack-quantized")
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    assert_same(method_of(config), stored | {"weight": stored["weight_packed"]}, wanted)


def test_formats_of_compressed_tensors_layer_by_layer() -> None:
    """Mixed formats, as the library writes them: each group has its own."""
    first = preset_name_to_scheme("W4A16", ["re:.*up_proj"])
    second = preset_name_to_scheme("FP8", ["Linear"])
    config = QuantizationConfig(
        config_groups={"a": first, "b": second}, format="mixed-precision", ignore=["re:.*down_proj"]
    ).model_dump(mode="json")
    for name, format_name in (("a", "pack-quantized"), ("b", "float-quantized")):
        config["config_groups"][name]["format"] = format_name
    quantization = choose(None, dict(config) | {"quantization_status": "compressed"}, torch.float32, "cpu")
    for layer, scheme, format_name in (("up", first, "pack-quantized"), ("gate", second, "float-quantized")):
        method = quantization.method(f"model.layers.0.mlp.{layer}_proj", Role.LINEAR)
        assert_same(method, *compressed(scheme, format_name))
    assert [stored.kind for stored in quantization.method("a.down_proj", Role.LINEAR).tensors(SHAPE)] == ["weight"]


MIXTURES = {
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen2-moe": (FAMILIES["qwen2-moe"][0], FAMILIES["qwen2-moe"][1] | {"shared_expert_intermediate_size": 64}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
}
ROUTER = re.compile(r"(mlp|block_sparse_moe)\.gate\.")


def compressed_checkpoint(folder: Path, to: Path, scheme: QuantizationScheme) -> tuple[Path, torch.nn.Module]:
    """(a checkpoint that transformers and compressed-tensors save of another, its model on the weights that the library
    dequantizes)."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            groups, dims = grouped(module.weight.data, scheme)
            scales, _ = calculate_qparams(groups.amin(dims), groups.amax(dims), scheme.weights)
            module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
    library = ModelCompressor.from_pretrained_model(model)
    library.compress_model(model)
    model.save_pretrained(to)
    library.update_config(to)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, to)
    library.decompress_model(model)
    return to, model.apply(disable_quantization).eval()


@pytest.mark.parametrize("preset", ["W4A16", "FP8_DYNAMIC"])
@pytest.mark.parametrize("family", MIXTURES)
def test_formats_of_compressed_tensors_with_experts(tmp_path: Path, family: str, preset: str) -> None:
    """To transformers, routers and experts are no linear layers: they are in the file as they were, although nothing
    but lm_head is named as an exception. Some versions of the library name the routers, none the experts."""
    architecture, changes = MIXTURES[family]
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    folder = make_checkpoint(tmp_path / "model", architecture, **(changes | sizes))
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = 32
    packed, reference = compressed_checkpoint(folder, tmp_path / "packed", scheme)
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config=config | {"ignore": ["lm_head"]})
    names = set(load_file(packed / "model.safetensors"))
    routers = {name for name in names if ROUTER.search(name)}
    experts = {name for name in names if ".experts." in name}
    assert routers
    assert experts
    assert all(name.endswith(".weight") for name in routers | experts)
    assert "model.layers.1.self_attn.q_proj.weight_scale" in names
    tokens = torch.randint(3, 250, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = reference(tokens).logits[0]
    loaded = load_model(describe("m", packed), model_config("m", dtype="float32"), CpuPlatform(), PhaseTimer())
    found = PagedModel(loaded, "float32").logits(tokens[0].tolist())
    assert float((found - wanted).square().mean().sqrt() / wanted.std()) < 1e-4
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize(("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", False)])
def test_formats_of_bitsandbytes(kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = random_weight()
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
    wanted = functional.dequantize_4bit(packed, state)
    stored = {"weight": packed} | {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    assert_same(method_of(config | {"bnb_4bit_use_double_quant": nested}), stored, wanted)


def test_formats_of_bitsandbytes_in_8_bits() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    values, largest, _ = functional.int8_vectorwise_quant(random_weight().half())
    wanted = functional.int8_vectorwise_dequant(values, largest.float())
    stored = {"weight": values, "SCB": largest.float()}
    assert_same(method_of({"quant_method": "bitsandbytes", "load_in_8bit": True}), stored, wanted)


@pytest.mark.parametrize(
    "kind",
    [
        "Int8WeightOnlyConfig",
        "Float8WeightOnlyConfig",
        "IntxWeightOnlyConfig",
        "Int8DynamicActivationIntxWeightConfig",
    ],
)
def test_formats_of_torchao(kind: str) -> None:
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao import quantization
        from torchao.core.config import config_to_dict
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
        from torchao.quantization.granularity import PerGroup

        how = getattr(quantization, kind)(**({"version": 2} if kind.startswith("Int8W") else {}))
        if kind.startswith("Int8DynamicActivationIntx"):
            how = getattr(quantization, kind)(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
        elif kind.startswith("Intx"):
            how = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
        model = torch.nn.Sequential(torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)).bfloat16()
        model[0].weight.data.copy_(random_weight())
        quantization.quantize_(model, how)
        flat, _ = flatten_tensor_state_dict(model.state_dict())
        wanted = model[0].weight.dequantize()
    stored = {name.removeprefix("0."): tensor for name, tensor in flat.items()}
    assert_same(method_of({"quant_method": "torchao", "quant_type": {"default": config_to_dict(how)}}), stored, wanted)
