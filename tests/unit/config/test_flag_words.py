"""Spellings of flags."""

import argparse

import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.config.flag_words import FlexibleArgumentParser, known_words, number_or, refused_among, whole_number


@pytest.mark.parametrize(("text", "number"), [
    ("4096", 4096), ("-1", -1), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("0.5K", 512), ("1m", 10**6),
    ("1M", 2**20), ("2g", 2 * 10**9), ("2G", 2**31), ("1t", 10**12), ("1T", 2**40), (" 7 ", 7),
])  # fmt: skip
def test_numbers(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(("text", "message"), [
    ("auto", "'auto' is not a number, such as 4096, 4k"), ("4kk", "not a number"), ("", "not a number"),
    ("1.0001k", "'1.0001k' is not a whole number"), ("0.5", "not a whole number"), ("٤", "not a whole number|4"),
])  # fmt: skip
def test_what_is_no_number(text: str, message: str) -> None:
    if text == "٤":
        assert whole_number(text) == 4
        return
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        whole_number(text)


@pytest.mark.parametrize(("words", "known"), [
    (["--max_model_len", "3", "a_b"], ["--max-model-len", "3", "a_b"]),
    (["--max_model_len=a_b"], ["--max-model-len=a_b"]),
    (["--compilation_config.cudagraph_mode", "FULL"], ["--compilation-config.cudagraph_mode", "FULL"]),
    (["--hf_overrides.a_b.c", "2"], ["--hf-overrides", '{"a_b": {"c": 2}}']),
    (["--hf-overrides.a=True", "x"], ["--hf-overrides", '{"a": true}', "x"]),
    (["--hf-overrides.a=b c"], ["--hf-overrides", '{"a": "b c"}']),
    (["-tp", "2", "--", "--a_b"], ["-tp", "2", "--", "--a_b"]),
    (["--hf-overrides"], ["--hf-overrides"]),
])  # fmt: skip
def test_spellings(words: list[str], known: list[str]) -> None:
    assert known_words(words, lambda flag: flag == "--hf-overrides") == known


def settings_of(*words: str) -> EngineArgs:
    parser = FlexibleArgumentParser()
    return EngineArgs.from_cli_args(EngineArgs.add_cli_args(parser).parse_args(words))


def test_fields_of_objects_are_laid_over_each_other() -> None:
    args = settings_of(
        "--hf-overrides", '{"a": {"x": 1}}', "--hf_overrides.a.y", "2", "--limit-mm-per-prompt.image", "3"
    )
    assert args.settings.model.hf_overrides == {"a": {"x": 1, "y": 2}}
    assert args.given >= {"hf_overrides", "limit_mm_per_prompt"}
    assert settings_of("-cc.cudagraph_mode=NONE").settings.graphs.compilation_config.cudagraph_mode == "NONE"


def test_refused_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--enable_lora"], ["--lora-modules", "{}"]):
        with pytest.raises(SystemExit):
            settings_of(*words)
        assert "is not supported: " in capsys.readouterr().err
    assert refused_among("unrecognized arguments: x --nothing") is None
    assert refused_among("another message: --enable-lora") is None


def test_a_number_or_a_word():
    read = number_or(("auto",))
    assert (read("auto"), read("4")) == ("auto", 4)
    with pytest.raises(argparse.ArgumentTypeError, match=r"'many' is not a number.*; nor is it auto"):
        read("many")
