"""What becomes of other people's clients: results that scripts print, environments, the table."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.clients import run
from benchmarks.clients.run import CLIENTS, HERE, Row, ask, environment, read, table


def test_results_among_other_lines() -> None:
    said = 'warming up\n{"check": "chat", "reason": ""}\n{"other": 1}\n[1]\n{"check": "tools", "reason": "no"}\n'
    assert read(said) == [("chat", ""), ("tools", "no")]


def test_a_row_for_each_check() -> None:
    lines = table([Row("a", "chat", ""), Row("b", "-", "blocked: no wheel")]).splitlines()
    assert lines[2:] == ["| a | chat | passed |", "| b | - | blocked: no wheel |"]


def test_every_client_is_pinned() -> None:
    """Everything by its version, and no build of torch that another index would have to offer."""
    for name, client in CLIENTS.items():
        assert (HERE / client.script).is_file()
        pins = (HERE / f"{name}.txt").read_text().splitlines()
        assert pins and all("==" in pin and "+" not in pin for pin in pins)


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def pip(command: list[object], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(run, "BUILD", tmp_path)
    monkeypatch.setattr(run.venv, "create", lambda folder, **_: folder.mkdir())
    monkeypatch.setattr(run.subprocess, "run", pip)
    assert environment("llm") == environment("llm") == tmp_path / "llm" / "bin" / "python"
    assert len(commands) == 1
    assert commands[0][-1] == HERE / "llm.txt"
    assert (tmp_path / "llm" / "torch.txt").read_text().startswith("torch==")


def test_what_cannot_be_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found for llm\n")
    monkeypatch.setattr(run, "BUILD", tmp_path)
    monkeypatch.setattr(run.venv, "create", lambda folder, **_: folder.mkdir())
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: failed)
    (row,) = ask("llm", "http://127.0.0.1:1", "m")
    assert row == Row("llm", "-", "blocked: ERROR: No matching distribution found for llm")
