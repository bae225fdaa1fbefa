"""The command around the lines."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagemill.cli.main import main
from tests.fakes.engine import make_engine
from tests.unit.cli.conftest import FakeLaunch

LINE = '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "ab", "max_tokens": 2, "model": "name"}}\n'


@pytest.fixture
def engine(launch: FakeLaunch) -> FakeLaunch:
    """Batches are answered by a fake core."""

    def build(engine_args: Any) -> SimpleNamespace:
        launch.engine_args.append(engine_args)
        return SimpleNamespace(llm=make_engine(), config=SimpleNamespace(scheduler=SimpleNamespace(max_num_seqs=2)))

    launch.build_inproc = build  # type: ignore[method-assign]
    return launch


def test_a_file_is_answered(
    engine: FakeLaunch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEMILL_API_KEY", "sk-of-a-server")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(LINE + "wrong\n" + LINE.replace('"a"', '"b"').rstrip())
    words = ["--served-model-name", "name", "--max-model-len", "4k"]
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--model", "m", *words]) == 0
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [entry["custom_id"] for entry in found] == ["a", None, "b"]
    assert found[0]["response"]["body"]["choices"][0]["text"] == "ab"
    assert f"3 answers in {target}, of which 1 are errors" in capsys.readouterr().err
    settings = engine.engine_args[0].settings
    assert (settings.model.model, settings.model.max_model_len) == ("m", 4000)


def test_files_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(LINE)

    def error(*words: str) -> str:
        assert main(["run-batch", *words]) == 2
        return capsys.readouterr().err

    assert "nothing is fetched or sent" in error("-i", "https://x/in.jsonl", "-o", "out")
    assert "no such file" in error("-i", str(tmp_path / "none"), "-o", "out")
    assert "is the input file" in error("-i", str(source), "-o", str(source))
    assert "are required: -i/--input-file" in error("-o", "out")
    assert "unrecognized arguments: --port" in error("-i", str(source), "-o", "out", "--port", "1")
