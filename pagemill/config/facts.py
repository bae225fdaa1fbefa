"""What `resolve` is told about the model and the device. Found by `artifacts` and `platforms`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagemill.config.pooling_facts import HeadFacts
from pagemill.messages.pooling_params import PoolingType

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What config.json files call it."""


@dataclass(frozen=True)
class ModelFacts:
    """What the files of a model say about it, in the vocabulary of a Hugging Face config.json."""

    name: str
    """As the user wrote it."""
    path: str
    """Folder (Hugging Face format) or .gguf file on this machine."""
    weights_format: str
    """A name in catalog.weights: safetensors or gguf."""
    architecture: str
    """A name in catalog.models, such as LlamaForCausalLM."""
    hf_config: dict[str, Any]
    """The text model's config.json as a flat dict; made from the metadata for GGUF. Keys as in Hugging Face."""
    dtype: str
    """Type in the checkpoint; bfloat16 for quantized files."""
    max_position: int
    vocab_size: int
    """Rows of the output head: the width of the logits."""
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """What files or settings recommend, where given: temperature, top_p, top_k, min_p, repetition_penalty,
    max_new_tokens."""
    unused_generation_defaults: dict[str, Any] = field(default_factory=dict)
    """What the files recommend besides, and nothing here heeds: typical_p and the like."""
    has_head: bool = True
    """Whether there is an output head: without one, no text can be generated."""
    pooling_type: PoolingType | None = None
    """How prompts are pooled, where the files say what the model is for."""
    normalizes: bool = True
    """Whether its vectors are scaled to length 1, where they say so."""
    implementation: str = "native"
    """Whose code computes the model: native, or a name in catalog.models.HOSTS."""
    is_encoder: bool = False
    """Whether tokens see each other in both directions: a prompt is computed in one step."""
    head: HeadFacts | None = None
    """What follows pooling, where the files have a head that classifies."""
    quantization_config: dict[str, Any] = field(default_factory=dict)
    """How the weights of a checkpoint are quantized, as its config.json says; empty where it says nothing."""

    @property
    def quant_method(self) -> str | None:
        """A name in catalog.quantization.QUANTIZED_CHECKPOINTS; None for floats and GGUF files."""
        return self.quantization_config.get("quant_method")

    @property
    def public_name(self) -> str:
        """What strangers may be told: the name, or the last part of it where it says where the files are."""
        written = Path(self.name)
        is_path = written == Path(self.path) or written.is_absolute() or self.name.startswith(("./", "../", "~"))
        return written.name if is_path else self.name

    @property
    def num_experts(self) -> int:
        """Experts of a mixture-of-experts layer that a router chooses between; 0 when there are none."""
        return max(int(self.hf_config.get(key) or 0) for key in EXPERT_COUNTS)


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core of which this process may use at least one CPU."""

    cpu: int
    """The first of its CPUs that may be used; the others are its SMT siblings."""
    node: int
    """NUMA node."""


@dataclass(frozen=True)
class CpuTopology:
    """CPUs by number, as Linux numbers them."""

    nodes: dict[int, int]
    """Every CPU of this process -> its NUMA node."""
    cores: tuple[Core, ...]
    """By node, then by CPU."""
    online: frozenset[int]
    """Of the machine, whether this process may use them or not."""
    quota: float | None = None
    """CPUs' worth of time that the control group allows; None: no limit."""

    @property
    def num_threads(self) -> int:
        """Threads that can run at once on cores of their own, within the quota."""
        allowed = len(self.cores) if self.quota is None else min(len(self.cores), int(self.quota))
        return max(1, allowed)

    @property
    def limited(self) -> bool:
        """Whether the quota is less than the cores: they are shared with others who see the same ones."""
        return self.quota is not None and self.quota < len(self.cores)

    def nodes_of(self, cpus: Iterable[int]) -> tuple[int, ...]:
        """NUMA nodes of these CPUs, in order."""
        return tuple(sorted({self.nodes[cpu] for cpu in cpus if cpu in self.nodes}))


@dataclass(frozen=True)
class DeviceFacts:
    """What the platform says about the machine."""

    kind: str
    """A name in catalog.platforms: cpu or cuda."""
    num_cores: int
    """Physical cores this process may use."""
    free_bytes: int
    """Memory of the device that is free now."""
    fast_dtypes: tuple[str, ...]
    """Types computed at full speed, best first; dtype=auto takes the checkpoint's if it is here, else the first."""
    quantized_dtype: str | None = None
    """The type beside which weights of 8 and 4 bits are computed as they are; None: they are dequantized."""
    token_budget: int = 2048
    """Tokens of one step that keep the device busy."""
    num_seqs: int = 128
    """Requests that run at once, where nobody says how many."""
    prefill_tokens: int = 0
    """Prompt tokens of one step beyond which a thread computes no faster; 0: more always help."""
    runs_ahead: bool = False
    """Whether work is queued: a call returns before the device is done with it."""
    title: str = ""
    """What the device is called by its maker."""
    capability: tuple[int, int] | None = None
    """Compute capability of a GPU, such as (9, 0)."""
    memory_bytes_per_s: float = 0.0
    """What a GPU's memory can be read at, as its maker says; 0 where nobody does."""
    captures: bool = False
    """Whether what is queued on the device can be captured and replayed, as CUDA graphs."""
    topology: CpuTopology | None = None
    """CPUs whose threads compute; None: a device of its own does."""
    threads_bind: str | None = None
    """What the environment says in place of --cpu-threads-bind, where a CPU computes."""
    deterministic: bool = False
    """Whether the environment says what --deterministic says."""
    drafts_pay: bool = False
    """Whether a step of one request takes little longer with a few tokens more, so that guesses may pay."""
