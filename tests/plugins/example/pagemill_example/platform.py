"""A platform of one's own: the CPU under another name, which prefers an attention backend of this package."""

from pagemill.platforms.cpu import CpuPlatform


class ExamplePlatform(CpuPlatform):
    """Chosen by --device example."""

    name = "example"

    def attention_order(self) -> tuple[str, ...]:
        return ("EXAMPLE_ATTN",)
