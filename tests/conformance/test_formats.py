"""Quantized checkpoints of every format against transformers on their dequantized weights, and bad ones.

Layouts and dequantization are written here from the formats' descriptions; test_formats_libraries.py has what the
publishing libraries themselves compress and decompress.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagemill.artifacts.describe import describe
from pagemill.catalog.quantization import check_quantization
from pagemill.errors import ConfigError, ModelError
from pagemill.model.factory import load_model
from pagemill.model.kernels.linear import packs_natively
from pagemill.model.kernels.moe import SILU
from pagemill.model.layers.moe.merged_experts import MergedExperts, MergedForm
from pagemill.model.quantization import mxfp4
from pagemill.model.quantization.choose import choose
from pagemill.model.quantization.interface import Role
from pagemill.model.quantization.ordered import OrderedWeight
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from tests.fakes.compressed_checkpoint import edit_config
from tests.fakes.configs import model_config
from tests.fakes.paged import PagedModel
from tests.fakes.stored_formats import (
    BNB4,
    E2M1,
    FORMATS,
    gptq_config,
    modelopt,
    mxfp4_experts,
    store,
    store_gpt_oss,
    torchao,
)
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_families import FAMILIES

TOKENS = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(0)).tolist()
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
IN_BLOCKS = (
    "auto-round-gptq",
    "auto-round-awq",
    "gptq-2",
    "gptq-3",
    "gptq-4",
    "gptq-4-ordered",
    "gptq-v2",
    "awq",
    "llm-int8",
    "quark-int8",
    "quark-mxfp4",
    "torchao-int8",
    "torchao-int4",
)
"""What the integer kernels multiply as it is."""
AS_FLOATS = ("fp8", "fp8-block", "modelopt-fp8", "quark-fp8", "nf4", "nf4-nested", "torchao-fp8")
"""What is multiplied as it is, with inputs of 16 bits."""


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("formats") / "model", "LlamaForCausalLM", **SIZES)


@pytest.fixture(params=FORMATS)
def stored(request: pytest.FixtureRequest, plain_folder: Path, tmp_path: Path) -> tuple[str, Path, Path]:
    """(format, the checkpoint in it, the same dequantized)"""
    return (request.param, *store(plain_folder, tmp_path, *FORMATS[request.param]))


def load(path: Path, dtype: str = "float32", quantization: str | None = None) -> PagedModel:
    config = model_config(str(path), dtype=dtype, quantization=quantization)
    return PagedModel(load_model(describe(str(path), path), config, CpuPlatform(), PhaseTimer()), dtype)


def reference_logits(path: Path) -> Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits[0]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).square().mean().sqrt() / wanted.std())


def test_formats_equal_transformers_on_their_dequantized_weights(stored: tuple[str, Path, Path]) -> None:
    _, packed, plain = stored
    found = load(packed).logits(TOKENS)
    wanted = reference_logits(plain)
    assert relative_error(found, wanted) < 1e-4
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.skipif(not packs_natively(), reason="this machine computes no integers natively")
def test_formats_run_on_the_kernels_or_say_that_they_are_dequantized(
    stored: tuple[str, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """With inputs of 8 bits, the logits differ by what these lose. Whole and in chunks, the same."""
    name, packed, plain = stored
    model = load(packed, "bfloat16")
    said = [record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()]
    assert len(said) == (0 if name in (*IN_BLOCKS, *AS_FLOATS) else 1), said
    found = model.logits(TOKENS)
    # Layers of 128 inputs: a model of any real size averages over more.
    error = relative_error(found, reference_logits(plain))
    assert error < (0.08 if name in IN_BLOCKS else 0.03)
    assert torch.equal(model.logits(TOKENS, 7), found)


@pytest.mark.skipif(not packs_natively(), reason="this machine computes no integers natively")
def test_formats_with_inputs_in_their_own_order_decode_as_the_reference(plain_folder: Path, tmp_path: Path) -> None:
    """GPTQ with desc_act, token by token on the integer kernels: the tokens of transformers, but where two are nearly
    as likely."""
    packed, plain = store(plain_folder, tmp_path, *FORMATS["gptq-4-ordered"])
    model = load(packed, "bfloat16")
    layer = model.model.get_submodule("layers.0.mlp.down_proj").weight
    assert isinstance(layer, OrderedWeight)
    found = model.logits(TOKENS, 1)
    assert model.model._plan is not None, "it decodes as one native call"
    wanted = reference_logits(plain)
    best = wanted.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.3 * wanted.std()
    assert clear.sum() > len(TOKENS) // 4
    assert torch.equal(found.argmax(-1)[clear], wanted.argmax(-1)[clear])
    assert relative_error(found, wanted) < 0.08
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = load_file(plain / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert relative_error(layer.apply(x, None), x.float() @ weight.T) < 0.02


@pytest.mark.parametrize("name", ["gptq-4-ordered", "awq", "fp8", "fp8-block", "modelopt-nvfp4", "nf4", "torchao-int8"])
def test_formats_of_experts(tmp_path: Path, name: str) -> None:
    """Stored one by one, as linear layers are: what their dequantized weights give."""
    folder = make_checkpoint(tmp_path / "model", "Qwen3MoeForCausalLM", **SIZES, moe_intermediate_size=64)
    packed, plain = store(folder, tmp_path, *FORMATS[name])
    first = "model.layers.0.mlp.experts.0.up_proj"
    kinds = {key.removeprefix(first) for key in load_file(packed / "model.safetensors") if key.startswith(first)}
    assert len(kinds) > 1, "experts are stored in the format"
    found, wanted = load(packed).logits(TOKENS), load(plain).logits(TOKENS)
    assert relative_error(found, wanted) < 1e-4
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a shared expert and its gate, of one output."""
    architecture, changes = FAMILIES["qwen2-moe"]
    sizes = SIZES | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    return make_checkpoint(tmp_path_factory.mktemp("mixture") / "model", architecture, **(changes | sizes))


