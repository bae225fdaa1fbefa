import sys
from types import ModuleType, SimpleNamespace

import pytest

from pagemill import __version__
from pagemill.cli.main import main


def test_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    aliases = ModuleType("pagemill.artifacts.aliases")
    aliases.ALIASES = {"smollm2": SimpleNamespace(title="SmolLM2"), "other": SimpleNamespace(title="Other")}
    aliases.cached = {"smollm2": "/x", "other": None}.get
    monkeypatch.setitem(sys.modules, "pagemill.artifacts", ModuleType("pagemill.artifacts"))
    monkeypatch.setitem(sys.modules, "pagemill.artifacts.aliases", aliases)
    monkeypatch.setenv("PAGEMILL_API_KEY", "top-secret")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(("cpu", "model")))
    assert rows["pagemill"] == __version__
    assert rows["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert "LlamaForCausalLM" in rows["architectures"]
    assert "cpu cores" in out
    assert "SmolLM2, in the cache" in out and "Other, fetched on first use" in out
    assert "top-secret" not in out
