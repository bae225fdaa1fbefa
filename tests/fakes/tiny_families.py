"""Tiny configurations of families of models, each with variants: what `make_checkpoint` makes checkpoints of."""

from typing import Any

from tests.fakes.tiny_checkpoint import ABSENT

SLIDING = "sliding_attention"
FULL = "full_attention"
SMALL: dict[str, Any] = {"num_hidden_layers": 2}
MIXED: dict[str, Any] = SMALL | {"sliding_window": 24, "layer_types": [SLIDING, FULL]}
PLAIN: dict[str, Any] = SMALL | {"head_dim": ABSENT, "num_key_value_heads": ABSENT, "intermediate_size": ABSENT}
GPT: dict[str, Any] = {
    name: ABSENT for name in (
        "head_dim", "num_key_value_heads", "intermediate_size", "hidden_size", "num_hidden_layers",
        "num_attention_heads", "max_position_embeddings",
    )
} | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}  # fmt: skip
"""Which factors are used, transformers decides by the length of a sequence, and we by that of the context: here either
is far on the same side of what the model was trained for."""

NANO: dict[str, Any] = {
    "num_hidden_layers": 4, "sliding_window": 24, "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 200, "laurel_rank": 8,
    "intermediate_size": [96, 96, 96, 64], "activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.0],
}  # fmt: skip

