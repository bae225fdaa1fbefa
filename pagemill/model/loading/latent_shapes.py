"""Names and shapes of what checkpoints with multi-head latent attention have in it. For weights made up."""

from typing import Any


def latent_shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Of one layer's attention; nothing where it is of another kind."""
    latent, rank = config.get("kv_lora_rank"), config.get("q_lora_rank")
    if latent is None:
        return []
    size, heads = config["hidden_size"], config["num_attention_heads"]
    plain, turned, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query = heads * (plain + turned)
    queries: dict[str, tuple[int, ...]] = {"q_proj.weight": (query, size)}
    if rank is not None:
        queries = {"q_a_proj.weight": (rank, size), "q_a_layernorm.weight": (rank,), "q_b_proj.weight": (query, rank)}
    shapes = queries | {
        "kv_a_proj_with_mqa.weight": (latent + turned, size),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (plain + value), latent),
        "o_proj.weight": (size, heads * value),
    }
    if config.get("attention_bias"):
        shapes |= {"kv_a_proj_with_mqa.bias": (latent + turned,), "o_proj.bias": (size,)}
        if rank is not None:
            shapes["q_a_proj.bias"] = (rank,)
    return [(f"self_attn.{name}", shape) for name, shape in shapes.items()]