QUANTIZED = r"^(?!.*(shared_expert_gate|1\.self_attn\.q_proj|experts\.2\.down_proj|mlp\.gate)\.)"
"""All linear layers but a few, which no configuration here names: of queries stacked with keys and values that are
quantized, of one expert of several, and one that some formats could not store."""


@pytest.mark.parametrize("name", FORMATS)
def test_formats_have_as_floats_what_a_file_has_as_floats(mixture: Path, tmp_path: Path, name: str) -> None:
    packed, plain = store(mixture, tmp_path, *FORMATS[name], only=QUANTIZED)
    names = set(load_file(packed / "model.safetensors"))
    for layer in ("mlp.shared_expert_gate", "self_attn.q_proj", "mlp.experts.2.down_proj"):
        assert f"model.layers.1.{layer}.weight" in names
    assert not any("weight_scale" in kind or "scales" in kind for kind in names if "experts.2.down" in kind)
    found, wanted = load(packed).logits(TOKENS), load(plain).logits(TOKENS)
    assert relative_error(found, wanted) < 1e-4
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.skipif(not packs_natively(), reason="this machine computes no integers natively")
@pytest.mark.parametrize("name", ["awq", "fp8", "nf4"])
def test_formats_are_computed_beside_such_floats(mixture: Path, tmp_path: Path, name: str) -> None:
    packed, plain = store(mixture, tmp_path, *FORMATS[name], only=QUANTIZED)
    found, wanted = load(packed, "bfloat16").logits(TOKENS).float(), load(plain).logits(TOKENS)
    # Some tokens choose other experts.
    assert float(torch.nn.functional.cosine_similarity(found, wanted).median()) > 0.99


@pytest.mark.parametrize("name", ["gptq-4", "awq", "fp8", "fp8-block", "nf4", "llm-int8", "torchao-int8"])
@pytest.mark.parametrize("family", ["granite-moe", "gemma4-experts"])
def test_formats_leave_experts_in_one_tensor_as_they_are(tmp_path: Path, family: str, name: str) -> None:
    """What quantizes linear layers takes them for none; they are floats beside layers in the format."""
    architecture, changes = FAMILIES[family]
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    folder = make_checkpoint(tmp_path / "model", architecture, **(changes | sizes))
    packed, plain = store(folder, tmp_path, *FORMATS[name])
    found, wanted = load(packed).logits(TOKENS), load(plain).logits(TOKENS)
    assert relative_error(found, wanted) < 1e-4


