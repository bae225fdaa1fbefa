"""The compiled library, as for its kernels."""

from tests.unit.model.kernels.conftest import isa, library

__all__ = ["isa", "library"]
