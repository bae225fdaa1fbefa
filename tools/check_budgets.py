"""Size budgets: fails when a file, function, class, parameter list or nesting is larger than the house allows.

Knows Python's syntax and line counts; knows nothing about what the code does.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_CLASS_METHODS = 25
MAX_PARAMETERS = 10
MAX_NESTING = 4

CODE_FOLDERS = ("pagemill", "tools")
"""Every budget applies."""
TEST_FOLDERS = ("tests",)
"""Only the length of files is limited."""
SUFFIXES = (".py", ".js", ".css", ".html", ".c", ".cc", ".cpp", ".h", ".hpp", ".cu")

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True)
class Breach:
    """One thing that is larger than its budget."""

    path: Path
    line: int
    what: str
    size: int
    limit: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}: {self.size}, at most {self.limit}"


def main() -> int:
    """Check the repository that holds this file; 0 when everything is within budget."""
    root = Path(__file__).resolve().parent.parent
    files = {path: len(path.read_text().splitlines()) for path in source_files(root, CODE_FOLDERS + TEST_FOLDERS)}
    print("The ten largest files:")
    for path, lines in sorted(files.items(), key=lambda item: -item[1])[:10]:
        print(f"  {lines:5d}  {path.relative_to(root)}")
    breaches = list(check(root))
    for breach in breaches:
        print(breach)
    print(f"{len(files)} files, {sum(files.values())} lines, {len(breaches)} over budget")
    return 1 if breaches else 0


def check(root: Path) -> Iterator[Breach]:
    """Everything over budget below `root`; paths are relative to it."""
    for path in source_files(root, CODE_FOLDERS + TEST_FOLDERS):
        name, text = path.relative_to(root), path.read_text()
        num_lines = len(text.splitlines())
        if num_lines > MAX_FILE_LINES:
            yield Breach(name, 1, "lines in the file", num_lines, MAX_FILE_LINES)
        if path.suffix == ".py" and name.parts[0] in CODE_FOLDERS:
            yield from check_syntax(name, ast.parse(text))


def source_files(root: Path, folders: tuple[str, ...]) -> list[Path]:
    """Source files below the folders, sorted."""
    found = [path for folder in folders for path in (root / folder).rglob("*")]
    return sorted(path for path in found if path.suffix in SUFFIXES and path.is_file())


def check_syntax(path: Path, tree: ast.Module) -> Iterator[Breach]:
    """Budgets of the functions and classes of one module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            num_methods = len({item.name for item in node.body if isinstance(item, Function)})
            if num_methods > MAX_CLASS_METHODS:
                yield Breach(path, node.lineno, f"methods of class {node.name}", num_methods, MAX_CLASS_METHODS)
        elif isinstance(node, Function):
            for what, size, limit in measure(node):
                if size > limit:
                    yield Breach(path, node.lineno, f"{what} of {node.name}()", size, limit)


def measure(function: Function) -> Iterator[tuple[str, int, int]]:
    """(what, size, limit) of one function. `self` and `cls` are not counted as parameters."""
    yield "lines", (function.end_lineno or function.lineno) - function.lineno + 1, MAX_FUNCTION_LINES
    if not is_device_kernel(function):
        yield "parameters", num_parameters(function.args), MAX_PARAMETERS
    yield "nesting", nesting(function.body), MAX_NESTING


def is_device_kernel(function: Function) -> bool:
    """Whether it is a Triton kernel: that takes every stride and size apart, for there are no objects on a device."""
    return any(ast.unparse(decorator).startswith(("triton.jit", "gluon.jit")) for decorator in function.decorator_list)


def num_parameters(arguments: ast.arguments) -> int:
    """Parameters that a caller may give."""
    named = [*arguments.posonlyargs, *arguments.args]
    bound = 1 if named and named[0].arg in ("self", "cls") else 0
    variadic = sum(extra is not None for extra in (arguments.vararg, arguments.kwarg))
    return len(named) - bound + len(arguments.kwonlyargs) + variadic


def nesting(body: list[ast.stmt]) -> int:
    """Deepest block below `body`: 0 for straight code. Functions and classes inside are measured on their own."""
    return max((_depth(statement) for statement in body if isinstance(statement, BLOCKS)), default=0)


def _depth(block: ast.stmt) -> int:
    deepest = max((nesting(body) for body in _bodies(block)), default=0)
    own = 1 + deepest
    chained = _elif(block)
    return max(own, _depth(chained)) if chained else own


def _bodies(block: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statement lists directly inside a block; an `elif` is its own block at the same depth."""
    yield from ([case.body for case in block.cases] if isinstance(block, ast.Match) else [getattr(block, "body", [])])
    yield from (handler.body for handler in getattr(block, "handlers", []))
    yield getattr(block, "finalbody", [])
    if _elif(block) is None:
        yield getattr(block, "orelse", [])


def _elif(block: ast.stmt) -> ast.If | None:
    if isinstance(block, ast.If) and len(block.orelse) == 1:
        only = block.orelse[0]
        if isinstance(only, ast.If) and only.col_offset == block.col_offset:
            return only
    return None


if __name__ == "__main__":
    sys.exit(main())
