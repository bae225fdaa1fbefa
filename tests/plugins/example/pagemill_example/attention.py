"""An attention backend of one's own: the reference under another name."""

from pagemill.log import get_logger
from pagemill.model.attention.backends.torch_cpu import TorchCpuBackend

get_logger("pagemill.example").warning("the example's attention backend is used")


class ExampleBackend(TorchCpuBackend):
    """Computes as TORCH_CPU does."""

    name = "EXAMPLE_ATTN"
