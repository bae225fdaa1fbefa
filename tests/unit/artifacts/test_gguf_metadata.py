import math

import gguf
import numpy as np
import pytest

from pagemill.artifacts.gguf_file import read_gguf
from pagemill.artifacts.gguf_metadata import (
    checkpoint_dtype,
    eos_token_ids,
    hf_config,
    pooling_type,
    sampling_defaults,
    unused_sampling_defaults,
)
from pagemill.errors import ModelError
from pagemill.messages.pooling_params import PoolingType
from tests.unit.artifacts.gguf_builder import HEADS, HIDDEN, VOCAB, write_gguf


def config_of(tmp_path, arch="llama", keys=lambda writer: None, tensors=None, **options):
    return hf_config(read_gguf(write_gguf(tmp_path / "m.gguf", arch, keys, tensors, **options)))


def test_llama(tmp_path):
    config = config_of(tmp_path, keys=lambda writer: writer.add_rope_freq_base(5e5))
    assert config == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HIDDEN // HEADS,
        "rms_norm_eps": pytest.approx(1e-5), "max_position_embeddings": 128, "vocab_size": VOCAB,
        "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "rope_theta": 5e5, "rope_scaling": None,
    }  # fmt: skip


def test_own_head_is_not_tied_and_sets_the_width(tmp_path):
    config = config_of(tmp_path, tensors={"output.weight": np.zeros((VOCAB + 16, HIDDEN), np.float32)})
    assert (config["tie_word_embeddings"], config["vocab_size"]) == (False, VOCAB + 16)


def test_llama_with_a_window_is_mistral(tmp_path):
    config = config_of(tmp_path, keys=lambda writer: writer.add_sliding_window(64))
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 64


def test_biases_show_in_the_tensors(tmp_path):
    tensors = {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}
    assert config_of(tmp_path, tensors=tensors)["attention_bias"] is True


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen(tmp_path, arch):
    config = config_of(tmp_path, arch, lambda writer: writer.add_key_length(16))
    assert config["architectures"] == [f"{arch.title()}ForCausalLM"]
    assert config["head_dim"] == 16


def gemma_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(32)
    writer.add_key_length(16)


def test_gemma3(tmp_path):
    def keys(writer):
        gemma_keys(writer)
        writer.add_final_logit_softcapping(30.0)

    config = config_of(tmp_path, "gemma3", keys)
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (32, 16)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (None, 30.0)


def test_gemma3_layers_come_from_the_pattern(tmp_path):
    def period(writer):
        gemma_keys(writer)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)

    assert config_of(tmp_path, "gemma3", period)["layer_types"] == ["sliding_attention", "full_attention"]

    def flags(writer):
        gemma_keys(writer)
        writer.add_array("gemma3.attention.sliding_window_pattern", [False, True])

    assert config_of(tmp_path, "gemma3", flags)["layer_types"] == ["full_attention", "sliding_attention"]


