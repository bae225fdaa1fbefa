"""Checkpoints in the pack-quantized layout of compressed-tensors against the same weights dequantized."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.artifacts.describe import describe
from pagemill.errors import ConfigError, ModelError
from pagemill.model.factory import load_model
from pagemill.model.kernels.linear import packs_natively
from pagemill.model.kernels.linear_int import Q4_0, Q8_0
from pagemill.model.loading.block_tensor import BlockTensor
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.stored import WeightPart
from pagemill.model.quantization.choose import choose
from pagemill.model.quantization.compressed_tensors import make
from pagemill.model.quantization.device import MadeWeight
from pagemill.model.quantization.interface import QuantRequest, Role
from pagemill.model.quantization.ordered import OrderedWeight
from pagemill.model.quantization.panels import PanelWeight
from pagemill.model.quantization.unquantized import Unquantized
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from tests.fakes.compressed_checkpoint import Layout, compress, edit_config
from tests.fakes.configs import model_config
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.cases(one_in=4)

TOKENS = torch.randint(3, 250, (60,), generator=torch.Generator().manual_seed(0)).tolist()
LAYOUTS = {
    "w4-groups": Layout(),
    "w4-outputs": Layout(group_size=None),
    "w4-small-groups": Layout(group_size=16),
    "w4-ordered": Layout(ordered=True),
    "w8-groups": Layout(bits=8),
    "w8-outputs": Layout(bits=8, group_size=None, scale_dtype=torch.float32),
}
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM")
MIXTURES = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM")
native = pytest.mark.skipif(not packs_natively(), reason="this machine computes no integers natively")


def load(path: Path, dtype: str = "float32", quantization: str | None = None, load_format: str = "auto") -> PagedModel:
    config = model_config(str(path), dtype=dtype, quantization=quantization, load_format=load_format)
    facts = describe(str(path), path, load_format=load_format)
    return PagedModel(load_model(facts, config, CpuPlatform(), PhaseTimer()), dtype)


def checkpoint(folder: Path, layout: Layout = LAYOUTS["w4-groups"], architecture: str = "LlamaForCausalLM") -> Path:
    return compress(make_checkpoint(folder / "model", architecture), folder, layout)[0]


def panel_formats(model: PagedModel) -> dict[str, int]:
    """Layer -> format of its weight, where that is panels."""
    named = [(name, getattr(module, "weight", None)) for name, module in model.model.named_modules()]
    return {name: weight.native(None).struct.format for name, weight in named if isinstance(weight, PanelWeight)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_its_dequantized_weights(tmp_path: Path, layout: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    packed, plain = compress(folder, tmp_path, LAYOUTS[layout])
    found, wanted = load(packed).logits(TOKENS), load(plain).logits(TOKENS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert not torch.equal(wanted, load(folder).logits(TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES[1:] + MIXTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_layer_loads_what_is_stored(tmp_path: Path, architecture: str, dtype: str) -> None:
    """Biases, norms between, latent attention whose rows are rearranged, experts, and routers that are not ignored."""
    layout = Layout(ignore=("lm_head",))
    packed, plain = compress(make_checkpoint(tmp_path / "model", architecture), tmp_path, layout)
    found, wanted = load(packed, dtype).logits(TOKENS), load(plain).logits(TOKENS)
    if dtype == "float32":
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    elif architecture in MIXTURES:  # some tokens choose other experts
        assert float(torch.nn.functional.cosine_similarity(found.float(), wanted).median()) > 0.99
    else:
        assert float((found.float() - wanted).square().mean().sqrt() / wanted.std()) < 0.06


@native
@pytest.mark.parametrize(("layout", "kind"), [("w4-groups", 2), ("w4-outputs", 2), ("w8-groups", 1)])
def test_integers_run_as_they_are_stored(tmp_path: Path, layout: str, kind: int) -> None:
    """In the panels of 4 or 8 bits, beside a head of floats, with inputs of 8 bits or, for queries, keys and values, of
    16; whole, in chunks and as one native plan alike."""
    packed, plain = compress(make_checkpoint(tmp_path / "model", "LlamaForCausalLM"), tmp_path, LAYOUTS[layout])
    model = load(packed, "bfloat16")
    formats = panel_formats(model)
    assert {formats.pop("lm_head"), formats.pop("embed_tokens")} == {0}
    assert len(formats) == 4 * 4
    assert all(number == kind + (16 if "qkv" in name else 0) for name, number in formats.items()), formats
    found, wanted = model.logits(TOKENS), load(plain).logits(TOKENS)
    assert model.model._plan is not None
    assert float((found.float() - wanted).square().mean().sqrt() / wanted.std()) < 0.04
    assert torch.equal(model.logits(TOKENS, 7), found)
    exact = load(packed, "bfloat16", "none")
    assert set(panel_formats(exact).values()) == {0}
    assert torch.equal(exact.logits(TOKENS), load(plain, "bfloat16").logits(TOKENS))


@native
def test_what_has_no_blocks_is_dequantized_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed = checkpoint(tmp_path, LAYOUTS["w4-small-groups"])
    assert set(panel_formats(load(packed, "bfloat16")).values()) == {0}
    assert [record.message for record in caplog.records if "dequantized" in record.message] == [
        "weights of 4-bit integers in groups of 16 are dequantized to bfloat16: integers are multiplied as they are "
        "where 32 neighbours share a scale that 16-bit floats can hold, and 8-bit ones fit a byte without their zero "
        "points"
    ]
    caplog.clear()
    load(packed)
    assert ["dequantized to float32" in record.message for record in caplog.records] == [True]


@native
def test_inputs_are_put_into_the_order_of_their_groups(tmp_path: Path) -> None:
    """Integers run as they are stored; a layer's inputs change places once."""
    packed, plain = compress(make_checkpoint(tmp_path / "model", "LlamaForCausalLM"), tmp_path, LAYOUTS["w4-ordered"])
    model = load(packed, "bfloat16")
    assert isinstance(model.model.get_submodule("layers.0.mlp.down_proj").weight, OrderedWeight)
    found = model.logits(TOKENS)
    wanted = load(plain).logits(TOKENS)
    assert float((found.float() - wanted).square().mean().sqrt() / wanted.std()) < 0.04
    assert torch.equal(model.logits(TOKENS, 7), found)


