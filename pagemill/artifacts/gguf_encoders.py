"""GGUF families of encoders."""

from typing import Any, Final

from pagemill.artifacts.gguf_family import GgufFamily
from pagemill.artifacts.gguf_file import GgufFile
from pagemill.artifacts.gguf_keys import GgufKeys
from pagemill.errors import ModelError


def _bert(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Tables of positions of RoBERTa's files begin with position 0, so that these are BERT's too."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "max_position_embeddings": _rows(file, "position_embd.weight"),
        "type_vocab_size": _rows(file, "token_types.weight"),
    }


def _rows(file: GgufFile, name: str) -> int:
    found = file.tensors.get(name)
    if found is None or len(found.shape) != 2:
        raise ModelError(f"{file.path} has no matrix {name}")
    return found.shape[0]


ENCODERS: Final[dict[str, GgufFamily]] = {
    "bert": GgufFamily(
        _bert,
        ("BertModel",),
        layer={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        top={
            "token_embd": "embeddings.word_embeddings",
            "position_embd": "embeddings.position_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
        },
        turns=False,
        layers="encoder.layer",
    ),
}
"""`general.architecture` -> the family."""
