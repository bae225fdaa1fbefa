"""What config.json says about a head that classifies: how many classes, their names, and what makes probabilities.
Knows nothing about weights."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from pagemill.catalog.models import ENCODERS, MODELS
from pagemill.config.pooling_facts import Activation, HeadFacts
from pagemill.errors import ModelError
from pagemill.utils.text import shown

MAX_LABELS: Final = 1 << 16
MAX_LABEL_CHARS: Final = 1000
_COLBERT_SIZE: Final = 128
_ACTIVATIONS: Final = {"Identity": Activation.NONE, "Sigmoid": Activation.SIGMOID, "Softmax": Activation.SOFTMAX}
"""By the last part of the name of a module of torch, as sentence-transformers writes it."""
_COLBERT: Final = {"HF_ColBERT": "BertModel", "ColBERTModernBertModel": "ModernBertModel"}
_ENDS: Final = ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "ForMaskedLM", "Model")
_FAMILY_ENDS: Final = ("ForCausalLM", "Model")

TokenId = Callable[[str], int | None]


def known_architecture(name: str) -> tuple[str, str]:
    """What an architecture is known as, and what its name says comes after the layers: one of the endings of names, or
    nothing where it is known by its own name."""
    if name in MODELS:
        return name, ""
    if name in _COLBERT:
        return _COLBERT[name], "ColBERT"
    for ending in _ENDS:
        if name.endswith(ending):
            stem = name.removesuffix(ending)
            found = next((stem + end for end in _FAMILY_ENDS if stem + end in MODELS or stem + end in ENCODERS), None)
            if found is not None:
                return found, ending
    return name, ""


def is_supported(architecture: str) -> bool:
    """Whether there is such a model here."""
    return architecture in MODELS or architecture in ENCODERS


def head_of(ending: str, config: Mapping[str, Any], token_id: TokenId) -> HeadFacts | None:
    """The head that follows pooling; None where there is none. `token_id`: of a token, for heads that are part of an
    output head (`classifier_from_token`). Raises ModelError for settings that make no sense."""
    tokens = config.get("classifier_from_token")
    if tokens:
        return _from_tokens(tokens, config, token_id)
    if ending == "ColBERT":
        size = config.get("colbert_dim") or config.get("dim") or _COLBERT_SIZE
        return HeadFacts(_count("dim", size), per_token=True, embeds=True, activation=Activation.NONE)
    if ending not in ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel"):
        return None
    labels = _labels(config)
    return HeadFacts(
        len(labels),
        per_token=ending != "ForSequenceClassification",
        labels=labels,
        activation=Activation.NONE if ending == "ForRewardModel" else _activation(config, len(labels)),
    )


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label")
    if names is None:
        return tuple(f"LABEL_{index}" for index in range(_count("num_labels", config.get("num_labels", 2))))
    if not isinstance(names, dict) or not 0 < len(names) <= MAX_LABELS:
        raise ModelError(f"id2label={shown(names)} is not allowed: an object with 1 to {MAX_LABELS} names")
    ordered = [names.get(str(index), names.get(index)) for index in range(len(names))]
    if not all(isinstance(name, str) and len(name) <= MAX_LABEL_CHARS for name in ordered):
        raise ModelError(f"id2label={shown(names)} is not allowed: a name for each number from 0 on")
    return tuple(str(name) for name in ordered)


def _count(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_LABELS:
        raise ModelError(f"{field}={shown(value)} is not allowed: an integer from 1 to {MAX_LABELS}")
    return value


def _activation(config: Mapping[str, Any], num_labels: int) -> Activation:
    """As sentence-transformers or transformers write it down; by default the softmax of several classes, and the
    sigmoid of one."""
    sentence = config.get("sentence_transformers")
    named = config.get("sbert_ce_default_activation_function")
    if isinstance(sentence, dict):
        named = sentence.get("activation_fn") or named
    if isinstance(named, str) and named.rpartition(".")[2] in _ACTIVATIONS:
        return _ACTIVATIONS[named.rpartition(".")[2]]
    match config.get("problem_type"):
        case "regression":
            return Activation.NONE
        case "multi_label_classification":
            return Activation.SIGMOID
        case _:
            return Activation.SIGMOID if num_labels == 1 else Activation.SOFTMAX


def _from_tokens(tokens: Any, config: Mapping[str, Any], token_id: TokenId) -> HeadFacts:
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_LABELS or not all(
        isinstance(token, str) for token in tokens
    ):  # fmt: skip
        raise ModelError(f"classifier_from_token={shown(tokens)} is not allowed: a list of tokens")
    ids = [token_id(token) for token in tokens]
    for token, found in zip(tokens, ids, strict=True):
        if found is None:
            raise ModelError(f"classifier_from_token names {shown(token)}, which is no token of the model")
    difference = bool(config.get("is_original_qwen3_reranker")) or config.get("method") == "from_2_way_softmax"
    if difference and len(tokens) != 2:
        raise ModelError(
            f"classifier_from_token={shown(tokens)} is not allowed: two tokens, such as no and yes, where one is "
            "weighed against the other"
        )
    return HeadFacts(
        1 if difference else len(tokens),
        labels=(tokens[1],) if difference else tuple(tokens),
        activation=Activation.SIGMOID if difference else _activation(config, len(tokens)),
        token_ids=tuple(found for found in ids if found is not None),
        difference=difference,
    )