def test_formats_are_dequantized_where_that_is_asked_for(plain_folder: Path, tmp_path: Path) -> None:
    packed, plain = store(plain_folder, tmp_path, *FORMATS["awq"])
    exact = load(packed, "bfloat16", "none").logits(TOKENS)
    assert torch.equal(exact, load(plain, "bfloat16").logits(TOKENS))
    with pytest.raises(ConfigError, match="quantization=gptq does not fit a checkpoint whose quant_method is awq"):
        load(packed, "bfloat16", "gptq")


@pytest.mark.skipif(not packs_natively(), reason="this machine computes no integers natively")
@pytest.mark.parametrize("name", ["int8", "int4", "int4_g64", "int4_g128", "fp8", "fp8_per_block"])
def test_formats_made_at_load(plain_folder: Path, name: str) -> None:
    """Any checkpoint of floats: what is lost is what the precision costs, less than the 16 steps of 4 bits."""
    wanted = load(plain_folder).logits(TOKENS)
    error = relative_error(load(plain_folder, "bfloat16", name).logits(TOKENS), wanted)
    assert error < (0.5 if name.startswith("int4") else 0.25)
    assert error > 0


@pytest.mark.skipif(not packs_natively(), reason="this machine computes no integers natively")
def test_formats_whose_floats_become_integers_too(plain_folder: Path, tmp_path: Path) -> None:
    """--quantization int8 on a quantized checkpoint: what it stores as floats, its head, in 8 bits."""
    packed, plain = store(plain_folder, tmp_path, *FORMATS["awq"])
    model = load(packed, "bfloat16", "int8")
    head = model.model.get_submodule("lm_head").weight.native(None)
    assert head.struct.format == 1 + 16  # with inputs of 16 bits
    assert relative_error(model.logits(TOKENS), reference_logits(plain)) < 0.08
    with pytest.raises(ConfigError, match="quantization=int8 needs the native CPU kernels and dtype=bfloat16"):
        load(packed, "float32", "int8")


def test_formats_of_gpt_oss_experts() -> None:
    """Blocks of 16 bytes and exponents, as the family's layer of experts reads them."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (6, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(110, 135, (6, 3), generator=generator).to(torch.uint8)
    values = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], -1).flatten(2)
    wanted = (values * 2.0 ** (scales.float() - 127).unsqueeze(-1)).flatten(1)
    weight = mxfp4.expert_weight(blocks, scales)
    assert torch.equal(weight.dequantized(torch.float32), wanted)
    exact = weight.as_blocks()
    assert exact is not None
    assert torch.equal(exact.dequantized(torch.float32), wanted)
    declared = mxfp4.stored_experts("gate_up_proj", 4, (6, 96))
    assert [(one.kind, one.shape) for one in declared] == [
        ("gate_up_proj_blocks", (4, 6, 3, 16)),
        ("gate_up_proj_scales", (4, 6, 3)),
    ]
    with pytest.raises(ModelError, match="100 inputs are no whole groups of 32"):
        mxfp4.stored_experts("down_proj", 4, (6, 100))


def test_formats_of_gpt_oss_checkpoints_equal_transformers(tmp_path: Path) -> None:
    """The published layout, against what transformers dequantizes."""
    import transformers

    architecture, changes = FAMILIES["gpt-oss"]
    folder = make_checkpoint(tmp_path / "model", architecture, **changes)
    folder, plain = store_gpt_oss(folder, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    with torch.no_grad():
        wanted = reference.eval()(torch.tensor([TOKENS])).logits[0].float()
    found = load(folder).logits(TOKENS)
    assert relative_error(found, wanted) < 1e-4
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert relative_error(found, load(plain).logits(TOKENS)) < 1e-5


@pytest.mark.parametrize("pairs", [True, False])
def test_formats_of_gpt_oss_experts_over_two_ranks(pairs: bool) -> None:
    """Each rank's slice of blocks that are read whole: of 48 inputs each, which begin within a group."""
    generator = torch.Generator().manual_seed(0)
    size, inner, count = 64, 96, 2
    stored = {}
    for name, shape in (("gate_up_proj", (size, 2 * inner)), ("down_proj", (inner, size))):
        blocks, scales = mxfp4_experts(torch.randn(count, *shape, generator=generator))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}

    def held(rank: int, ranks: int) -> MergedExperts:
        quantization = choose(None, {"quant_method": "mxfp4"}, torch.float32, "cpu")
        tp = SimpleNamespace(rank=rank, size=ranks)
        ctx = SimpleNamespace(
            name="layers.0.mlp.experts", dtype=torch.float32, exchange=None, expert_parallel=False,
            groups=SimpleNamespace(tp=tp, ep=tp), method=lambda _, role: quantization.method("0.experts", role),
        )  # fmt: skip
        experts = MergedExperts((size, inner, count), MergedForm(SILU, pairs=pairs), ctx=ctx)
        for declared in experts.checkpoint_tensors():
            experts.load(declared.stored.kind, 0, declared.part.of(stored[declared.stored.kind]))
        return experts

    x = torch.randn(5, size, generator=generator)
    chosen, weights = torch.tensor([[0, 1]] * 5), torch.rand(5, 2, generator=generator)
    whole = held(0, 1)(x, chosen, weights)
    assert whole.abs().max() > 0
    summed = held(0, 2)(x, chosen, weights) + held(1, 2)(x, chosen, weights)
    assert (summed - whole).abs().max() < 1e-5 * whole.abs().max()  # sums in another order


