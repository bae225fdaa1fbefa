"""Fixtures that several folders of tests use."""

from pathlib import Path

import pytest

from pagemill.artifacts import aliases


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded default model; skips when it is not in the cache (python -m pagemill.artifacts.fetch smollm2)."""
    found = aliases.cached("smollm2")
    if found is None:
        pytest.skip("smollm2 is not in the cache")
    return found
