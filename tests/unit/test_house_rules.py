"""Rules of the house that a reader would otherwise have to enforce, checked on the syntax tree of every module."""

import ast
import gc
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "pagemill").rglob("*.py"))
TEXTS = sorted(
    path
    for pattern in ("*.md", "*.toml", "Makefile", ".ci/*", "pagemill/**/*", "tools/*", "docs/**/*", "tests/**/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix not in (".pyc", ".so")
)

DESERIALIZERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
EVALUATORS = {"eval", "exec", "compile", "__import__"}
ENVIRONMENT = {"os.environ", "os.getenv", "os.putenv", "os.environb"}
MAY_READ_ENVIRONMENT = {
    "pagemill/envs.py": "the one place that reads it",
    "pagemill/utils/processes.py": "hands it on to children",
}
"""Module -> why. A module that only hands the environment on to a subprocess may be added."""
VAGUE_NAMES = {"utils.py", "common.py", "misc.py", "helpers.py"}
MACHINE_PATH = re.compile(r"/(?:home|Users|work|root|opt)/[\w.]|[A-Z]:\\Users")

Finding = Iterator[tuple[int, str]]
Rule = Callable[[ast.Module], Finding]


@pytest.fixture(autouse=True, scope="module")
def _trees_without_collection() -> Iterator[None]:
    """A million nodes, each parsed once: the collector would look through them again and again."""
    gc.disable()
    yield
    for cached in (text_of, parsed, nodes, calls):
        cached.cache_clear()
    gc.enable()


@cache
def text_of(path: Path) -> str:
    """The text of a module."""
    return path.read_text()


@cache
def parsed(path: Path) -> ast.Module:
    """A module, for all rules; none changes it."""
    return ast.parse(text_of(path))


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree."""
    return list(ast.walk(tree))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def calls(tree: ast.AST) -> list[tuple[ast.Call, str]]:
    """Every call, with the dotted name of what is called."""
    return [(node, dotted(node.func)) for node in nodes(tree) if isinstance(node, ast.Call)]


def dotted(node: ast.AST) -> str:
    """The text of a name and its attributes; `?` stands for any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def no_deserializer_that_runs_code(tree: ast.Module) -> Finding:
    for line, name in imports(tree):
        if name.split(".")[0] in DESERIALIZERS or name in ("torch.load", "torch.jit"):
            yield line, f"imports {name}"
    for call, name in calls(tree):
        if name in ("torch.load", "torch.jit.load", "yaml.load", "yaml.unsafe_load"):
            yield call.lineno, f"calls {name}"
        if any(word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in call.keywords):
            yield call.lineno, "allows pickle"


def no_code_made_from_text(tree: ast.Module) -> Finding:
    for call, name in calls(tree):
        if name in EVALUATORS or name.removeprefix("builtins.") in EVALUATORS:
            yield call.lineno, f"calls {name}"
        for word in call.keywords:
            if word.arg in ("shell", "trust_remote_code") and ast.unparse(word.value) != "False":
                yield call.lineno, f"{word.arg}={ast.unparse(word.value)}"


def no_guard_that_python_O_removes(tree: ast.Module) -> Finding:
    yield from ((node.lineno, "assert") for node in nodes(tree) if isinstance(node, ast.Assert))


def nothing_left_to_do(tree: ast.Module) -> Finding:
    for node in nodes(tree):
        if isinstance(node, ast.Name) and node.id == "NotImplementedError":
            yield node.lineno, "NotImplementedError"


def no_write_to_frozen_objects(tree: ast.Module) -> Finding:
    yield from ((call.lineno, name) for call, name in calls(tree) if name == "object.__setattr__")


def a_docstring_that_says_what_it_is(tree: ast.Module) -> Finding:
    if not ast.get_docstring(tree):
        yield 1, "no module docstring"


RULES: list[Rule] = [
    no_deserializer_that_runs_code,
    no_code_made_from_text,
    no_guard_that_python_O_removes,
    nothing_left_to_do,
    no_write_to_frozen_objects,
    a_docstring_that_says_what_it_is,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_in_every_module(rule: Rule):
    broken = [f"{path.relative_to(ROOT)}:{line}: {what}" for path in MODULES for line, what in rule(parsed(path))]
    assert broken == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (no_deserializer_that_runs_code, "import pickle"),
        (no_deserializer_that_runs_code, "from cloudpickle import loads"),
        (no_deserializer_that_runs_code, "from torch import load"),
        (no_deserializer_that_runs_code, "torch.load(path, weights_only=True)"),
        (no_deserializer_that_runs_code, "np.load(path, allow_pickle=True)"),
        (no_code_made_from_text, "eval(text)"),
        (no_code_made_from_text, "exec(text)"),
        (no_code_made_from_text, "load(name, trust_remote_code=True)"),
        (no_code_made_from_text, "subprocess.run(line, shell=True)"),
        (no_guard_that_python_O_removes, "assert x"),
        (nothing_left_to_do, "def f():\n    raise NotImplementedError"),
        (no_write_to_frozen_objects, "object.__setattr__(self, 'x', 1)"),
        (a_docstring_that_says_what_it_is, "x = 1"),
    ],
)
def test_rule_finds_what_it_is_for(rule: Rule, source: str):
    assert list(rule(ast.parse(source)))


def test_a_model_may_be_put_in_eval_mode():
    assert not list(no_code_made_from_text(ast.parse("model.eval()\nre.compile(x)")))


def test_only_envs_reads_the_environment():
    readers = set()
    for path in MODULES:
        tree = parsed(path)
        names = {dotted(node) for node in nodes(tree) if isinstance(node, ast.Attribute)}
        names |= {name for _, name in imports(tree)}
        if names & ENVIRONMENT:
            readers.add(str(path.relative_to(ROOT)))
    assert readers == set(MAY_READ_ENVIRONMENT)


def test_imports_inside_functions_say_what_they_defer():
    silent = []
    for path in MODULES:
        lines = text_of(path).splitlines()
        for line in sorted(set(lines_of_inner_imports(parsed(path)))):
            if "#" not in lines[line - 1] and not lines[line - 2].lstrip().startswith("#"):
                silent.append(f"{path.relative_to(ROOT)}:{line}: {lines[line - 1].strip()}")
    assert silent == [], "a function-level import needs a comment that names the package it defers"


def lines_of_inner_imports(tree: ast.Module) -> Iterator[int]:
    """First line of each group of imports inside a function."""
    if not any(isinstance(node, ast.Import | ast.ImportFrom) and node.col_offset for node in nodes(tree)):
        return
    for function in nodes(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inner = {node.lineno for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)}
        yield from (line for line in inner if line - 1 not in inner)


def test_no_unfinished_work_in_the_source():
    marks = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in MODULES
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line)
    ]
    assert marks == []


def test_files_are_named_after_their_concept():
    assert [str(path.relative_to(ROOT)) for path in MODULES if path.name in VAGUE_NAMES] == []


def test_no_paths_of_one_machine():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        if MACHINE_PATH.search(text := path.read_text(errors="replace"))
        for number, line in enumerate(text.splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []
