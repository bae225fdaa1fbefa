"""Tiny random checkpoints in Hugging Face format, made with transformers: one per architecture, with a tokenizer."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 320

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}

SPECIFIC: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "MistralForCausalLM": {"sliding_window": 24},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "DeepseekV2ForCausalLM": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        **LATENT,
        "q_lora_rank": None,
    },
    "DeepseekV3ForCausalLM": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        **LATENT,
    },
    "GPTNeoXForCausalLM": {"num_key_value_heads": 4, "rotary_pct": 0.5, "hidden_act": "gelu"},
    "OPTForCausalLM": {"num_key_value_heads": 4, "ffn_dim": 96},
    "MixtralForCausalLM": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
    "Gemma3ForCausalLM": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 30.0,
    },
}

ABSENT = object()
"""In place of a value of `COMMON` that a configuration is not to have."""
LAYER_NORMS = ("GPTNeoXForCausalLM", "OPTForCausalLM")
PLANNABLE = [name for name in SPECIFIC if "kv_lora_rank" not in SPECIFIC[name]]
"""Those that the native kernels run as one plan."""
_MADE: dict[tuple[str, int, str], tuple[dict[str, bytes], torch.Tensor]] = {}
"""(architecture, seed, changes) -> the files of a checkpoint by name, and the generator's state after it was made."""


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges: every byte is a token, after the special tokens 0, 1, 2."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer


def make_checkpoint(folder: Path, architecture: str, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of the architecture, in float32, and a tokenizer; returns the folder.

    What was made before is written again, and leaves torch's generator of random numbers as it did then."""
    key = (architecture, seed, repr(changes))
    if key not in _MADE:
        with tempfile.TemporaryDirectory() as made:
            _make(Path(made), architecture, seed, changes)
            _MADE[key] = {path.name: path.read_bytes() for path in Path(made).iterdir()}, torch.get_rng_state()
    files, state = _MADE[key]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    torch.set_rng_state(state)
    return folder


def _make(folder: Path, architecture: str, seed: int, changes: dict[str, Any]) -> None:
    import transformers  # heavy, and only the reference of tests

    model_class = getattr(transformers, architecture)
    fields = COMMON | SPECIFIC.get(architecture, {}) | changes
    config = model_class.config_class(**{name: value for name, value in fields.items() if value is not ABSENT})
    torch.manual_seed(seed)
    model = model_class(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and ".ln_" not in name:
                parameter.normal_(0, 0.12)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(".layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": false, "chat_template": '
        "\"{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\\n{% endfor %}"
        '{% if add_generation_prompt %}assistant:{% endif %}"}'
    )