def test_formats_whose_writers_give_every_layer_a_bias(plain_folder: Path, tmp_path: Path) -> None:
    """GPTQ: of layers without one it is zeros; anything else would be lost."""
    packed, plain = store(plain_folder, tmp_path, *FORMATS["gptq-4"])
    tensors = load_file(packed / "model.safetensors")
    biases = {
        name.replace("scales", "bias"): torch.zeros(tensors[name].shape[1]) for name in tensors if "scales" in name
    }
    save_file(tensors | biases, packed / "model.safetensors", {"format": "pt"})
    assert relative_error(load(packed).logits(TOKENS), reference_logits(plain)) < 1e-4
    biases["model.layers.1.self_attn.o_proj.bias"][3] = 0.5
    save_file(tensors | biases, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"o_proj\.bias is not zero: the architecture has none"):
        load(packed)


def test_formats_that_have_biases_themselves(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "Qwen2ForCausalLM", **SIZES)
    packed, plain = store(folder, tmp_path, *FORMATS["gptq-4"])
    assert load_file(packed / "model.safetensors")["model.layers.0.self_attn.q_proj.bias"].any()
    assert relative_error(load(packed).logits(TOKENS), reference_logits(plain)) < 1e-4


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("gptq-4", "gptq_marlin"),
        ("awq", "awq_marlin"),
        ("modelopt-nvfp4", "modelopt_fp4"),
        ("auto-round-gptq", "inc"),
        ("gptq-4", "auto_gptq"),
        ("awq", "auto_awq"),
        ("gptq-4", "moe_wna16"),
        ("awq", "moe_wna16"),
    ],
)
def test_formats_by_the_names_of_kernels(plain_folder: Path, tmp_path: Path, name: str, flag: str) -> None:
    """As commands for vLLM have them."""
    packed, _ = store(plain_folder, tmp_path, *FORMATS[name])
    check_quantization(flag)
    assert torch.equal(load(packed, quantization=flag).logits(TOKENS), load(packed).logits(TOKENS))
    with pytest.raises(ConfigError, match="the checkpoint is not quantized"):
        load(plain_folder, quantization=flag)


@pytest.mark.parametrize("flag", ["fp8_per_tensor", "fp8_per_channel"])
def test_formats_at_load_by_other_names(plain_folder: Path, flag: str) -> None:
    check_quantization(flag)
    found, wanted = (load(plain_folder, "bfloat16", name).logits(TOKENS) for name in (flag, "fp8"))
    assert torch.equal(found, wanted)


