from pathlib import Path

import pytest

from tools import check_tests


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A package with modules of every kind, and a test that imports one of them."""
    for name in ("__main__", "a/batch", "a/batch_sizes", "a/parts/__init__", "b", "a/alone"):
        write(tmp_path / "pagemill" / f"{name}.py")
    write(tmp_path / "pagemill/a/rows.h")
    write(tmp_path / "tools/tidy.py")
    write(tmp_path / "tests/integration/test_all.py", "from pagemill.a import alone\n")
    return tmp_path


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("test", "subject"),
    [
        ("test_b.py", "pagemill/b.py"),
        ("test_main.py", "pagemill/__main__.py"),
        ("a/test_batch.py", "pagemill/a/batch.py"),
        ("a/test_batch_limits.py", "pagemill/a/batch.py"),
        ("a/test_batch_sizes_of_one.py", "pagemill/a/batch_sizes.py"),
        ("a/test_parts.py", "pagemill/a/parts/__init__.py"),
        ("a/test_rows.py", "pagemill/a/rows.h"),
        ("tools/test_tidy.py", "tools/tidy.py"),
        ("test_batch.py", None),
        ("a/test_batches.py", None),
        ("a/test_main.py", None),
    ],
)
def test_what_a_file_is_named_after(root: Path, test: str, subject: str | None):
    assert check_tests.subject(root, Path(test)) == (Path(subject) if subject else None)


def test_a_file_named_after_nothing_is_a_problem(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_tests, "SEVERAL", frozenset({"test_whole.py"}))
    for name in ("test_b", "test_whole", "a/test_other"):
        write(root / "tests/unit" / f"{name}.py")
    assert check_tests.misplaced(root) == [
        "tests/unit/a/test_other.py: there is no pagemill/a/other.py; "
        "if it is about several modules, list it in tools/check_tests.py"
    ]


def test_a_line_that_is_not_needed_is_a_problem(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_tests, "SEVERAL", frozenset({"test_b.py", "test_gone.py"}))
    write(root / "tests/unit/test_b.py")
    assert check_tests.misplaced(root) == [
        "tools/check_tests.py lists test_b.py, which needs no line there",
        "tools/check_tests.py lists test_gone.py, which needs no line there",
    ]


def test_modules_without_tests_of_their_name(root: Path):
    write(root / "tests/unit/a/test_batch.py")
    found = check_tests.missing(root)
    assert found[Path("pagemill/a/alone.py")] == [Path("tests/integration/test_all.py")]
    assert found[Path("pagemill/b.py")] == []
    assert Path("pagemill/a/batch.py") not in found
