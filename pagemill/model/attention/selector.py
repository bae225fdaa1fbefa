"""`choose`: the first backend that can run a layer, or an error with every backend and every reason."""

from collections.abc import Sequence

from pagemill.catalog.attention import ATTENTION
from pagemill.errors import ConfigError
from pagemill.model.attention.interface import AttentionBackend, AttentionLayerSpec


def choose(
    spec: AttentionLayerSpec, device: str, dtype: str, requested: str | None, order: Sequence[str]
) -> type[AttentionBackend]:
    """The requested backend, or the first of `order` that fits. Raises ConfigError with the reasons."""
    if requested is not None:
        backend: type[AttentionBackend] = ATTENTION.resolve(requested)
        reasons = backend.missing(spec, device, dtype)
        if reasons:
            raise ConfigError(f"Selected backend {requested} is not valid for this configuration. Reason: {reasons}")
        return backend
    refused = {}
    for name in order:
        backend = ATTENTION.resolve(name)
        refused[name] = backend.missing(spec, device, dtype)
        if not refused[name]:
            return backend
    reasons_text = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refused.items())
    raise ConfigError(f"no attention backend can run {spec} in {dtype} on {device}: {reasons_text}")