def test_formats_of_modelopt_in_a_file_of_their_own(plain_folder: Path, tmp_path: Path) -> None:
    packed, plain = store(plain_folder, tmp_path, *FORMATS["modelopt-fp8"])
    edit_config(packed, quantization_config=None)
    (packed / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": null, '
        '"exclude_modules": ["lm_*"]}}'
    )
    assert relative_error(load(packed).logits(TOKENS), reference_logits(plain)) < 1e-4
    (packed / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no object `quantization`"):
        load(packed)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gptq_config(5, 32), r"bits=5 is not supported; supported: 2, 3, 4, 8"),
        (gptq_config(4, 0), r"group_size=0 is not a positive number"),
        (gptq_config(4, 32, checkpoint_format="marlin"), r"checkpoint_format='marlin' is not supported"),
        (gptq_config(4, 32, dynamic={"x": {}}), r"dynamic=.* is not supported"),
        (gptq_config(4, 32, desc_act="yes"), r"desc_act='yes' is of a wrong type"),
        ({"quant_method": "awq", "bits": 8, "group_size": 64}, r"bits=8 is not supported; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, r"version='gemv' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\] is not two positive"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt='e5m2' is not supported; supported: e4m3"),
        ({"quant_method": "fp8", "ignored_layers": ["*" * 9]}, r"at most 20000, with 8 \* in each"),
        (modelopt("W4A16_AWQ"), r"quant_algo='W4A16_AWQ' is not supported; supported: FP8, NVFP4"),
        ({"quant_method": "bitsandbytes"}, r"one of load_in_4bit and load_in_8bit must be true"),
        (BNB4 | {"bnb_4bit_quant_type": "x"}, r"bnb_4bit_quant_type='x' is not supported; supported: nf4, fp4"),
        (torchao("Int4WeightOnlyConfig", group_size=-3), r"group_size=-3 is not a positive number"),
        (torchao("UIntXWeightOnlyConfig"), r"_type='UIntXWeightOnlyConfig' is not supported"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, r"quant_type='int4_weight_only' is of a wrong"),
    ],
)
def test_formats_that_are_not_supported_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        choose(None, config, torch.float32, "cpu")


