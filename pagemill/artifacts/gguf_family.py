"""`GgufFamily`: what the GGUF files of one architecture call things, and what was done to values when they were made.

Knows no tensor's values, and nothing about how a model is computed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pagemill.artifacts.gguf_file import GgufFile, GgufTensor
from pagemill.artifacts.gguf_keys import GgufKeys
from pagemill.errors import ModelError
from pagemill.utils.text import index_of, shown_name

TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AFTER: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
HALVES: Final = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
ROPE_TABLES: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""What divides rotary frequencies: read with the metadata."""
MAX_STACKED: Final = 1 << 14
"""Of a checkpoint's tensors in one of a file."""


def without(*names: str) -> dict[str, str]:
    """`LAYER` but for some."""
    return {name: place for name, place in LAYER.items() if name not in names}


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor of a checkpoint that files have in parts, or in another form."""

    form: str
    """What makes it of them: one of model/loading/sources/gguf_forms.py."""
    parts: tuple[str, ...]
    """Tensors of a layer, or of none, without blk.N, with their endings."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a checkpoint, and those of the file that it is made of."""

    name: str
    """The Hugging Face name."""
    tensors: tuple[GgufTensor, ...]
    form: str | None = None
    """As in `Made`; None: it is the one tensor."""


ConfigMaker = Callable[[GgufFile, GgufKeys, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class GgufFamily:
    """The files whose `general.architecture` is of one name."""

    config: ConfigMaker
    """(file, its keys, what all families have of a config.json) -> the rest: architectures, model_type and what else
    the model reads. Raises ModelError for what has no equal here."""
    architectures: tuple[str, ...]
    """Those that `config` may name."""
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    """Tensor of a layer, without blk.N and ending -> its Hugging Face name within the layer."""
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    """The same for tensors that are of no layer."""
    exact: Mapping[str, str] = field(default_factory=dict)
    """Tensor of a layer, without blk.N, with its ending -> its name within the layer, with its ending."""
    stacks: Mapping[str, str] = field(default_factory=dict)
    """Tensor without blk.N and ending that is several of a checkpoint, one after the other -> their name, with {} for
    the number."""
    numbered: Mapping[str, str] = field(default_factory=dict)
    """Tensor without blk.N, a number (`ffn_gate.3.weight`) and ending, in files from before experts were stacked -> its
    name within the layer, with {} for the number."""
    made: Mapping[str, Made] = field(default_factory=dict)
    """Name within the layer, with its ending -> what it is made of."""
    unused: tuple[str, ...] = ROPE_TABLES
    """Tensors that are no weights of the model."""
    paired_heads: Mapping[str, str] = field(default_factory=dict)
    """Module within a layer -> the setting that is its number of heads, where conversion put the rows of each head in
    pairs for rotary embeddings: (pair, half) in the file, (half, pair) in Hugging Face's order."""
    norm_offset: float = 0.0
    """What conversion added to the weights of norms."""
    plain_norms: tuple[str, ...] = ()
    """Endings of the names of norms that it left alone."""
    rope_theta: float = 10_000.0
    """Where the file does not say it."""
    turns_part: bool = False
    """Whether rotary embedding may be of part of each head."""
    turns: bool = True
    """Whether `config` needs what files say of rotary embedding as all families have it."""
    latent: bool = False
    """Whether attention is multi-head latent attention."""
    mixes: bool = False
    """Whether there may be experts."""
    varies: tuple[str, ...] = ()
    """Keys, after the name of the architecture, whose numbers may differ between layers."""
    layers: str = "model.layers"
    """The Hugging Face name of what the layers are in."""
    variant: "Callable[[GgufFile], GgufFamily | None] | None" = None
    """Which other family a file is of, if any: architectures that share a name of GGUF's."""

    def of(self, file: GgufFile) -> "GgufFamily":
        """The family of a file whose architecture is of this name."""
        return (self.variant(file) if self.variant is not None else None) or self

    def pieces(self, tensors: Mapping[str, GgufTensor], num_layers: int) -> Iterator[Piece]:
        """The tensors of a checkpoint that a file holds; of layers from `num_layers` on, which predict more tokens, it
        is none. Raises ModelError for names that are not known, and where something lacks a part."""
        found: dict[tuple[str, str], dict[str, GgufTensor]] = {}
        parts: dict[str, list[str]] = {}
        for name, made in self.made.items():
            for part in made.parts:
                parts.setdefault(part, []).append(name)
        for tensor in tensors.values():
            prefix, rest = _place(tensor.name)
            if tensor.name in self.unused or (prefix is not None and int(prefix) >= num_layers):
                continue
            if rest in parts:
                for name in parts[rest]:
                    found.setdefault((f"{self.layers}.{prefix}." if prefix else "", name), {})[rest] = tensor
            else:
                yield from self._known(tensor, prefix, rest)
        for (layer, name), given in found.items():
            made = self.made[name]
            missing = [part for part in made.parts if part not in given]
            if missing:
                there = next(iter(given.values())).name
                raise ModelError(f"GGUF tensor {shown_name(there)} lacks its other part {missing[0]!r}")
            yield Piece(layer + name, tuple(given[part] for part in made.parts), made.form)

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a tensor that is one in a checkpoint, too. Raises ModelError for one that is not
        known."""
        prefix, rest = _place(name)
        stem, _, kind = rest.rpartition(".")
        if prefix is None and stem in self.top:
            return f"{self.top[stem]}.{kind}"
        if prefix is not None and rest in self.exact:
            return f"{self.layers}.{prefix}.{self.exact[rest]}"
        numbered, _, number = stem.rpartition(".")
        expert = index_of(number)
        if prefix is not None and numbered in self.numbered and expert is not None:
            return f"{self.layers}.{prefix}.{self.numbered[numbered].format(expert)}.{kind}"
        if prefix is None or stem not in self.layer:
            raise ModelError(f"GGUF tensor {shown_name(name)} is not known for this architecture")
        return f"{self.layers}.{prefix}.{self.layer[stem]}.{kind}"

    def _known(self, tensor: GgufTensor, prefix: str | None, rest: str) -> Iterator[Piece]:
        """What one tensor holds."""
        stem, _, kind = rest.rpartition(".")
        if stem not in self.stacks:
            yield Piece(self.hf_name(tensor.name), (tensor,))
            return
        layer = f"{self.layers}.{prefix}." if prefix else ""
        for index, one in enumerate(_unstacked(tensor)):
            yield Piece(f"{layer}{self.stacks[stem].format(index)}.{kind}", (one,))


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor is of; None: it is of none."""
    number, _ = _place(name)
    return None if number is None else int(number)


def _place(name: str) -> tuple[str | None, str]:
    """(number of the layer, the rest of a tensor's name); None: it is of no layer."""
    prefix, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    if prefix == "blk" and index_of(number) is not None and part:
        return number, part
    return None, name


def _unstacked(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The tensors that one holds, by its first dimension."""
    count, *shape = tensor.shape
    if not shape or tensor.num_bytes is None or not 0 < count <= MAX_STACKED:
        raise ModelError(
            f"GGUF tensor {shown_name(tensor.name)} of type {tensor.type_name} and shape {tensor.shape} is no stack"
        )
    num_bytes = tensor.num_bytes // count
    for index in range(count):
        yield replace(tensor, shape=tuple(shape), offset=tensor.offset + index * num_bytes, num_bytes=num_bytes)


def optional(keys: GgufKeys, key: str) -> float | None:
    """A number that stands for none where it is 0, or not there."""
    return keys.number(key, 0.0) or None


def window_kinds(keys: GgufKeys, arch: str, num_layers: int, period: int) -> list[str]:
    """What layers see, as `layer_types` says it: all but every n-th a window, by a key or `period`; or a number for
    each that is not 0 for a window."""
    key = f"{arch}.attention.sliding_window_pattern"
    if keys.has_array(key):
        windowed = [number != 0 for number in keys.per_layer(key, num_layers)]
    else:
        every = keys.integer(key, period)
        windowed = [every < 1 or (layer + 1) % every != 0 for layer in range(num_layers)]
    return ["sliding_attention" if window else "full_attention" for window in windowed]


def optional_window(keys: GgufKeys, arch: str, num_layers: int, period: int) -> dict[str, Any]:
    """The window and which layers have it, where a file says one."""
    window = keys.integer(f"{arch}.attention.sliding_window", 0)
    if not window:
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": window_kinds(keys, arch, num_layers, period)}
