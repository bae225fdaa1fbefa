"""Defaults that are filled in from the model and the machine, and wishes that cannot be met."""

import dataclasses

import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.config.facts import DeviceFacts, ModelFacts
from pagemill.config.resolve import resolve
from pagemill.errors import ConfigError

FACTS = ModelFacts("m", "/m", "safetensors", "LlamaForCausalLM", {}, "bfloat16", 2048, 100)
FAST = DeviceFacts("cpu", 6, 2**34, ("bfloat16", "float32"))
SLOW = DeviceFacts("cpu", 2, 2**34, ("float32",))


def settle(device=FAST, **settings):
    return resolve(EngineArgs("m", **settings).settings, FACTS, device)


def test_defaults_come_from_the_model_and_the_machine():
    config, decisions = settle()
    assert (config.model.dtype, config.model.max_model_len, config.cpu.cpu_threads) == ("bfloat16", 2048, 6)
    assert (config.cache.block_size, config.scheduler.max_num_batched_tokens) == (16, 2048)
    assert {decision.field for decision in decisions} >= {"dtype", "max_model_len", "block_size", "cpu_threads"}
    assert all(decision.why for decision in decisions)


def test_a_step_starts_prompts_by_the_threads_that_compute_them():
    device = dataclasses.replace(FAST, prefill_tokens=320)
    assert settle(device)[0].scheduler.max_prefill_tokens == 6 * 320
    assert settle(device, cpu_threads=2)[0].scheduler.max_prefill_tokens == 640
    assert settle(device, max_prefill_tokens=0)[0].scheduler.max_prefill_tokens == 0
    assert settle()[0].scheduler.max_prefill_tokens == 0


def test_how_many_requests_run_at_once_follows_the_device():
    gpu = dataclasses.replace(FAST, kind="cuda", num_seqs=1024, captures=True)
    assert settle()[0].scheduler.max_num_seqs == 128
    assert settle(gpu)[0].scheduler.max_num_seqs == 1024
    assert settle(gpu, max_num_seqs=8)[0].scheduler.max_num_seqs == 8
    assert settle(gpu)[0].graphs.compilation_config.max_cudagraph_capture_size == 1024


def test_what_is_asked_of_the_cache_of_an_encoder_is_said_to_have_no_effect():
    encoder = dataclasses.replace(FACTS, is_encoder=True)
    for asked, said in (("int8", {("kv_cache_dtype", "auto")}), ("auto", set())):
        config, decisions = resolve(EngineArgs("m", runner="pooling", kv_cache_dtype=asked).settings, encoder, FAST)
        assert config.cache.kv_cache_dtype == "auto"
        made = {(decision.field, decision.value) for decision in decisions}
        assert {one for one in made if one[0] == "kv_cache_dtype"} == said
        assert ("enable_prefix_caching", False) in made


def test_a_step_of_an_encoder_is_as_large_as_the_budget():
    """Nobody waits there for the next token of a request."""
    device = dataclasses.replace(FAST, prefill_tokens=320)
    encoder = dataclasses.replace(FACTS, is_encoder=True)
    for asked, settled in ((None, 0), (64, 64)):
        config, _ = resolve(EngineArgs("m", runner="pooling", max_prefill_tokens=asked).settings, encoder, device)
        assert config.scheduler.max_prefill_tokens == settled


def test_nothing_is_left_open():
    config, _ = settle()
    optional = {"tokenizer", "tokenizer_revision", "revision", "download_dir", "chat_template", "attention_backend"}
    optional |= {"num_gpu_blocks_override", "kv_cache_memory_bytes", "quantization"}
    for section in (config.model, config.cache, config.scheduler, config.cpu):
        for field in dataclasses.fields(section):
            assert field.name in optional or getattr(section, field.name) is not None, field.name


def test_a_slow_type_is_replaced_and_said():
    config, decisions = settle(SLOW)
    assert config.model.dtype == "float32"
    assert any("slow" in decision.why for decision in decisions)


def test_quantized_checkpoints_have_the_type_that_their_kernels_take():
    """As quantized files have; not where they are dequantized."""
    device = dataclasses.replace(FAST, quantized_dtype="bfloat16")
    facts = dataclasses.replace(FACTS, dtype="float32")
    stored = dataclasses.replace(facts, quantization_config={"quant_method": "compressed-tensors"})

    def dtype(facts, **settings):
        return resolve(EngineArgs("m", **settings).settings, facts, device)[0].model.dtype

    assert dtype(facts) == dtype(stored, quantization="none") == "float32"
    assert dtype(stored) == dtype(stored, quantization="compressed-tensors") == "bfloat16"


def test_explicit_settings_win():
    config, _ = settle(
        SLOW, dtype="bfloat16", max_model_len=100, block_size=32, cpu_threads=1, max_num_batched_tokens=64
    )
    assert (config.model.dtype, config.model.max_model_len, config.cache.block_size) == ("bfloat16", 100, 32)
    assert (config.cpu.cpu_threads, config.scheduler.max_num_batched_tokens) == (1, 64)


