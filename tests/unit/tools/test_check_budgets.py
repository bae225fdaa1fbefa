import ast
from pathlib import Path

import pytest

from tools import check_budgets


def breaches(source: str) -> list[str]:
    return [str(breach) for breach in check_budgets.check_syntax(Path("pagemill/x.py"), ast.parse(source))]


def nesting(source: str) -> int:
    return check_budgets.nesting(ast.parse(source).body)


@pytest.mark.slow
def test_the_repository_is_within_budget():
    root = Path(check_budgets.__file__).resolve().parent.parent
    assert [str(breach) for breach in check_budgets.check(root)] == []


def test_function_of_61_lines():
    body = "    pass\n"
    assert breaches("def f():\n" + body * 59) == []
    assert breaches("def f():\n" + body * 60) == ["pagemill/x.py:1: lines of f(): 61, at most 60"]


def test_class_of_26_methods():
    method = "    def m{}(self): pass\n"
    methods = [method.format(n) for n in range(26)]
    assert breaches("class C:\n" + "".join(methods[:25])) == []
    assert breaches("class C:\n" + "".join(methods)) == ["pagemill/x.py:1: methods of class C: 26, at most 25"]


def test_self_is_no_parameter_but_varargs_are():
    names = ", ".join(f"p{n}" for n in range(9))
    assert breaches(f"class C:\n    def f(self, {names}, *args): pass") == []
    assert breaches(f"def f({names}, *args, **options): pass") == [
        "pagemill/x.py:1: parameters of f(): 11, at most 10",
    ]


def test_a_device_kernel_may_take_any_number_of_parameters():
    names = ", ".join(f"p{n}" for n in range(11))
    assert breaches(f"@triton.jit\ndef f({names}): pass") == []
    assert breaches(f"@cache\ndef f({names}): pass") != []


@pytest.mark.parametrize(
    ("source", "depth"),
    [
        ("x = 1", 0),
        ("if a:\n  pass\nelif b:\n  pass\nelif c:\n  pass\nelse:\n  pass", 1),
        ("if a:\n  pass\nelse:\n  if b:\n    pass", 2),
        ("for x in y:\n  with z:\n    try:\n      pass\n    except E:\n      while w:\n        pass", 4),
        ("match x:\n  case 1:\n    if y:\n      pass", 2),
        ("if a:\n  def f():\n    if b:\n      pass", 1),
    ],
)
def test_nesting(source: str, depth: int):
    assert nesting(source) == depth


def test_files_of_tests_are_limited_in_length_only(tmp_path: Path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_long.py").write_text("x = 1\n" * 601)
    (folder / "test_wide.py").write_text("def f(" + ", ".join(f"p{n}" for n in range(20)) + "): pass\n")
    assert [str(breach) for breach in check_budgets.check(tmp_path)] == [
        "tests/test_long.py:1: lines in the file: 601, at most 600",
    ]


def test_scripts_and_kernels_are_files_too(tmp_path: Path):
    folder = tmp_path / "pagemill"
    folder.mkdir()
    for suffix in ("js", "css", "cpp"):
        (folder / f"long.{suffix}").write_text("x\n" * 601)
    assert len(list(check_budgets.check(tmp_path))) == 3
