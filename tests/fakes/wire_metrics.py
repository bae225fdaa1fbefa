"""The page that Prometheus reads, as figures."""

from prometheus_client.parser import text_string_to_metric_families


def wire_samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name on the wire, sorted labels) -> value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def wire_values(page: bytes, engine: str = "0") -> dict[str, float]:
    """Name, with the labels that are not those of model and engine -> value, of one engine."""
    found = {}
    for (name, pairs), value in wire_samples(page).items():
        labels = dict(pairs)
        if labels.pop("engine", engine) != engine:
            continue
        labels.pop("model_name", None)
        shown = ",".join(f"{key}={label}" for key, label in labels.items())
        found[f"{name}{{{shown}}}" if shown else name] = value
    return found
