"""The tree in ARCHITECTURE.md and the package are the same."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pagemill"
LINE = re.compile(r"^(?P<rail>(?:│   |    )*)[├└]── (?P<name>[\w.]+/?)\s*(?P<about>.*)$")
OPENED = ("fleet", "serve", "engine", "worker", "model")


def tree_in_the_document() -> dict[str, str]:
    """Path below pagemill/ (folders end in a slash) -> what the document says about it."""
    block = re.search(r"```\npagemill/\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
    assert block, "ARCHITECTURE.md has no tree"
    listed: dict[str, str] = {}
    parents: list[str] = []
    for line in block[1].splitlines():
        match = LINE.match(line)
        assert match, f"not a line of a tree: {line!r}"
        depth = len(match["rail"]) // 4
        parents = [*parents[:depth], match["name"]]
        listed["".join(parents)] = match["about"]
    return listed


def folders_of_the_package() -> set[str]:
    """Packages of depth one and two."""
    found = {path.parent for pattern in ("*/__init__.py", "*/*/__init__.py") for path in PACKAGE.glob(pattern)}
    return {f"{path.relative_to(PACKAGE)}/" for path in found}


def test_everything_listed_exists():
    missing = [name for name in tree_in_the_document() if not (PACKAGE / name).exists()]
    assert missing == []


def test_every_folder_is_listed():
    listed = tree_in_the_document()
    nested_elsewhere = {name for name in folders_of_the_package() if name.count("/") == 2 and not is_opened(name)}
    assert folders_of_the_package() - nested_elsewhere - set(listed) == set()


def test_every_module_of_the_top_and_of_the_opened_folders_is_listed():
    patterns = ("*.py", *(f"{folder}/*.py" for folder in OPENED))
    modules = {path for pattern in patterns for path in PACKAGE.glob(pattern) if path.name != "__init__.py"}
    assert {str(path.relative_to(PACKAGE)) for path in modules} - set(tree_in_the_document()) == set()


def test_every_line_says_what_it_is():
    assert [name for name, about in tree_in_the_document().items() if not about] == []


def is_opened(name: str) -> bool:
    return name.split("/")[0] in OPENED
