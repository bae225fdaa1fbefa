"""Fixtures of the kernels' own tests: the library, and every instruction set that this CPU has."""

from tests.unit.model.kernels.conftest import isa, library

__all__ = ["isa", "library"]
