"""The table of advisories in docs/security.md: its tests exist, and no test names an advisory that is not in it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADVISORY = re.compile(r"CVE-20\d\d-\d+|GHSA(?:-[0-9a-z]{4}){3}")
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in (ROOT / "docs/security.md").read_text().splitlines()
    if line.startswith(("| CVE", "| GHSA"))
]


@cache
def functions_of(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].split(",")[0])
def test_the_test_of_a_row_exists(row):
    advisories, elsewhere, here, shown_by = row
    assert ADVISORY.sub("", advisories).strip(", ") == ""
    assert elsewhere and here
    path, _, name = shown_by.strip("` ").partition("::")
    assert name in functions_of(ROOT / path)


def test_every_advisory_that_a_test_names_is_in_the_table():
    listed = set(ADVISORY.findall(" ".join(row[0] for row in ROWS)))
    assert len(ROWS) > 40
    for path in (ROOT / "tests/security").glob("test_*.py"):
        assert set(ADVISORY.findall(path.read_text())) <= listed, path.name


def test_what_says_that_it_is_refused_is_tried():
    """Those of `test_refused` are among its cases, by their ids."""
    tried = set(ADVISORY.findall((ROOT / "tests/security/test_advisories.py").read_text()))
    for advisories, _, _, shown_by in ROWS:
        if shown_by.strip("` ").endswith("::test_refused"):
            assert set(ADVISORY.findall(advisories)) <= tried, advisories