def test_linear_and_yarn_scaling(tmp_path):
    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    assert config_of(tmp_path, keys=linear)["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    assert config_of(tmp_path, keys=yarn)["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """The table as converters write it: one loop over frequencies, straight from the definition."""
    table = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            table.append(1.0)
        elif wavelength > 8192 / 1:
            table.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_table(tmp_path, factor):
    def keys(writer):
        writer.add_rope_freq_base(5e5)
        writer.add_key_length(64)
        writer.add_value_length(64)

    config = config_of(tmp_path, keys=keys, tensors={"rope_freqs.weight": llama3_factors(64, 5e5, factor)})
    assert config["rope_scaling"] == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_other_rope_tables_are_divisors_as_they_are(tmp_path):
    table = {"rope_freqs.weight": np.linspace(1, 3, HIDDEN // HEADS // 2, dtype=np.float32)}
    scaling = config_of(tmp_path, tensors=table)["rope_scaling"]
    assert (scaling["rope_type"], scaling["attention_factor"]) == ("longrope", 1.0)
    assert scaling["short_factor"] == scaling["long_factor"] == pytest.approx([1, 5 / 3, 7 / 3, 3])


def test_long_rope_is_of_two_tables(tmp_path):
    def keys(writer):
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_attn_factors(1.19)

    tables = {
        "rope_factors_short.weight": np.ones(HIDDEN // HEADS // 2, np.float32),
        "rope_factors_long.weight": np.full(HIDDEN // HEADS // 2, 4, np.float32),
    }
    assert config_of(tmp_path, keys=keys, tensors=tables)["rope_scaling"] == {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "attention_factor": pytest.approx(1.19), "original_max_position_embeddings": 32,
    }  # fmt: skip


@pytest.mark.parametrize("values", [[1.0, 2.0], [1.0, 2.0, 0.0, 4.0], [1.0, 2.0, float("inf"), 4.0]])
def test_a_table_that_can_divide_nothing_is_refused(tmp_path, values):
    with pytest.raises(ModelError, match=r"rope_freqs\.weight (is of shape|has values that are)"):
        config_of(tmp_path, tensors={"rope_freqs.weight": np.array(values, np.float32)})


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("gptj", lambda w: None, r"architecture 'gptj' is not supported; supported: .*gemma3, .*llama, .*qwen3"),
        ("qwen3", lambda w: w.add_expert_count(8), "mixtures of experts"),
        ("llama", lambda w: w.add_rope_dimension_count(4), "partial rotary embedding .4 of 8"),
        ("llama", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "RoPE scaling 'longrope'"),
        ("llama", lambda w: w.add_value_length(16), "different size"),
        ("llama", lambda w: w.add_rope_freq_base(float("nan")), "rope.freq_base is nan"),
        ("gemma3", lambda w: None, r"no key gemma3.attention.sliding_window"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, arch, keys, message):
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path, arch, keys)


def test_keys_of_the_wrong_type_and_missing_keys(tmp_path):
    with pytest.raises(ModelError, match=r"has no key llama.attention.head_count"):
        config_of(tmp_path, shape_keys=False)
    with pytest.raises(ModelError, match=r"llama.rope.freq_base is 'fast', not a number"):
        config_of(tmp_path, keys=lambda writer: writer.add_string("llama.rope.freq_base", "fast"))
    with pytest.raises(ModelError, match=r"no matrix token_embd.weight"):
        config_of(tmp_path, embedding=False)


def test_heads_per_layer_must_agree(tmp_path):
    def keys(counts):
        return lambda writer: writer.add_array("llama.attention.head_count_kv", counts)

    def build(counts):
        path = tmp_path / "heads.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(2)
        writer.add_feed_forward_length(64)
        writer.add_head_count(HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        keys(counts)(writer)
        writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return hf_config(read_gguf(path))

    assert build([2, 2])["num_key_value_heads"] == 2
    with pytest.raises(ModelError, match="head_count_kv differs between layers"):
        build([2, 4])


@pytest.mark.parametrize("values", [[1.5, 1.5], [float("inf")], [float("nan")]])
def test_numbers_of_layers_are_integers(tmp_path, values):
    def keys(writer):
        writer.add_context_length(128)
        writer.add_embedding_length(32)
        writer.add_array("llama.attention.head_count", values)

    with pytest.raises(ModelError, match=r"head_count is an array of float\d+, not an integer"):
        hf_config(read_gguf(write_gguf(tmp_path / "m.gguf", keys=keys, shape_keys=False)))


def test_end_tokens_are_those_the_template_writes(tmp_path):
    def keys(template):
        def add(writer):
            writer.add_token_list(["<eos>", "<end_of_turn>", "<|im_end|>", "a"])
            writer.add_token_types([3, 3, 1, 1])
            writer.add_eos_token_id(0)
            writer.add_chat_template(template)

        return add

    file = read_gguf(write_gguf(tmp_path / "m.gguf", keys=keys("{{ m }}<end_of_turn><|im_end|>")))
    assert eos_token_ids(file) == (0, 1)
    file = read_gguf(write_gguf(tmp_path / "m.gguf", keys=keys("{{ m }}")))
    assert eos_token_ids(file) == (0,)


def test_end_of_turn_key_and_the_absent_token(tmp_path):
    def keys(writer):
        writer.add_eos_token_id(7)
        writer.add_eot_token_id(9)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 2**32 - 1)

    assert eos_token_ids(read_gguf(write_gguf(tmp_path / "m.gguf", keys=keys))) == (7, 9)


def test_recommended_sampling(tmp_path):
    def keys(writer):
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.penalty_repeat", 1.5)

    file = read_gguf(write_gguf(tmp_path / "m.gguf", keys=keys))
    assert unused_sampling_defaults(file) == {"penalty_repeat": 1.5}
    found = sampling_defaults(file)
    assert found == {"temperature": 0.5, "top_k": 20}
    assert isinstance(found["top_k"], int)


def test_dtype_of_plain_files(tmp_path):
    assert checkpoint_dtype(read_gguf(write_gguf(tmp_path / "m.gguf"))) == "float16"
    mixed = {"output.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    assert checkpoint_dtype(read_gguf(write_gguf(tmp_path / "m.gguf", tensors=mixed))) == "bfloat16"


def test_how_vectors_are_made_is_as_the_file_says(tmp_path):
    def read(kind):
        path = write_gguf(tmp_path / "m.gguf", "qwen3", lambda writer: writer.add_pooling_type(kind))
        return pooling_type(read_gguf(path))

    assert pooling_type(read_gguf(write_gguf(tmp_path / "m.gguf"))) is None
    assert read(gguf.PoolingType.NONE) is None
    assert read(gguf.PoolingType.LAST) is PoolingType.LAST
    assert read(gguf.PoolingType.CLS) is PoolingType.CLS
    with pytest.raises(ModelError, match=r"qwen3\.pooling_type=4 is not supported; supported: 0 \(none\), 1 \(mean\)"):
        read(gguf.PoolingType.RANK)


def test_tensors_of_more_layers_than_there_are(tmp_path):
    tensors = {"blk.2.attn_norm.weight": np.ones(HIDDEN, np.float32)}
    with pytest.raises(ModelError, match=r"llama\.block_count=2, and there is a tensor blk\.2\.attn_norm\.weight"):
        hf_config(read_gguf(write_gguf(tmp_path / "m.gguf", tensors=tensors)))
