"""Which repository and revision a tokenizer comes from."""

from pathlib import Path
from typing import Any

import pytest

from pagemill.config.facts import ModelFacts
from pagemill.config.sections import ModelConfig
from pagemill.tokenizers import load
from pagemill.tokenizers.load import tokenizer_of

FACTS = ModelFacts("org/m", "/models/m", "dummy", "LlamaForCausalLM", {}, "bfloat16", 512, 320)


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, None),
    ({"tokenizer_revision": "t"}, ("org/m", "t")),
    ({"tokenizer": "org/other"}, ("org/other", None)),
    ({"tokenizer": "org/other", "tokenizer_revision": "t"}, ("org/other", "t")),
    ({"tokenizer": "org/m"}, ("org/m", "r")),
])  # fmt: skip
def test_it_is_fetched_with_its_own_revision_and_the_same_folder(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: tuple[str, str | None] | None
) -> None:
    asked: list[Any] = []

    def locate(name: str, revision: str | None, folder: str | None, *, weights: bool) -> Path:
        asked.append((name, revision, folder, weights))
        return Path("/tokenizers/t")

    monkeypatch.setattr(load, "locate", locate)
    monkeypatch.setattr(load, "load_tokenizer", lambda path, chat_template_file: path)
    path = tokenizer_of(ModelConfig(model="org/m", revision="r", download_dir="/cache", **settings), FACTS)
    assert path == Path("/models/m" if expected is None else "/tokenizers/t")  # type: ignore[comparison-overlap]
    assert asked == ([] if expected is None else [(*expected, "/cache", False)])
