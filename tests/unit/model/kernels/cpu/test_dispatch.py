"""Which instruction sets the kernels are tested on here, and what asking for one that is not there does."""

import pytest

from pagemill.model.kernels import native
from tests.unit.model.kernels.conftest import instruction_sets


@pytest.mark.parametrize("name", native.ISAS)
def test_this_cpu_has(name: str, library: native.Library) -> None:
    if name not in instruction_sets():
        pytest.skip(f"this CPU has no {name}: no test of a kernel runs with it")
    try:
        assert library.init(name.encode()) == 0
        assert library.isa().decode() == name
    finally:
        library.init(None)


def test_an_unknown_instruction_set_changes_nothing(library: native.Library) -> None:
    before = library.isa()
    assert library.init(b"avx4096") != 0
    assert library.isa() == before
