"""Flags from a file."""

from pathlib import Path
from typing import Any

import pytest

from pagemill.cli.main import main
from tests.unit.cli.conftest import FakeLaunch

FILE = """
model_tag: some/model   # a comment
max-model-len: 4k
host: 0.0.0.0
api_key: [first, second]
tensor-parallel-size: 2
enable-prefix-caching: false
enforce-eager: true
revision: null
enable-lora: false
stream_interval: 1
trust-remote-code: false
hf-overrides:
  rope: {factor: 2.0}
compilation-config.cudagraph_mode: NONE
allowed-origins: ["https://a.example", "https://b.example"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "flags.yaml"
    path.write_text(FILE)
    return path


def test_a_file_of_flags(launch: FakeLaunch, file: Path) -> None:
    assert main(["serve", "--config", str(file)]) == 0
    settings = launch.engine_args[0].settings
    assert (settings.model.model, settings.model.max_model_len) == ("some/model", 4000)
    assert settings.model.hf_overrides == {"rope": {"factor": 2.0}}
    assert (settings.cache.enable_prefix_caching, settings.graphs.enforce_eager) == (False, True)
    assert settings.parallel.tensor_parallel_size == 2
    assert settings.graphs.compilation_config.cudagraph_mode == "NONE"
    assert launch.server.api_key == ("first", "second")
    assert launch.server.host == "0.0.0.0"
    assert launch.server.allowed_origins == '["https://a.example", "https://b.example"]'


@pytest.mark.parametrize("words", [["other/model"], ["--model", "other/model"]])
def test_the_command_line_goes_before(launch: FakeLaunch, file: Path, words: list[str]) -> None:
    words = [*words, "--max-model-len", "10", "--enable-prefix-caching", "--api-key", "third", "-tp=1"]
    assert main(["serve", "--config", str(file), *words]) == 0
    settings = launch.engine_args[0].settings
    assert (settings.model.model, settings.model.max_model_len) == ("other/model", 10)
    assert settings.cache.enable_prefix_caching
    assert settings.parallel.tensor_parallel_size == 1
    assert launch.server.api_key == ("third",)
    assert launch.server.host == "0.0.0.0"


@pytest.mark.parametrize(("text", "message"), [
    ("enable-lora: true", "--enable-lora is not supported: adapters"),
    ("no_such: 1", "'no_such' is no flag that a file can have"),
    ("config: other.yaml", "'config' is no flag that a file can have"),
    ("port: many", "argument --port: 'many' is not a number"),
    ("- port", "is not a list of flags, such as max-model-len: 4096, one a line"),
    ("just a text", "is not a list of flags"),
    ("a: [", "is not YAML"),
    ("a: !!python/object/apply:os.getcwd []", "is not YAML"),
    ("#" * (1 << 20) + "#", "has 1048577 bytes; at most 1048576 are read"),
])  # fmt: skip
def test_what_is_wrong_is_named_with_the_file(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    assert main(["serve", "m", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"{path}: " in err and message in err and err.count("\n") == 1


def test_a_file_that_is_not_there(launch: FakeLaunch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert main(["serve", "m", "--config", str(tmp_path / "empty.yaml")]) == 0
    given: Any = launch.engine_args[0].given
    assert given == {"model"}
