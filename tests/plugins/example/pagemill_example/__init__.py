"""A package as third parties write it: its entry point adds lines to the tables of pagemill's catalogue."""

from pagemill.catalog.plugins import Catalogue


def register(catalogue: Catalogue) -> None:
    """Called once in every process; what the lines name is imported when it is used."""
    catalogue.models.add("ExampleForCausalLM", "pagemill_example.model:ExampleForCausalLM")
    catalogue.attention.add("EXAMPLE_ATTN", "pagemill_example.attention:ExampleBackend")
    catalogue.platforms.add("example", "pagemill_example.platform:ExamplePlatform")
    catalogue.logits.add("example", "pagemill_example.logits:OnlyEvenTokens")
    catalogue.logits.add("example_rule", "pagemill_example.extension_worker:ByRule")
    catalogue.step_extensions.add("example", "pagemill_example.extension:EXTENSION")
    catalogue.endpoints.add("example", "pagemill_example.endpoint:router")
    catalogue.stat_loggers.add("example", "pagemill_example.stats:TokenCounter")
