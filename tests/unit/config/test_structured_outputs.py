import importlib.util

import pytest

from pagemill.catalog.grammars import GUIDANCE
from pagemill.config.arguments import EngineArgs
from pagemill.config.structured_outputs import StructuredOutputsConfig, resolve_structured_outputs
from pagemill.errors import ConfigError


def asked(**fields):
    return EngineArgs(structured_outputs_config=fields).settings.model.structured_outputs_config


def test_the_default_is_guidance():
    assert resolve_structured_outputs(StructuredOutputsConfig()).backend == GUIDANCE
    assert resolve_structured_outputs(asked(backend="auto")).backend == GUIDANCE
    assert resolve_structured_outputs(asked(backend="xgrammar")).backend == "xgrammar"


def test_what_is_unknown_is_named():
    with pytest.raises(ConfigError, match="backend='outlines' is not one of auto, guidance, xgrammar"):
        resolve_structured_outputs(asked(backend="outlines"))
    with pytest.raises(ConfigError, match="structured_outputs_config: unknown field 'reasoning_parser'"):
        asked(reasoning_parser="qwen3")
    with pytest.raises(ConfigError, match="disable_any_whitespace"):
        asked(disable_any_whitespace="yes")


def test_what_is_not_installed_is_told_at_once(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        resolve_structured_outputs(asked(backend="xgrammar"))
