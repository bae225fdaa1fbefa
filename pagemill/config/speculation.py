"""Settings of speculative decoding: who proposes drafts, and how many (docs/speculation.md)."""

from dataclasses import dataclass, field
from typing import ClassVar, Final

from pagemill.config.fields import setting

MATCH: Final = "match"
STANDARD: Final = "standard"
SYNTHETIC: Final = "synthetic"
"""When drafts are accepted."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Who proposes drafts, and how many. A field that the method does not read is refused."""

    method: str | None = setting(None, "who proposes drafts: a name in catalog/proposers.py (default: nobody)")
    model: str | None = setting(
        None,
        "the model that proposes drafts, where the method has one: alias, folder, .gguf file or hub id; of "
        "custom_class the class that proposes, as module:Class",
    )
    revision: str | None = setting(None, "branch, tag or commit of that model on the hub")
    quantization: str | None = setting(
        None, "precision of that model's weights, as --quantization (default: as in the file)"
    )
    max_model_len: int | None = setting(
        None, "tokens of a request beyond which that model proposes nothing (default: what both models can)", low=1
    )
    draft_tensor_parallel_size: int | None = setting(
        None, "ranks that model is split over; only as many as the model that verifies", low=1
    )
    num_speculative_tokens: int | None = setting(None, "most drafts of a request in a step (default: 4)", low=1)
    prompt_lookup_min: int | None = setting(None, "fewest last tokens that ngram looks for (default: 2)", low=1)
    prompt_lookup_max: int | None = setting(None, "most last tokens that ngram looks for (default: 4)", low=1)
    suffix_decoding_max_tree_depth: int | None = setting(
        None, "tokens that suffix looks for and proposes, together (default: 24)", low=2
    )
    suffix_decoding_max_cached_requests: int | None = setting(
        None, "outputs of former requests that suffix remembers; 0: none (default: 10,000)", low=0
    )
    suffix_decoding_max_spec_factor: float | None = setting(
        None, "tokens that suffix proposes for each that it has recognised (default: 1.0)", low=0
    )
    suffix_decoding_min_token_prob: float | None = setting(
        None, "how likely tokens must be, by their frequency, for suffix to propose them (default: 0.1)", low=0
    )
    adaptive: bool | None = setting(
        None,
        "as many drafts as make tokens come fastest, by what was right so far and by what steps cost (default: true); "
        "false: as many as there are",
    )
    disable_by_batch_size: int | None = setting(
        None, "steps of so many requests or more have no drafts (default: all may)", low=1
    )

    rejection_sample_method: str | None = setting(
        None,
        "when a draft is accepted (default: match): match, where the token drawn in its place is equal; standard, by "
        "exact rejection sampling; synthetic, by chance, to measure steps with weights that mean nothing",
        choices=(MATCH, STANDARD, SYNTHETIC),
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = setting(
        None, "of synthetic: how often the first draft is accepted, the first two are, and so on"
    )
    synthetic_acceptance_length: float | None = setting(
        None, "of synthetic: tokens that a step with all drafts yields on average, with the one behind them", low=1
    )

    REFUSED: ClassVar[dict[str, str]] = {
        name: why
        for why, names in (
            (
                "a draft model runs with the settings of the model that verifies, proposes its most likely tokens, and "
                "has the same vocabulary; leave it out",
                "moe_backend attention_backend kv_cache_dtype code_revision use_heterogeneous_vocab parallel_drafting "
                "draft_sample_method disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction "
                "enable_adaptive_verification dspark_draft_topk",
            ),
            ("use disable_by_batch_size", "num_speculative_tokens_per_batch_size speculative_disable_by_batch_size"),
        )
        for name in names.split()
    }
    """Fields that vLLM has besides -> why there are none here, or what to do instead."""


@dataclass(frozen=True)
class SpeculationSettings:
    """Speculative decoding: tokens that are proposed before the model is asked, and verified several at a time."""

    speculative_config: SpeculativeConfig = setting(
        SpeculativeConfig(),
        'JSON object: who proposes drafts, and how many, such as {"method": "ngram"}; by default ngram, of few '
        "requests at once, on CPUs with AVX-512 whose kernels compute the model in bfloat16, and nobody elsewhere",
        short="-sc",
    )
    spec_method: str | None = setting(None, "method of --speculative-config")
    spec_model: str | None = setting(None, "model of --speculative-config")
    spec_tokens: int | None = setting(None, "num_speculative_tokens of --speculative-config", low=1)


SPECULATION: Final = SpeculationSettings()
"""Nobody is asked to propose drafts."""


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig(SpeculationSettings):
    """`SpeculationSettings`, resolved: all that is asked for is in `speculative_config`, and fits."""

    speculative_config: SpeculativeConfig = field(default=SpeculativeConfig())
    by_default: bool = field(default=False)
    """Whether nobody has said anything about drafts: then there are some only where they change nothing but times."""

    @property
    def active(self) -> bool:
        """Whether anybody proposes drafts."""
        return self.speculative_config.method is not None


NO_SPECULATION: Final = SpeculationConfig()
"""Nobody proposes drafts."""
