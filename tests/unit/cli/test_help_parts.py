"""Parts of the help."""

import pytest

from pagemill.cli.help_parts import asked_part
from pagemill.cli.main import main


@pytest.mark.parametrize(("words", "part"), [
    (["serve", "--help=CacheConfig"], "CacheConfig"), (["serve", "--help"], None), (["--help="], ""),
    (["x", "--", "--help=y"], None),
])  # fmt: skip
def test_what_is_asked_for(words: list[str], part: str | None) -> None:
    assert asked_part(words) == part


def test_parts(capsys: pytest.CaptureFixture[str]) -> None:
    def text(part: str) -> str:
        assert main(["serve", f"--help={part}"]) == 0
        return capsys.readouterr().out

    cache = text("cacheconfig")
    assert "--block-size" in cache and "The paged KV cache." in cache and "--max-num-seqs" not in cache
    assert text("max-num-seqs").split()[0] == text("--max_num_seqs").split()[0] == "--max-num-seqs"
    assert "--max-num-queued-reqs" in text("max-num")
    groups = text("listgroup").splitlines()
    assert any(line.startswith("SchedulerConfig: ") for line in groups)
    whole = text("all")
    assert "usage: pagemill serve" in whole and all(f"{line.partition(':')[0]}:" in whole for line in groups)


@pytest.mark.parametrize("argv", [["serve", "--help=nix"], ["serve", "--help="], ["--help=nix"]])
def test_a_part_that_is_none(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "no group and no flag has that name; groups: " in capsys.readouterr().err