SHARING: dict[str, Any] = {
    "num_hidden_layers": 4, "sliding_window": 24, "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "global_head_dim": 32, "hidden_size_per_layer_input": 0,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-odd": ("LlamaForCausalLM", SMALL | {
        "vocab_size": 321, "num_key_value_heads": 1, "head_dim": 32, "hidden_act": "gelu_new", "attention_bias": True,
        "tie_word_embeddings": False, "rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}),
    "llama-gelu": ("LlamaForCausalLM", SMALL | {
        "hidden_act": "gelu", "rope_parameters": LONG | {"factor": 4.0, "original_max_position_embeddings": 4}}),
    "llama-dynamic": ("LlamaForCausalLM", SMALL | {
        "hidden_act": "relu2", "mlp_bias": True, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2-window": ("Qwen2ForCausalLM", SMALL | {
        "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "rope_parameters": YARN | {
            "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False}}),
    "gemma": ("GemmaForCausalLM", SMALL),
    "gemma2": ("Gemma2ForCausalLM", MIXED | {"query_pre_attn_scalar": 24}),
    "gemma2-uncapped": ("Gemma2ForCausalLM", MIXED | {
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}),
    "gemma2-gelu": ("Gemma2ForCausalLM", MIXED | {
        "layer_types": [FULL, SLIDING], "hidden_activation": "gelu", "vocab_size": 321}),
    "gemma3n": ("Gemma3nForCausalLM", NANO),
    "gemma3n-alone": ("Gemma3nForCausalLM", NANO | {
        "num_kv_shared_layers": 0, "altup_num_inputs": 2, "altup_active_idx": 1, "altup_correct_scale": False,
        "intermediate_size": 96, "activation_sparsity_pattern": None, "vocab_size_per_layer_input": 320,
        "attention_bias": True}),
    "gemma4": ("Gemma4ForCausalLM", SHARING | {
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320,
        "use_double_wide_mlp": True, "final_logit_softcapping": 20.0}),
    "gemma4-key-is-value": ("Gemma4ForCausalLM", SHARING | {
        "num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "attention_bias": True,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: {
                "rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.6, "factor": 2.0}}}),
    "gemma4-experts": ("Gemma4ForCausalLM", SHARING | {
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32,
        "num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True}),
    "phi3": ("Phi3ForCausalLM", SMALL | {"head_dim": ABSENT}),
    "phi3-window": ("Phi3ForCausalLM", SMALL | {"head_dim": ABSENT, "sliding_window": 20}),
    "phi3-longrope": ("Phi3ForCausalLM", SMALL | {
        "head_dim": ABSENT, "rope_parameters": LONG, "original_max_position_embeddings": 4}),
    "phi3-longrope-within": ("Phi3ForCausalLM", SMALL | {
        "head_dim": ABSENT, "rope_parameters": LONG, "original_max_position_embeddings": 4096,
        "max_position_embeddings": 8192}),
    "phi4-mini": ("Phi3ForCausalLM", SMALL | {
        "head_dim": ABSENT, "tie_word_embeddings": True, "original_max_position_embeddings": 4,
        "rope_parameters": LONG | {"short_factor": [1.0] * 6, "long_factor": [1, 1.1, 1.3, 1.7, 2, 3],
                                   "partial_rotary_factor": 0.75}}),
    "olmo2": ("Olmo2ForCausalLM", SMALL),
    "olmo2-yarn": ("Olmo2ForCausalLM", SMALL | {"rope_parameters": YARN, "num_key_value_heads": 4}),
    "olmo3": ("Olmo3ForCausalLM", MIXED),
    "olmo3-yarn": ("Olmo3ForCausalLM", MIXED | {"rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 5e5}, FULL: YARN | {"rope_theta": 5e5}}}),
    "granite": ("GraniteForCausalLM", SMALL | {
        "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625, "tie_word_embeddings": True}),
    "granite-moe": ("GraniteMoeForCausalLM", SMALL | {
        "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48, "embedding_multiplier": 12.0,
        "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625}),
    "granite-moe-shared": ("GraniteMoeSharedForCausalLM", SMALL | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "shared_intermediate_size": 64,
        "attention_bias": True, "tie_word_embeddings": True}),
    "granite-biases": ("GraniteForCausalLM", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "glm": ("GlmForCausalLM", SMALL | {"attention_bias": True}),
    "glm4": ("Glm4ForCausalLM", SMALL | {"attention_bias": True}),
    "glm4-whole-rotary": ("Glm4ForCausalLM", SMALL | {
        "attention_bias": False, "rope_parameters": {
            "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    "cohere": ("CohereForCausalLM", SMALL | {"logit_scale": 0.25}),
    "cohere-qk-norm": ("CohereForCausalLM", SMALL | {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("Cohere2ForCausalLM", MIXED),
    "smollm3": ("SmolLM3ForCausalLM", SMALL | {"no_rope_layers": [1, 0]}),
    "smollm3-window": ("SmolLM3ForCausalLM", SMALL | {
        "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 20, "rope_parameters": YARN}),
    "smollm3-listed": ("SmolLM3ForCausalLM", MIXED | {"attention_bias": True, "mlp_bias": True}),
    "exaone4": ("Exaone4ForCausalLM", MIXED),
    "exaone4-full": ("Exaone4ForCausalLM", SMALL | {
        "sliding_window": None, "layer_types": [FULL, FULL], "rope_parameters": LLAMA3}),
    "gpt2": ("GPT2LMHeadModel", GPT | {"n_inner": 80}),
    "gpt2-scaled": ("GPT2LMHeadModel", GPT | {
        "scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}),
    "falcon-7b": ("FalconForCausalLM", PLAIN | {"multi_query": True, "parallel_attn": True}),
    "falcon-40b": ("FalconForCausalLM", PLAIN | {
        "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}),
    "falcon-11b": ("FalconForCausalLM", PLAIN | {
        "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon-rw": ("FalconForCausalLM", PLAIN | {
        "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "bloom": ("BloomForCausalLM", PLAIN | {"n_layer": 2, "n_head": 4}),
    "bloom-6-heads": ("BloomForCausalLM", PLAIN | {"n_layer": 2, "n_head": 6, "hidden_size": 48}),
    "stablelm": ("StableLmForCausalLM", SMALL | {"head_dim": ABSENT, "use_qkv_bias": True}),
    "stablelm-12b": ("StableLmForCausalLM", SMALL | {
        "head_dim": ABSENT, "qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2ForCausalLM", SMALL | {"sliding_window": 20}),
    "starcoder2-without-biases": ("Starcoder2ForCausalLM", SMALL | {"use_bias": False}),
    "phi": ("PhiForCausalLM", SMALL | {"head_dim": ABSENT, "num_key_value_heads": 4}),
    "phi-qk-norm": ("PhiForCausalLM", SMALL | {"head_dim": ABSENT, "qk_layernorm": True}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", SMALL | EXPERTS | {
        "num_experts": 6, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}),
    "olmoe": ("OlmoeForCausalLM", SMALL | {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": ABSENT}),
    "glm4-moe": ("Glm4MoeForCausalLM", SMALL | EXPERTS | {
        "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0}),
    "deepseek-v2": ("DeepseekV2ForCausalLM", SMALL | EXPERTS | {
        "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 32}),
    "deepseek-dense": ("DeepseekV2ForCausalLM", SMALL | {"first_k_dense_replace": 2}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", SMALL | EXPERTS | {
        "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 24}),
    "gpt-oss": ("GptOssForCausalLM", MIXED | {
        "num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 0.3,
        "rope_parameters": YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}}),
    "llama4": ("Llama4ForCausalLM", {
        "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 80,
        "attention_chunk_size": 24, "no_rope_layers": [1, 0, 1], "moe_layers": [0, 1], "floor_scale": 16}),
    "llama4-two-experts": ("Llama4ForCausalLM", SMALL | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 80, "use_qk_norm": False,
        "attention_chunk_size": 32, "rope_parameters": LLAMA3, "no_rope_layers": [1, 0], "moe_layers": [1]}),
}  # fmt: skip
"""Family, or family and variant -> architecture, and what differs from `COMMON`."""
