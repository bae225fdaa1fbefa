"""Tests lie where one would look for them: `tests/unit/a/test_b.py` is about `pagemill/a/b.py`.

Fails when a file of unit tests is named after nothing, unless SEVERAL says that it is about several modules.
`--missing` lists the modules that have no file of that name, with the files of tests that import them. Knows names and
imports; knows nothing about what a test checks.
"""

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNIT = Path("tests/unit")
MIRRORED = {Path(name): Path(name) for name in ("tools", "benchmarks", "benchmarks/clients")}
"""Folders below tests/unit that mirror one beside the package."""
SEVERAL = frozenset(
    {
        "catalog/test_adding_a_line.py",
        "config/test_setting_support.py",
        "engine/scheduler/test_worked_examples.py",
        "engine/test_forms_ahead.py",
        "engine/test_jump_forward.py",
        "engine/test_kv_event_stream.py",
        "engine/test_logprobs.py",
        "engine/test_partial_reuse.py",
        "engine/test_pooling.py",
        "engine/test_several_tokens.py",
        "model/kernels/triton/test_prompt_plan.py",
        "engine/test_soundness.py",
        "engine/test_soundness_machine.py",
        "engine/test_soundness_progress.py",
        "engine/test_soundness_random.py",
        "model/attention/backends/test_mla.py",
        "model/attention/test_store.py",
        "model/kernels/triton/test_compiles.py",
        "model/kernels/triton/test_rows.py",
        "model/quantization/test_adding_a_method.py",
        "serve/http/test_bad_input.py",
        "serve/http/test_keep_alive.py",
        "serve/http/test_new_endpoint.py",
        "serve/http/schemas/test_other_apis.py",
        "serve/parsers/test_examples.py",
        "serve/parsers/test_linear_time.py",
        "serve/parsers/test_templates.py",
        "serve/test_several_tokens.py",
        "test_architecture.py",
        "test_docs.py",
        "test_house_rules.py",
        "test_public_names.py",
        "test_run_rules.py",
        "worker/forward/test_cascade.py",
        "worker/forward/test_not_finite.py",
        "worker/native/test_hidden.py",
        "worker/pipeline/test_drafts_over_stages.py",
        "worker/sampling/processors/test_token_sets.py",
        "worker/spec_decode/test_custom_class.py",
        "worker/test_expert_parallel.py",
        "worker/test_hybrid_model.py",
        "worker/test_known_tokens.py",
        "worker/test_parallel.py",
    }
)
"""Files below tests/unit that show what several modules do together; they lie in the folder that those share."""


def main() -> int:
    """Check the repository that holds this file; 0 when every file of tests has its place."""
    parser = argparse.ArgumentParser(description="check that unit tests are named after what they test")
    parser.add_argument("--missing", action="store_true", help="list the modules without a file of tests of that name")
    if parser.parse_args().missing:
        for module, tests in sorted(missing(ROOT).items()):
            print(f"{module}: {', '.join(map(str, tests)) or 'imported by no test'}")
        return 0
    problems = misplaced(ROOT)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def misplaced(root: Path) -> list[str]:
    """What is wrong with the names of files of unit tests below `root`, a line each."""
    found = [path.relative_to(root / UNIT) for path in sorted((root / UNIT).rglob("test_*.py"))]
    named = {path for path in found if subject(root, path) is not None}
    wrong = [
        f"{UNIT / path}: there is no {source_folder(path) / path.name.removeprefix('test_')}; "
        "if it is about several modules, list it in tools/check_tests.py"
        for path in found
        if path not in named and str(path) not in SEVERAL
    ]
    stale = SEVERAL - {str(path) for path in found if path not in named}
    return wrong + [f"tools/check_tests.py lists {name}, which needs no line there" for name in sorted(stale)]


def subject(root: Path, test: Path) -> Path | None:
    """The module, package or C++ source that a file below tests/unit is named after: `test_NAME.py` or, for one aspect
    of it, `test_NAME_ASPECT.py`. None where there is none."""
    folder = root / source_folder(test)
    words = test.stem.removeprefix("test_").split("_")
    for count in range(len(words), 0, -1):
        name = "_".join(words[:count])
        for path in (
            folder / f"{name}.py",
            folder / name / "__init__.py",
            folder / f"{name}.cpp",
            folder / f"{name}.h",
        ):
            if path.exists():
                return path.relative_to(root)
    main_module = folder / "__main__.py"
    return main_module.relative_to(root) if test.stem == "test_main" and main_module.exists() else None


def source_folder(test: Path) -> Path:
    """The folder that the folder of a file below tests/unit mirrors."""
    return MIRRORED.get(test.parent, Path("pagemill") / test.parent)


def missing(root: Path) -> dict[Path, list[Path]]:
    """Module below `root` without a file of tests of that name -> the files of tests, of any kind, that import it."""
    tested = {subject(root, path.relative_to(root / UNIT)) for path in (root / UNIT).rglob("test_*.py")}
    importers: dict[str, list[Path]] = {}
    for test in sorted((root / "tests").rglob("test_*.py")):
        for name in imports(test):
            importers.setdefault(name, []).append(test.relative_to(root))
    modules = (path.relative_to(root) for path in (root / "pagemill").rglob("*.py") if path.name != "__init__.py")
    return {
        path: importers.get(".".join(path.with_suffix("").parts), []) for path in modules if path not in tested
    }  # fmt: skip


def imports(path: Path) -> set[str]:
    """Dotted names of the modules of the package that a file may import."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and re.match(r"pagemill\b", node.module or ""):
            found |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


if __name__ == "__main__":
    sys.exit(main())