MX4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
RANDOM = {name: config for name, (config, _) in FORMATS.items()} | {
    name: {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    for name, weights in {"mxfp4-pack-quantized": MX4, "mxfp8-quantized": MX4 | {"num_bits": 8}}.items()
}


@pytest.mark.parametrize("name", RANDOM)
def test_formats_of_random_weights_compute_numbers(plain_folder: Path, tmp_path: Path, name: str) -> None:
    """`--load-format dummy`, of which only the config is read."""
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(plain_folder / file, tmp_path)
    edit_config(tmp_path, quantization_config=RANDOM[name])
    facts = describe(str(tmp_path), tmp_path, load_format="dummy")
    config = model_config(str(tmp_path), dtype="float32", load_format="dummy")
    model = PagedModel(load_model(facts, config, CpuPlatform(), PhaseTimer()), "float32")
    assert model.logits(TOKENS).isfinite().all()


def changed_state(state: Tensor, **changes: Any) -> Tensor:
    """The object that bitsandbytes writes beside a weight, with other values."""
    return torch.tensor(list(json.dumps(json.loads(bytes(state.tolist())) | changes).encode()), dtype=torch.uint8)


DAMAGE: dict[str, tuple[str, str, Callable[[dict[str, Tensor], str], object], str]] = {
    "no scales": ("awq", "scales", lambda tensors, name: tensors.pop(name), r"lacks tensors .*k_proj\.scales"),
    "more groups": (
        "gptq-4",
        "qzeros",
        lambda tensors, name: tensors.update({name: tensors[name].repeat(2, 1)}),
        r"k_proj\.qzeros has shape \(4, 8\), expected \(2, 8\)",
    ),
    "groups that are not there": (
        "gptq-4-ordered",
        "g_idx",
        lambda tensors, name: tensors[name].fill_(9),
        r"k_proj\.g_idx has values from 9 to 9, not within 0 to 3",
    ),
    "a wrong type": (
        "fp8-block",
        "weight",
        lambda tensors, name: tensors.update({name: tensors[name].view(torch.int8)}),
        r"k_proj\.weight is of type int8, expected float8_e4m3fn",
    ),
    "floats with scales": (
        "fp8-block",
        "weight",
        lambda tensors, name: tensors.update({name: tensors[name].float()}),
        r"weights both as floats and quantized: \S*k_proj\.weight, \S*k_proj\.weight_scale_inv$",
    ),
    "floats beside what is quantized": (
        "awq",
        "weight",
        lambda tensors, name: tensors.update({name: torch.ones(64, 128)}),
        r"weights both as floats and quantized: \S*k_proj\.weight, \S*k_proj\.qweight, \S*k_proj\.qzeros, ",
    ),
    "floats of another shape": (
        "awq",
        "weight",
        lambda tensors, name: tensors.update({name: torch.ones(64, 64)}),
        r"k_proj\.weight has shape \(64, 64\), expected \(64, 128\)",
    ),
    "8-bit floats without scales": (
        "fp8",
        "weight_scale",
        lambda tensors, name: [tensors.pop(name), tensors.pop(name.replace("weight", "input"))],
        r"lacks tensors .*k_proj\.weight_scale_inv$",
    ),
    "nothing of a layer": (
        "fp8",
        "weight",
        lambda tensors, name: [tensors.pop(key) for key in list(tensors) if "1.self_attn.k_proj" in key],
        r"lacks tensors .*k_proj\.weight, \S*k_proj\.weight_scale_inv$",
    ),
    "no JSON": (
        "nf4",
        "weight.quant_state.bitsandbytes__nf4",
        lambda tensors, name: tensors[name].fill_(91),
        "the quant_state is no JSON",
    ),
    "another block size": (
        "nf4",
        "weight.quant_state.bitsandbytes__nf4",
        lambda tensors, name: tensors.update({name: torch.tensor(list(b'{"blocksize": 1}'), dtype=torch.uint8)}),
        r"the quant_state has blocksize=1, expected 64",
    ),
    "a number that no float can be": (
        "nf4-nested",
        "weight.quant_state.bitsandbytes__nf4",
        lambda tensors, name: tensors.update({name: changed_state(tensors[name], nested_offset=10**400)}),
        r"k_proj\..*: the quant_state has nested_offset=a number of 1329 bits, which is no number up to 1e\+30",
    ),
    "a state without end": (
        "nf4",
        "weight.quant_state.bitsandbytes__nf4",
        lambda tensors, name: tensors.update({name: torch.zeros(5000, dtype=torch.uint8)}),
        r"has shape \(5000,\), expected \(up to 4096,\)",
    ),
    "not as many bits": (
        "torchao-int8",
        "_weight_qdata",
        lambda tensors, name: tensors.update({name: tensors[name][:, :3].contiguous()}),
        r"k_proj\._weight_qdata has shape \(64, 3\), expected \(64, 128\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_formats_that_are_damaged_end_in_one_line(plain_folder: Path, tmp_path: Path, damage: str) -> None:
    name, kind, change, message = DAMAGE[damage]
    packed, _ = store(plain_folder, tmp_path, *FORMATS[name])
    tensors = load_file(packed / "model.safetensors")
    change(tensors, f"model.layers.1.self_attn.k_proj.{kind}")
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message) as caught:
        load(packed)
    assert "\n" not in str(caught.value)


def test_formats_leave_as_floats_what_a_checkpoint_names() -> None:
    config = {"quant_method": "fp8", "ignored_layers": ["layers.3.mlp", "model.layers.1.self_attn.q_proj", "*.k_*"]}
    quantization = choose(None, config, torch.float32, "cpu")

    def kinds(module: str, role: Role = Role.LINEAR) -> int:
        return len(quantization.method(module, role).tensors((64, 64)))

    assert kinds("model.layers.2.mlp.up_proj") > 1
    for name in ("model.layers.3.mlp.up_proj", "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.k_proj"):
        assert kinds(name) == 1
    assert kinds("model.layers.13.mlp.up_proj") > 1
    assert [kinds("lm_head", Role.HEAD), kinds("model.layers.2.mlp.gate", Role.ROUTER)] == [1, 1]
