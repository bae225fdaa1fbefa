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
    if architecture == "MixtralForCausalLM":
        names = ("w1", "w3", "w2")
        return _experts("block_sparse_moe", names, facts.num_experts, config["intermediate_size"], config)
    return []


def _experts(module: str, names: tuple[str, str, str], num_experts: int, inner: int, config: dict[str, Any]) -> Shapes:
    size = config["hidden_size"]
    found: Shapes = [(f"{module}.gate.weight", (num_experts, size))]
    for expert in range(num_experts):
        for name, shape in zip(names, ((inner, size), (inner, size), (size, inner)), strict=True):
            found.append((f"{module}.experts.{expert}.{name}.weight", shape))
    return found