def test_blocks_hold_the_same_weight() -> None:
    """Every integer there is; scales that 16-bit floats cannot hold, and blocks with two scales, have no blocks."""
    scales = torch.tensor([[0.5, 2.0**-10], [3.0, 0.0]])
    for bits, kind in ((4, Q4_0), (8, Q8_0)):
        half = 2 ** (bits - 1)
        integers = (torch.arange(2 * 256) % (2 * half) - half).to(torch.int8).view(2, 256)
        weight = PackedWeight(bits, integers, scales, torch.arange(256) // 128)
        blocks = weight.as_blocks()
        assert isinstance(blocks, BlockTensor)
        assert blocks.kind is kind
        assert torch.equal(blocks.dequantized(torch.float32), weight.dequantized(torch.float32))
        assert PackedWeight(bits, integers, scales, torch.arange(256) % 2).as_blocks() is None
        for scale in (1e6, 1e-9, float("nan")):
            assert PackedWeight(bits, integers, scales * 0 + scale, torch.arange(256) // 128).as_blocks() is None


def test_dummy_weights_are_integers_too(tmp_path: Path) -> None:
    packed = checkpoint(tmp_path, LAYOUTS["w4-ordered"])
    (packed / "model.safetensors").unlink()
    assert load(packed, load_format="dummy").logits(TOKENS).isfinite().all()


LAYER = Layout().config()["config_groups"]["group_0"]
EDITS = {
    "missing": (lambda tensors, name: tensors.pop(f"{name}.weight_scale"), r"lacks tensors .*k_proj\.weight_scale"),
    "extra": (
        lambda tensors, name: tensors.update({f"{name}.weight_zero_point": torch.zeros(1)}),
        r"does not use: model\.layers\.1\.self_attn\.k_proj\.weight_zero_point",
    ),
    "misshapen": (
        lambda tensors, name: tensors.update({f"{name}.weight_scale": torch.ones(32, 3)}),
        r"k_proj\.weight_scale has shape \(32, 3\), expected \(32, 2\)",
    ),
    "mistyped": (
        lambda tensors, name: tensors.update({f"{name}.weight_packed": torch.ones(32, 8)}),
        r"k_proj\.weight_packed is of type float32, expected int32",
    ),
    "out of range": (
        lambda tensors, name: tensors.update({f"{name}.weight_g_idx": torch.full((64,), 2, dtype=torch.int32)}),
        r"k_proj\.weight_g_idx has values from 2 to 2, not within 0 to 1",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_wrong_tensors_are_named(tmp_path: Path, edit: str) -> None:
    packed = checkpoint(tmp_path, Layout(ordered=edit == "out of range"))
    change, message = EDITS[edit]
    tensors = load_file(packed / "model.safetensors")
    change(tensors, "model.layers.1.self_attn.k_proj")
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(packed)


def request(change: dict[str, Any], weights: dict[str, Any]) -> QuantRequest:
    config = copy.deepcopy(Layout().config()) | change
    config["config_groups"] = change.get("config_groups", config["config_groups"])
    if weights:
        config["config_groups"]["group_0"]["weights"] |= weights
    return QuantRequest(torch.float32, "cpu", config)


@pytest.mark.parametrize(
    ("change", "weights", "message"),
    [
        ({"format": "dense"}, {}, r"format='dense' is not supported; supported: pack-quantized, int-quantized"),
        ({"format": "float-quantized"}, {}, r"weights\.num_bits=4 is not supported; supported: 8"),
        ({"format": "float-quantized"}, {"num_bits": 8}, r"weights\.type='int' is not supported; supported: float"),
        ({"format": "nvfp4-pack-quantized"}, {}, r"weights\.type='int' is not supported; supported: float"),
        ({"format": "mixed-precision"}, {}, r"format='mixed-precision' is not supported"),
        ({"kv_cache_scheme": {"num_bits": 8}}, {}, r"kv_cache_scheme=.* is not supported"),
        ({"transform_config": {"config_groups": {}}}, {}, r"transform_config=.* is not supported"),
        ({"sparsity_config": {"format": "2:4"}}, {}, r"sparsity_config\.format='2:4'"),
        ({"quantization_status": "calibration"}, {}, r"quantization_status='calibration'"),
        ({"config_groups": {}}, {}, r"config_groups has no group"),
        ({"config_groups": [1]}, {}, r"config_groups=\[1\] is of a wrong type"),
        ({"config_groups": {"g": 3}}, {}, r"config_groups\.g=3 is of a wrong type"),
        ({"ignore": [1]}, {}, r"ignore=\[1\] is not a list of strings"),
        ({"ignore": ["re:("]}, {}, r"pattern '\(' in quantization_config is damaged"),
        ({"ignore": ["re:(a+)+$"]}, {}, r"could take long"),
        ({"ignore": ["re:" + ".*" * 9]}, {}, r"could take long"),
        ({"ignore": ["re:" + ".?" * 40 + "!"]}, {}, r"could take long"),
        ({"ignore": ["re:" + "(?:.|.)" * 28 + "!"]}, {}, r"could take long"),
        ({"ignore": ["re:" + "(x|.?)" * 30 + "!"]}, {}, r"could take long"),
        ({"ignore": ["re:.*.*.*!"] * 100}, {}, r"the 100 patterns in quantization_config could take long"),
        ({"ignore": ["re:a"] * 300}, {}, r"has 1 groups and 300 patterns; at most 100 and 200"),
        ({"config_groups": dict.fromkeys(map(str, range(101)), LAYER)}, {}, r"has 101 groups"),
        ({}, {"num_bits": 9}, r"weights\.num_bits=9 is not supported; supported: 2, 3, 4, 5, 6, 7, 8"),
        ({}, {"num_bits": True}, r"weights\.num_bits=True is not supported"),
        ({}, {"type": "float"}, r"weights\.type='float' is not supported"),
        ({}, {"symmetric": 1}, r"weights\.symmetric=1 is not supported"),
        ({}, {"strategy": "block"}, r"weights\.strategy='block' is not supported"),
        ({}, {"group_size": 0}, r"weights\.group_size=0 is not a positive number"),
        ({}, {"group_size": "x"}, r"weights\.group_size='x' is not a positive number"),
        ({}, {"actorder": "best"}, r"weights\.actorder='best' is not one of"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], weights: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(request(change, weights))


def test_a_group_larger_than_a_layer_is_one_scale() -> None:
    method = make(request({}, {"group_size": 10**40})).method("model.layers.0.mlp.up_proj", Role.LINEAR)
    packed, scale = method.tensors((32, 64))[:2]
    assert (packed.shape, scale.shape) == ((32, 8), (32, 1))
    weight = method.decode(
        {"weight_packed": torch.full((32, 8), 0x77777777, dtype=torch.int32), "weight_scale": torch.full((32, 1), 3.0)},
        WeightPart((32, 64), range(32), range(64)),
        torch.float32,
    )
    assert isinstance(weight, PackedWeight)
    assert torch.equal(weight.dequantized(torch.float32), torch.full((32, 64), -3.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_activations": {"num_bits": 6}}, r"group_0\.input_activations\.num_bits=6 is not supported"),
        ({"input_activations": 8}, r"group_0\.input_activations=8 is of a wrong type"),
        ({"output_activations": {"num_bits": 8}}, r"group_0\.output_activations=.* is not supported"),
    ],
)
def test_activations_that_are_not_known_are_refused(change: dict[str, Any], message: str) -> None:
    groups = Layout().config()["config_groups"]
    groups["group_0"] |= change
    with pytest.raises(ModelError, match=message):
        make(request({"config_groups": groups}, {}))


def test_a_layer_has_the_method_of_its_name_before_that_of_its_class() -> None:
    first, second = (copy.deepcopy(Layout().config()["config_groups"]["group_0"]) for _ in range(2))
    second["targets"], second["weights"]["num_bits"] = ["re:.*down_proj"], 8
    made = make(request({"config_groups": {"a": first, "b": second}, "ignore": ["model.layers.0.mlp.up_proj"]}, {}))

    def bits(module: str, role: Role = Role.LINEAR) -> int | None:
        stored = made.method(module, role).tensors((32, 64))[0]
        return None if stored.kind == "weight" else 32 * stored.shape[1] // 64

    assert bits("model.layers.0.self_attn.q_proj") == 4
    assert bits("model.layers.0.mlp.down_proj") == 8
    assert bits("model.layers.0.mlp.up_proj") is None
    assert bits("lm_head", Role.HEAD) == 4
    assert bits("model.embed_tokens", Role.EMBEDDING) is None


def test_the_checkpoint_decides_and_a_flag_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = Layout().config()
    for wanted in (None, "none", "compressed-tensors"):
        method = choose(wanted, config, torch.float32, "cpu").method("model.layers.0.mlp.up_proj", Role.LINEAR)
        assert method.tensors((32, 64))[0].kind == "weight_packed"
    with pytest.raises(ConfigError, match=r"quantization=fp8 does not fit .* quant_method is compressed-tensors"):
        choose("fp8", config, torch.float32, "cpu")
    with pytest.raises(ConfigError, match="quantization=compressed-tensors: the checkpoint is not quantized"):
        choose("compressed-tensors", {}, torch.float32, "cpu")
    with pytest.raises(ConfigError, match="needs the native CPU kernels"):
        choose("int8", config, torch.float32, "cpu")
    on_gpu = choose("int8", config, torch.bfloat16, "cuda").method("lm_head", Role.HEAD)
    assert isinstance(on_gpu.prepare(torch.randn(64, 128)), MadeWeight)
    assert isinstance(choose(None, {}, torch.float32, "cpu").method("lm_head", Role.HEAD), Unquantized)


def test_older_files_call_the_same_frozen() -> None:
    quantization = choose(None, Layout().config() | {"quantization_status": "frozen"}, torch.float32, "cpu")
    assert quantization.method("model.layers.0.mlp.up_proj", Role.LINEAR).tensors((32, 64))[0].kind == "weight_packed"


def test_facts_say_how_a_checkpoint_is_quantized(tmp_path: Path) -> None:
    packed = checkpoint(tmp_path)
    assert describe("m", packed).quant_method == "compressed-tensors"
    assert describe("m", packed).quantization_config["ignore"] == list(Layout().ignore)
    assert describe("m", packed, hf_overrides={"quantization_config": None}).quant_method is None
    edit_config(packed, quantization_config={"quant_method": "abc"})
    with pytest.raises(ModelError, match=r"quant_method 'abc' .* is not supported; supported: .*compressed-tensors"):
        describe("m", packed)
    for value in ("abc", [1], {"bits": 4}, {"quant_method": 3}):
        edit_config(packed, quantization_config=value)
        with pytest.raises(ModelError, match="is not an object with a quant_method"):
            describe("m", packed)
    edit_config(packed, quantization_config=None, compression_config=Layout().config())
    assert describe("m", packed).quant_method == "compressed-tensors"
