"""Documentation is checked: generated pages are current, links lead somewhere, files that are named exist, and Python
blocks compile and run.

A block tagged `python` must compile; one tagged `python run` is executed with the default model.
"""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tools import gen_docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(?P<tag>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|cpp|h|sh))`")
PLACEHOLDER = re.compile(r"(^|[/_])(NAME|SECTION|ASPECT|foo|toy|[ab])\b|test_b")
"""In the names of files that a reader is to write."""
LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(*tags: str) -> list[object]:
    """Code blocks with one of the tags, as parameters named page:line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match["tag"].strip() in tags:
                line = text[: match.start()].count("\n") + 1
                found.append(pytest.param(match["code"], id=f"{page_name(page)}:{line}"))
    return found


@cache
def anchors(page: Path) -> set[str]:
    """Anchors that the headings of a page get."""
    prose = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


GENERATED = gen_docs.generated()


@pytest.mark.parametrize("path", GENERATED, ids=page_name)
def test_generated_pages_are_current(path: Path):
    assert path.read_text() == GENERATED[path], "run `make docs`"


@cache
def source_files() -> list[str]:
    """Paths of the files that documents may name."""
    folders = ("pagemill", "tests", "tools", "benchmarks")
    return [str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.*")]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path):
    broken = []
    for match in LINK.finditer(FENCE.sub("", page.read_text())):
        path, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(match["target"])
    assert broken == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=page_name)
def test_files_that_are_named_exist(page: Path):
    """By their end: `worker/worker.py` is a file of the package."""
    files = source_files()
    named = FILE_NAME.findall(FENCE.sub("", page.read_text()))
    missing = [
        name
        for name in named
        if not PLACEHOLDER.search(name) and not any(f"/{file}".endswith(f"/{name}") for file in files)
    ]
    assert missing == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=page_name)
def test_every_page_is_reached_from_the_index(page: Path):
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / match["target"].partition("#")[0]).resolve() for match in LINK.finditer(index.read_text())
    }
    assert page == index or page in linked


@pytest.mark.parametrize("code", blocks("python", "python run"))
def test_python_blocks_compile(code: str):
    compile(code, "block", "exec")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python run"))
def test_runnable_blocks_run(code: str):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
