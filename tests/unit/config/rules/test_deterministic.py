"""`deterministic`: what it covers, and that everything else is refused by name."""

import dataclasses

import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.config.facts import DeviceFacts, ModelFacts
from pagemill.config.resolve import resolve
from pagemill.errors import ConfigError
from pagemill.platforms.cpu import CpuPlatform

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 64, "num_hidden_layers": 4}
FACTS = ModelFacts("m", "/m", "safetensors", "LlamaForCausalLM", SIZES, "bfloat16", 2048, 100)
CPU = DeviceFacts("cpu", 2, 2**34, ("bfloat16", "float32"), "bfloat16")
GPU = DeviceFacts("cuda", 2, 2**34, ("bfloat16", "float16", "float32"), capability=(9, 0), captures=True)


def settle(device, facts=FACTS, **settings):
    return resolve(EngineArgs("m", **settings).settings, facts, device)[0].model.deterministic


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_by_the_flag_or_by_the_environment(device, monkeypatch):
    assert settle(device, deterministic=True)
    assert not settle(device)
    assert settle(dataclasses.replace(device, deterministic=True))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert CpuPlatform().facts().deterministic


@pytest.mark.parametrize(
    ("device", "settings", "reason"),
    [
        (GPU, {"dtype": "float32"}, r"dtype=float32 on a cuda \(allowed: bfloat16, float16\)"),
        (GPU, {"quantization": "fp8"}, "quantization=fp8"),
        (GPU, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        (GPU, {"tensor_parallel_size": 4}, r"tensor_parallel_size=4 \(allowed: 1, and 2, whose sums have one order\)"),
        (GPU, {"pipeline_parallel_size": 2}, r"pipeline_parallel_size=2 \(allowed: 1\)"),
        (GPU, {"disable_cascade_attn": False}, "disable_cascade_attn=False"),
        (GPU, {"optimization_level": 3}, "torch.compile"),
        (GPU, {"runner": "pooling"}, "runner=pooling"),
        (dataclasses.replace(GPU, capability=(8, 0)), {}, "a GPU of compute capability below 9.0"),
        (CPU, {"dtype": "float32"}, r"dtype=float32 on a cpu \(allowed: bfloat16\)"),
        (CPU, {"kv_cache_dtype": "int8"}, "kv_cache_dtype=int8"),
        (CPU, {"quantization": "int8"}, "quantization=int8"),
        (dataclasses.replace(CPU, quantized_dtype=None), {"dtype": "bfloat16"}, "this CPU has no native kernels"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_settings_that_are_not_covered(device, settings, reason):
    with pytest.raises(ConfigError, match=f"deterministic=True is not possible here: .*{reason}"):
        settle(device, deterministic=True, **settings)
    assert not settle(device, **settings)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "a quantized checkpoint"),
        ({"weights_format": "gguf"}, "a quantized checkpoint"),
        ({"implementation": "transformers"}, "m is computed by transformers"),
    ],
)
def test_models_that_are_not_covered(change, reason):
    facts = dataclasses.replace(FACTS, **change)
    for device in (CPU, GPU):
        with pytest.raises(ConfigError, match=reason):
            settle(device, facts, deterministic=True)
