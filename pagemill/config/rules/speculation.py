"""Rules of speculative decoding: which fields a method reads, and where drafts can be verified."""

from dataclasses import fields, replace
from typing import Any, Final

from pagemill.catalog.heads import (
    DFLASH,
    EAGLE,
    EAGLE3,
    MEDUSA,
    MLP_SPECULATOR,
    MOST_GUESSES,
    MTP,
    NUM_ROW_HEADS,
    PEAGLE,
)
from pagemill.catalog.proposers import CUSTOM_CLASS, PROPOSERS
from pagemill.config.decisions import Decisions
from pagemill.config.facts import DeviceFacts, ModelFacts
from pagemill.config.sections import ModelConfig, ParallelConfig
from pagemill.config.speculation import MATCH, SYNTHETIC, SpeculationConfig, SpeculationSettings, SpeculativeConfig
from pagemill.errors import ConfigError

DEFAULT_DRAFTS = 4
DRAFT_MODEL = "draft_model"
"""The method that is meant where a model is named and no method."""
NO_METHOD = "none"
"""Says that nobody proposes drafts."""
BY_DEFAULT: Final = SpeculativeConfig(method="ngram", num_speculative_tokens=8, disable_by_batch_size=4)
"""What is meant where nobody says anything and drafts may pay. Rows of more requests cost more than they can win."""
OF_FLOATS: Final = replace(BY_DEFAULT, disable_by_batch_size=7)
"""The same where weights are not quantized: reading them takes longer beside what a row costs."""
_OF_SYNTHETIC: Final = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
_OF_ALL: Final = frozenset(
    {
        "method",
        "num_speculative_tokens",
        "adaptive",
        "disable_by_batch_size",
        "rejection_sample_method",
        *_OF_SYNTHETIC,
    }
)
_OF_MODELS: Final = ("model", "revision", "quantization", "max_model_len", "draft_tensor_parallel_size")
_OF_ROW_HEADS: Final = ("model", "revision", "quantization", "draft_tensor_parallel_size")
_OTHER_METHODS: Final = {"deepseek_mtp": MTP, "qwen3_next_mtp": MTP}
"""What the reference calls a method, too."""
READS: Final[dict[str, tuple[str, ...]]] = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    CUSTOM_CLASS: ("model", "prompt_lookup_min", "prompt_lookup_max"),
    DRAFT_MODEL: _OF_MODELS,
    DFLASH: _OF_MODELS,
    EAGLE: _OF_MODELS,
    EAGLE3: _OF_MODELS,
    PEAGLE: _OF_MODELS,
    MEDUSA: _OF_ROW_HEADS,
    MLP_SPECULATOR: _OF_ROW_HEADS,
    MTP: ("max_model_len", "draft_tensor_parallel_size"),
}
"""Method -> fields that it reads besides those of all methods."""


def resolve_speculation(
    asked: SpeculationSettings,
    model: ModelConfig,
    parallel: ParallelConfig,
    device: DeviceFacts,
    facts: ModelFacts,
    decisions: Decisions,
    draft: ModelFacts | None = None,
) -> SpeculationConfig:
    """The section, complete. `draft`: the model or the heads that propose, where settings name one. Raises ConfigError
    for a method that nobody knows, for a field that the method does not read, for more drafts than a request can have
    or heads guess, and where no drafts can be verified."""
    wanted = merged(asked)
    if wanted == SpeculativeConfig() and _may_pay(model, parallel, device, facts):
        meant = OF_FLOATS if _in_floats(model, facts) else BY_DEFAULT
        decisions.note("speculative_config", meant.method, "the CPU verifies a few guesses at little cost")
        return SpeculationConfig(speculative_config=meant, by_default=True)
    if wanted.method in (None, NO_METHOD):
        _check_unused(wanted)
        return SpeculationConfig()
    _check_method(wanted.method)
    _check_fields(wanted, wanted.method)
    if wanted.method == CUSTOM_CLASS and not wanted.model:
        raise ConfigError(f"speculative_config: method={CUSTOM_CLASS!r} needs model, the class as 'module:Class'")
    _check_place(wanted.method, model)
    wanted = replace(wanted, num_speculative_tokens=_num_drafts(wanted, draft, decisions))
    _check_sizes(wanted, model, facts)
    _check_acceptance(wanted)
    return SpeculationConfig(speculative_config=wanted)


def merged(asked: SpeculationSettings) -> SpeculativeConfig:
    """The object, with what flags of their own say; with a model and no method, the method is that of draft models.
    Raises ConfigError where they contradict each other."""
    given = asked.speculative_config
    flags = (
        ("spec_method", "method", asked.spec_method, given.method),
        ("spec_model", "model", asked.spec_model, given.model),
        ("spec_tokens", "num_speculative_tokens", asked.spec_tokens, given.num_speculative_tokens),
    )
    said: dict[str, Any] = {}
    for flag, name, value, stated in flags:
        if value is None:
            continue
        if stated not in (None, value):
            raise ConfigError(f"{flag}={value!r} contradicts {name}={stated!r} of speculative_config; give one")
        said[name] = value
    wanted = replace(given, **said)
    wanted = replace(wanted, method=_OTHER_METHODS.get(str(wanted.method), wanted.method))
    return replace(wanted, method=DRAFT_MODEL) if wanted.method is None and wanted.model is not None else wanted


def _may_pay(model: ModelConfig, parallel: ParallelConfig, device: DeviceFacts, facts: ModelFacts) -> bool:
    """Whether drafts cost little where they are wrong, and change no bit of what is computed: native kernels give a row
    the same bits in any batch, and adaptive drafts make batches that differ from one run to the next."""
    return (
        device.drafts_pay
        and model.dtype == "bfloat16"
        and facts.implementation == "native"
        and not (model.pools or facts.is_encoder)
        and parallel.tensor_parallel_size * parallel.pipeline_parallel_size == 1
        and _longest(model, facts) > (BY_DEFAULT.num_speculative_tokens or 0)
    )


