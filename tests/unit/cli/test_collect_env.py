"""The report for bug reports."""

import pytest

from pagemill import envs
from pagemill.cli.main import main

SECRETS = {
    "PAGEMILL_API_KEY": "sk-not-for-you", "VLLM_API_KEY": "sk-nor-this", "HF_TOKEN": "hf_not_this",
    "PAGEMILL_IPC_SECRET": "sixteen letters!", "PAGEMILL_CACHE_ROOT": "/somebody/private", "VLLM_NEW": "what is this",
}  # fmt: skip


def test_it_has_no_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PAGEMILL_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert {name: rows[name] for name in SECRETS} == dict.fromkeys(SECRETS, "set")
    assert not any(value in out for value in SECRETS.values())
    assert (rows["PAGEMILL_LOGGING_LEVEL"], rows["CUDA_VISIBLE_DEVICES"]) == ("WARNING", "0,1")
    assert rows.keys() >= {"pagemill", "torch", "cpu", "memory", "container", "compiler", "gpus", "msgspec"}


def test_a_missing_program_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(envs, "compiler", lambda: "no-such-compiler")
    assert main(["collect-env"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (rows["compiler"], rows["gpus"]) == ("none", "none")
