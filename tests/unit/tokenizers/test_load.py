"""Which repository and revision a tokenizer comes from."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagemill.config.facts import ModelFacts
from pagemill.tokenizers import load
from pagemill.tokenizers.load import tokenizer_of
from tests.fakes.configs import model_config

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

    def locate(name: str, revision: str | None, folder: str | None, *, weights: bool, **ignored: Any) -> Path:
        assert ignored == {"ignore_patterns": ("original/**/*",)}
        asked.append((name, revision, folder, weights))
        return Path("/tokenizers/t")

    monkeypatch.setattr(load, "locate", locate)
    monkeypatch.setattr(load, "load_tokenizer", lambda path, chat_template_file: SimpleNamespace(path=path))
    loaded: Any = tokenizer_of(model_config(model="org/m", revision="r", download_dir="/cache", **settings), FACTS)
    assert loaded.path == Path("/models/m" if expected is None else "/tokenizers/t")
    assert asked == ([] if expected is None else [(*expected, "/cache", False)])


@pytest.mark.parametrize(
    ("policy", "prompts", "chats"), [("prompts", True, False), ("all", True, True), ("none", False, False)]
)
def test_where_control_tokens_are_parsed(
    monkeypatch: pytest.MonkeyPatch, policy: str, prompts: bool, chats: bool
) -> None:
    monkeypatch.setattr(load, "load_tokenizer", lambda path, chat_template_file: SimpleNamespace())
    loaded: Any = tokenizer_of(model_config(parse_control_tokens=policy), FACTS)
    assert (loaded.parses_control_tokens_of_prompts, loaded.parses_control_tokens_of_chats) == (prompts, chats)


def test_a_large_context_takes_large_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_tokenizer", lambda path, chat_template_file: SimpleNamespace())
    found: list[Any] = [tokenizer_of(model_config(max_model_len=most), FACTS) for most in (8192, 10 << 20)]
    assert [tokenizer.max_chat_chars for tokenizer in found] == [4 << 20, 80 << 20]
