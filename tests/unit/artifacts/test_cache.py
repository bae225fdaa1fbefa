"""Models in the caches; `tests/unit/cli/test_models.py` shows a cache that has some."""

from pathlib import Path

import pytest

from pagemill.artifacts.cache import cached_models, remove
from pagemill.errors import ModelError


def test_caches_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE_ROOT", str(tmp_path / "none"))
    assert cached_models(str(tmp_path / "nothing")) == []
    (tmp_path / "file").write_text("")
    assert cached_models(str(tmp_path / "file")) == []
    with pytest.raises(ModelError, match="org/name is not in the cache"):
        remove("org/name", str(tmp_path / "nothing"))
