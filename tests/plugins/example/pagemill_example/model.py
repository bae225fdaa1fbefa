"""An architecture of one's own: Llama's layers under another name."""

from pagemill.model.models.llama import LlamaForCausalLM


class ExampleForCausalLM(LlamaForCausalLM):
    """Reads the same tensors as Llama."""
