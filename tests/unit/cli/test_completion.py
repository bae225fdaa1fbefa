"""Scripts for shells, run by those shells."""

import shutil
import subprocess

import pytest

from pagemill.cli.main import COMMANDS, main

ASK = """
source "$1"
compgen_of() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _pagemill; echo "${{COMPREPLY[*]}}"; }}
compgen_of {words}
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("words", "expected"), [
    ("pagemill se", "serve"),
    ("pagemill ''", " ".join(COMMANDS)),
    ("pagemill serve --max-num-s", "--max-num-seqs"),
    ("pagemill serve --dtype fl", "float32 float16"),
    ("pagemill serve --no-enable-prefix", "--no-enable-prefix-caching"),
    ("pagemill models re", "remove"),
    ("pagemill connect op", "openai opencode"),
    ("pagemill nothing --x", ""),
])  # fmt: skip
def test_bash(tmp_path, capsys: pytest.CaptureFixture[str], words: str, expected: str) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "pagemill.bash"
    script.write_text(capsys.readouterr().out)
    done = subprocess.run(
        ["bash", "-c", ASK.format(words=words), "bash", str(script)], capture_output=True, text=True, check=True
    )
    assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_zsh(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef pagemill\n")
    assert "      serve:--dtype) found=(auto float32 bfloat16 float16) ;;\n" in text
    shell = shutil.which("zsh")
    if shell is not None:
        (tmp_path / "_pagemill").write_text(text)
        assert subprocess.run([shell, "-n", str(tmp_path / "_pagemill")], check=True).returncode == 0


def test_another_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert "invalid choice: 'fish'" in capsys.readouterr().err
