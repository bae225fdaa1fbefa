"""`StructuredOutputsConfig`: how the forms of outputs are followed, where a request does not say."""

from dataclasses import dataclass, replace

from pagemill.catalog.grammars import GRAMMARS, GUIDANCE
from pagemill.config.fields import setting
from pagemill.errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """What follows the forms of outputs, and what holds for all of them (docs/structured-output.md)."""

    backend: str = setting(
        AUTO,
        "what follows grammars: guidance, xgrammar (an extra), or a name that a plug-in adds; auto is guidance",
    )
    disable_any_whitespace: bool = setting(False, "JSON is written without blanks and newlines")
    disable_additional_properties: bool = setting(
        False, "objects of a schema that does not say so have no properties besides those that it names"
    )


def resolve_structured_outputs(asked: StructuredOutputsConfig) -> StructuredOutputsConfig:
    """With the name of a backend. Raises ConfigError for one that nobody knows, or that is not installed."""
    if asked.backend == AUTO:
        return replace(asked, backend=GUIDANCE)
    if asked.backend not in GRAMMARS:
        known = ", ".join([AUTO, *sorted(GRAMMARS)])
        raise ConfigError(f"structured_outputs_config: backend={asked.backend!r} is not one of {known}")
    GRAMMARS.resolve(asked.backend).check_installed()
    return asked