def test_more_tokens_than_positions_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"max_model_len=4096 .* --max-model-len 2048"):
        settle(max_model_len=4096)


def test_partial_blocks_are_reused_with_prefix_caching_only():
    assert settle(enable_partial_block_reuse=True)[0].cache.enable_partial_block_reuse
    with pytest.raises(ConfigError, match=r"enable_partial_block_reuse=True needs enable_prefix_caching=True"):
        settle(enable_partial_block_reuse=True, enable_prefix_caching=False)


def test_a_budget_below_the_length_needs_chunked_prefill():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=64 .* chunked prefill is off"):
        settle(max_num_batched_tokens=64, enable_chunked_prefill=False)
    config, _ = settle(enable_chunked_prefill=False)
    assert config.scheduler.max_num_batched_tokens == 2048


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int3"}, "dtype='int3' is not one of"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 is too small: at least 1"),
        ({"max_num_seqs": "many"}, "max_num_seqs='many' is not of type int"),
        ({"block_size": True}, "block_size=True is not of type int"),
    ],
)
def test_bad_values_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        settle(**settings)


SPLIT = dataclasses.replace(
    FACTS,
    hf_config={
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
    },
)


def split(**settings):
    return resolve(EngineArgs("m", **settings).settings, SPLIT, FAST)[0]


def test_workers_share_the_cores():
    assert split(tensor_parallel_size=2).cpu.cpu_threads == 3
    assert split(tensor_parallel_size=4, pipeline_parallel_size=4).cpu.cpu_threads == 1
    assert split(tensor_parallel_size=2, cpu_threads=5).cpu.cpu_threads == 5
    assert split(tensor_parallel_size=2, pipeline_parallel_size=2).parallel.workers_per_replica == 4


@pytest.mark.parametrize("size", [3, 5, 8])
def test_heads_that_do_not_divide_are_refused_and_what_does_is_named(size):
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size={size} .*num_attention_heads=12.* 1, 2, 4, 6, 12$"):
        split(tensor_parallel_size=size)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=5 .* 4 layers of m; allowed: 1 to 4"):
        split(pipeline_parallel_size=5)


def test_kv_events_are_checked_before_anything_starts():
    events = {"enable_kv_cache_events": True}
    assert settle(kv_events_config=events)[0].cache.kv_events_config.active
    with pytest.raises(ConfigError, match="no events with enable_prefix_caching=False"):
        settle(kv_events_config=events, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="endpoint='here' is not an endpoint"):
        settle(kv_events_config=events | {"endpoint": "here"})
    settle(kv_events_config=events | {"endpoint": "here", "publisher": "null"}, enable_prefix_caching=False)


def runner_of(facts=FACTS, **settings):
    config, _ = resolve(EngineArgs("m", **settings).settings, facts, FAST)
    pooler = config.model.pooler_config
    return config.model.runner, pooler.pooling_type, pooler.normalize


FOR_EMBEDDINGS = dataclasses.replace(FACTS, pooling_type="MEAN", normalizes=False)
HEADLESS = dataclasses.replace(FACTS, has_head=False)


def test_the_runner_is_what_the_model_is_for():
    assert runner_of() == ("generate", "LAST", True)
    assert runner_of(FOR_EMBEDDINGS) == ("pooling", "MEAN", False)
    assert runner_of(HEADLESS) == ("pooling", "LAST", True)
    assert runner_of(FOR_EMBEDDINGS, runner="generate") == ("generate", "MEAN", False)
    assert runner_of(runner="pooling") == ("pooling", "LAST", True)
    given = {"pooling_type": "cls", "normalize": True}
    assert runner_of(FOR_EMBEDDINGS, pooler_config=given) == ("pooling", "CLS", True)


def test_runners_that_cannot_be():
    with pytest.raises(ConfigError, match=r"runner='generate' needs an output head.*--runner pooling"):
        runner_of(HEADLESS, runner="generate")
    with pytest.raises(ConfigError, match="pooler_config has no effect"):
        runner_of(pooler_config={"normalize": False})
    with pytest.raises(ConfigError, match="pooling_type='SUM' is not one of LAST, CLS, MEAN"):
        runner_of(pooler_config={"pooling_type": "SUM"})


def test_one_way_of_naming_the_attention_backend():
    config, _ = settle(attention_config={"backend": "TORCH_CPU", "layer_backends": {"*.0.*": "CPU_ATTN"}})
    assert config.model.attention_config.backend == "TORCH_CPU"
    with pytest.raises(ConfigError, match=r"attention_backend='A' and attention_config.backend='B' are mutually excl"):
        settle(attention_backend="A", attention_config={"backend": "B"})
    with pytest.raises(ConfigError, match="flash_attn_version=4 is not allowed: 2 or 3"):
        settle(attention_config={"flash_attn_version": 4})
