"""`triton_kernels`: the kernels for GPUs, where there are any. Knows no kernel."""

import functools
import importlib
from types import ModuleType

from pagemill.log import get_logger

logger = get_logger(__name__)


@functools.cache
def triton_kernels(name: str) -> ModuleType | None:
    """The module of this name in kernels/triton, imported at the first call; None where Triton is not installed."""
    try:
        return importlib.import_module(f"pagemill.model.kernels.triton.{name}")
    except ImportError as error:
        logger.warning("the GPU kernels (%s) cannot be loaded, plain torch runs instead: %s", name, error)
        return None
