"""The smallest configurations of models whose layers keep states, with every variant that their configs have."""

from typing import Any

from tests.fakes.tiny_families import SMALL

MAMBA: dict[str, Any] = {"num_hidden_layers": 2, "state_size": 8, "conv_kernel": 4, "max_position_embeddings": 1024}
MAMBA2: dict[str, Any] = MAMBA | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}
JAMBA: dict[str, Any] = {
    "mamba_d_state": 8,
    "mamba_dt_rank": 8,
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 0,
}
BAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
GRANITE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "tie_word_embeddings": True,
}
FALCON: dict[str, Any] = SMALL | {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.2,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 0.7,
    "ssm_out_multiplier": 1.3,
    "mlp_multipliers": [0.6, 0.5],
    "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 0.6],
}
DELTA: dict[str, Any] = SMALL | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "mlp_only_layers": [1],
}
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaForCausalLM", MAMBA | {"time_step_rank": 8}),
    "mamba-biases": ("MambaForCausalLM", MAMBA | {"time_step_rank": 4, "use_bias": True, "use_conv_bias": False}),
    "mamba2": ("Mamba2ForCausalLM", MAMBA2),
    "mamba2-limits": ("Mamba2ForCausalLM", MAMBA2 | {"time_step_limit": (0.05, 0.5), "n_groups": 1, "use_bias": True}),
    "jamba": ("JambaForCausalLM", JAMBA),
    "bamba": ("BambaForCausalLM", BAMBA),
    "granite-hybrid": ("GraniteMoeHybridForCausalLM", GRANITE),
    "granite-hybrid-experts": (
        "GraniteMoeHybridForCausalLM",
        GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48, "mamba_n_groups": 2},
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybridForCausalLM",
        GRANITE | {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rope", "attention_bias": True},
    ),
    "falcon-h1": ("FalconH1ForCausalLM", FALCON),
    "falcon-h1-norm": (
        "FalconH1ForCausalLM",
        FALCON | {"mamba_rms_norm": True, "mamba_n_groups": 1, "projectors_bias": True, "mlp_bias": True},
    ),
    "falcon-h1-gate-first": (
        "FalconH1ForCausalLM",
        SMALL
        | {
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    "qwen3-next": ("Qwen3NextForCausalLM", DELTA),
}
"""Family, or family and variant -> architecture, and what differs from `COMMON`."""