def _in_floats(model: ModelConfig, facts: ModelFacts) -> bool:
    """Whether no weight is quantized, as far as settings and files say."""
    return model.quantization is None and facts.quant_method is None and facts.weights_format == "safetensors"


def _num_drafts(wanted: SpeculativeConfig, draft: ModelFacts | None, decisions: Decisions) -> int:
    """Most drafts of a request: what is asked for, or as many as heads guess whose number is limited."""
    made = {} if draft is None else draft.hf_config
    heads, in_block = made.get(NUM_ROW_HEADS), made.get(MOST_GUESSES)
    most = heads if in_block is None else in_block
    asked = wanted.num_speculative_tokens
    if asked is None:
        why = "default" if most is None else "one of each head" if in_block is None else "a whole block"
        return decisions.note("num_speculative_tokens", DEFAULT_DRAFTS if most is None else int(most), why)
    if most is not None and asked > most:
        what = (
            f"the {heads} heads of {wanted.model} guess" if in_block is None else f"{wanted.model} guesses in a block"
        )
        raise ConfigError(f"speculative_config: num_speculative_tokens={asked} is more than {what}; at most {most}")
    return asked


def _check_unused(wanted: SpeculativeConfig) -> None:
    given = [name for name in _given(wanted) if name != "method"]
    if given:
        raise ConfigError(
            f"speculative_config: {given[0]}={getattr(wanted, given[0])!r} needs a method; known: {_known_methods()}"
        )


def _check_method(method: str) -> None:
    if method not in PROPOSERS and method != CUSTOM_CLASS:
        raise ConfigError(
            f"speculative_config: method={method!r}: no such proposer is built in or added by a plug-in; known: "
            f"{_known_methods()}"
        )


def _check_fields(wanted: SpeculativeConfig, method: str) -> None:
    own = {name for names in READS.values() for name in names}
    reads = READS.get(method, own)  # what a plug-in's method reads is its own affair
    for name in _given(wanted):
        if name not in _OF_ALL and name not in reads:
            raise ConfigError(
                f"speculative_config: {name}={getattr(wanted, name)!r} is not read by method={method!r}, which reads "
                f"{', '.join((*sorted(_OF_ALL), *sorted(reads)))}"
            )


def _check_place(method: str, model: ModelConfig) -> None:
    if model.pools:
        raise ConfigError(
            f"speculative_config: method={method!r}: prompts become vectors (runner=pooling), and no token follows; "
            "leave it out"
        )


def _check_sizes(wanted: SpeculativeConfig, model: ModelConfig, facts: ModelFacts) -> None:
    count = wanted.num_speculative_tokens or 0
    most = _longest(model, facts) - 1
    if count > most:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens={count} is more than fit beside a token into the window of "
            f"{most + 1} tokens; at most {most}"
        )
    shortest, longest = wanted.prompt_lookup_min, wanted.prompt_lookup_max
    if shortest is not None and longest is not None and shortest > longest:
        raise ConfigError(f"speculative_config: prompt_lookup_min={shortest} is more than prompt_lookup_max={longest}")
    share = wanted.suffix_decoding_min_token_prob
    if share is not None and share > 1:
        raise ConfigError(f"speculative_config: suffix_decoding_min_token_prob={share} is not allowed: 0 to 1")


def _longest(model: ModelConfig, facts: ModelFacts) -> int:
    """Tokens that all layers see."""
    window = int(facts.hf_config.get("sliding_window") or model.max_model_len)
    return min(window, model.max_model_len)


def _check_acceptance(wanted: SpeculativeConfig) -> None:
    """When drafts are accepted, and how often where that is left to chance."""
    how = wanted.rejection_sample_method or MATCH
    what = "speculative_config: "
    rates, length = wanted.synthetic_acceptance_rates, wanted.synthetic_acceptance_length
    count = wanted.num_speculative_tokens or 0
    given = [name for name in _OF_SYNTHETIC if getattr(wanted, name) is not None]
    if how != SYNTHETIC:
        if given:
            value = getattr(wanted, given[0])
            raise ConfigError(f"{what}{given[0]}={value!r} needs rejection_sample_method={SYNTHETIC!r}, not {how!r}")
        return
    if len(given) != 1:
        raise ConfigError(f"{what}rejection_sample_method={SYNTHETIC!r} needs one of {' and '.join(_OF_SYNTHETIC)}")
    if length is not None and length > 1 + count:
        raise ConfigError(
            f"{what}synthetic_acceptance_length={length} is more than a step yields with num_speculative_tokens="
            f"{count}: 1 to {1 + count}"
        )
    if rates is not None and len(rates) != count:
        raise ConfigError(
            f"{what}synthetic_acceptance_rates={list(rates)} has {len(rates)} numbers; one for each of "
            f"num_speculative_tokens={count}"
        )
    if rates is not None and not all(0 <= rate <= before for rate, before in zip(rates, (1.0, *rates), strict=False)):
        raise ConfigError(
            f"{what}synthetic_acceptance_rates={list(rates)} is not allowed: 0 to 1, and none above the one before, "
            f"which is accepted whenever it is"
        )


def _given(wanted: SpeculativeConfig) -> list[str]:
    """Names of the fields that are not as they are by default."""
    return [field.name for field in fields(wanted) if getattr(wanted, field.name) != field.default]


def _known_methods() -> str:
    return ", ".join((NO_METHOD, *sorted((*PROPOSERS, CUSTOM_CLASS))))
