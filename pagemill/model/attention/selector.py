"""`choose`: the first backend that can run a layer, or an error with every backend and every reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from pagemill.catalog.attention import ATTENTION
from pagemill.errors import ConfigError
from pagemill.model.attention.capability import (
    ANY_CONTEXT,
    ENCODER_ONLY,
    KV_DTYPES,
    AttentionContext,
    AttentionLayerSpec,
)
from pagemill.model.attention.interface import AttentionBackend
from pagemill.model.attention.known_elsewhere import KNOWN_ELSEWHERE, NOT_IMPLEMENTED
from pagemill.model.attention.phased import phased


@dataclass(frozen=True)
class BackendPreferences:
    """Which backends a user asks for, by name."""

    backend: str | None = None
    prefill: str | None = None
    """For steps in which some request has several tokens."""
    decode: str | None = None
    layers: Mapping[str, str] = field(default_factory=dict)
    """Pattern of layer names, such as *.0.self_attn.attn -> backend; the first that matches counts."""

    def of(self, layer: str) -> str | None:
        """The backend that is asked for this layer."""
        matching = (name for pattern, name in self.layers.items() if fnmatchcase(layer, pattern))
        return next(matching, self.backend)


@dataclass(frozen=True)
class BackendSelector:
    """Chooses for the layers of one model."""

    device: str
    dtype: str
    order: Sequence[str]
    preferences: BackendPreferences = BackendPreferences()
    where: AttentionContext = ANY_CONTEXT
    _chosen: dict[tuple[AttentionLayerSpec, str | None], type[AttentionBackend]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Most layers of a model are alike, and to look for packages takes time."""

    def __call__(self, spec: AttentionLayerSpec, layer: str = "") -> type[AttentionBackend]:
        """The layer's backend. Raises ConfigError with the reasons when there is none."""
        wanted = self.preferences.of(layer)
        if not (self.preferences.prefill or self.preferences.decode):
            return self._one(spec, wanted)
        prefill = self._one(spec, self.preferences.prefill or wanted)
        decode = self._one(spec, self.preferences.decode or wanted)
        return prefill if prefill is decode else phased(prefill, decode)

    def _one(self, spec: AttentionLayerSpec, wanted: str | None) -> type[AttentionBackend]:
        chosen = self._chosen.get((spec, wanted))
        if chosen is None:
            chosen = choose(spec, self.device, self.dtype, wanted, self.order, self.where)
            self._chosen[spec, wanted] = chosen
        return chosen


def choose(
    spec: AttentionLayerSpec,
    device: str,
    dtype: str,
    requested: str | None,
    order: Sequence[str],
    where: AttentionContext = ANY_CONTEXT,
) -> type[AttentionBackend]:
    """The requested backend, or the first of `order` that fits. Raises ConfigError with the reasons."""
    where = replace(
        where,
        mla=where.mla or spec.latent_size is not None,
        attention_type=ENCODER_ONLY if spec.bidirectional else where.attention_type,
    )
    if requested is not None:
        reasons = _reasons_against(requested, spec, device, dtype, where)
        if reasons:
            raise ConfigError(f"Selected backend {requested} is not valid for this configuration. Reason: {reasons}")
        return _configured(requested, spec, where)
    refused = {}
    for name in order:
        refused[name] = _reasons_against(name, spec, device, dtype, where)
        if not refused[name]:
            return _configured(name, spec, where)
    asked = where.kv_cache_dtype
    others = [replace(where, kv_cache_dtype=kind) for kind in sorted(KV_DTYPES)]
    kept = [other.kv_cache_dtype for other in others if _is_run(spec, device, dtype, order, other)]
    if kept:
        raise ConfigError(
            f"kv_cache_dtype={asked!r} is not supported on {device} in {dtype}; allowed: {', '.join(kept)}"
        )
    reasons_text = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refused.items())
    raise ConfigError(f"no attention backend can run {spec.words} in {dtype} on {device}: {reasons_text}")


def _is_run(spec: AttentionLayerSpec, device: str, dtype: str, order: Sequence[str], where: AttentionContext) -> bool:
    """Whether one of the backends can run a layer."""
    return any(not _reasons_against(name, spec, device, dtype, where) for name in order)


def _reasons_against(
    name: str, spec: AttentionLayerSpec, device: str, dtype: str, where: AttentionContext
) -> list[str]:
    """Why the backend of this name cannot run a layer; empty when it can. Raises ConfigError for an unknown name."""
    elsewhere = KNOWN_ELSEWHERE.get(name)
    if elsewhere is None or name in ATTENTION:
        backend: type[AttentionBackend] = ATTENTION.resolve(name)
        return backend.unsupported(spec, device, dtype, where)
    return elsewhere.unsupported(spec, device, dtype, where) or [NOT_IMPLEMENTED]


def _configured(name: str, spec: AttentionLayerSpec, where: AttentionContext) -> type[AttentionBackend]:
    backend: type[AttentionBackend] = ATTENTION.resolve(name)
    return backend.configured(spec, where)
