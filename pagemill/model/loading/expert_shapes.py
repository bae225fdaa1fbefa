"""Names and shapes of what checkpoints of mixtures of experts have in place of an MLP. For weights made up."""

from typing import Any

from pagemill.config.facts import ModelFacts

Shapes = list[tuple[str, tuple[int, ...]]]


def expert_shapes(facts: ModelFacts, index: int) -> Shapes:
    """Of layer `index`, names within the layer; nothing for a layer that has an MLP."""
    config, architecture = facts.hf_config, facts.architecture
    if architecture == "Qwen3MoeForCausalLM":
        step, plain = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
        if not facts.num_experts or index in plain or (index + 1) % step:
            return []
        names = ("gate_proj", "up_proj", "down_proj")
        return _experts("mlp", names, facts.num_experts, config["moe_intermediate_size"], config)
    if architecture in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"):
        return _deepseek(facts, index)
    if architecture == "MixtralForCausalLM":
        names = ("w1", "w3", "w2")
        return _experts("block_sparse_moe", names, facts.num_experts, config["intermediate_size"], config)
    return []


def _deepseek(facts: ModelFacts, index: int) -> Shapes:
    config = facts.hf_config
    first, step = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    if not facts.num_experts or index < first or index % step:
        return []
    size, inner = config["hidden_size"], config["moe_intermediate_size"]
    found = _experts("mlp", ("gate_proj", "up_proj", "down_proj"), facts.num_experts, inner, config)
    if facts.architecture == "DeepseekV3ForCausalLM":
        found.append(("mlp.gate.e_score_correction_bias", (facts.num_experts,)))
    shared = inner * (config.get("n_shared_experts") or 0)
    if shared:
        for name, shape in (("gate_proj", (shared, size)), ("up_proj", (shared, size)), ("down_proj", (size, shared))):
            found.append((f"mlp.shared_experts.{name}.weight", shape))
    return found


def _experts(module: str, names: tuple[str, str, str], num_experts: int, inner: int, config: dict[str, Any]) -> Shapes:
    size = config["hidden_size"]
    found: Shapes = [(f"{module}.gate.weight", (num_experts, size))]
    for expert in range(num_experts):
        for name, shape in zip(names, ((inner, size), (inner, size), (size, inner)), strict=True):
            found.append((f"{module}.experts.{expert}.{name}.weight", shape))
    return found
