"""What `import pagemill` offers, and what it costs."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import pagemill
from pagemill import catalog
from pagemill.catalog.registry import Registry
from pagemill.errors import ConfigError

REGISTRIES = [
    value
    for module in pkgutil.iter_modules(catalog.__path__, f"{catalog.__name__}.")
    for value in vars(importlib.import_module(module.name)).values()
    if isinstance(value, Registry)
]
LINES = [pytest.param(registry, name, id=f"{registry.kind}-{name}") for registry in REGISTRIES for name in registry]
OPTIONAL_PACKAGES = ("cbor2", "xxhash")
"""Extras: a line that needs one of them is skipped where it is not installed."""


def modules_loaded_by(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after running `code`."""
    report = "\nimport sys; print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=True, timeout=300
    )
    return set(done.stdout.split())


def test_all_names_are_listed_once_and_lazily():
    assert len(set(pagemill.__all__)) == len(pagemill.__all__)
    assert set(pagemill.__all__) == {*pagemill._PUBLIC, "__version__"}


@pytest.mark.parametrize("name", pagemill.__all__)
def test_every_public_name_is_there(name: str):
    assert getattr(pagemill, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = pagemill.Engine


def test_importing_the_package_is_cheap():
    assert not modules_loaded_by("import pagemill; pagemill.SamplingParams") & {"torch", "transformers", "fastapi"}


@pytest.mark.parametrize("module", ["pagemill.serve.http.preparer_process", "pagemill.grammar.checker"])
def test_helper_processes_start_cheaply(module: str):
    """The first large body, or the first grammar, waits for their start."""
    assert not modules_loaded_by(f"import {module}") & {"torch", "transformers", "fastapi"}


def test_help_is_cheap():
    code = (
        "import contextlib, io\n"
        "from pagemill.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['--help'])\n"
    )
    assert not modules_loaded_by(code) & {"torch", "transformers"}


@pytest.mark.parametrize(("registry", "name"), LINES)
def test_every_line_of_the_catalogue_resolves(registry: Registry[object], name: str):
    try:
        assert registry.resolve(name) is not None
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL_PACKAGES:
            raise
        pytest.skip(f"{error.name} is not installed")


def test_every_registry_refuses_an_unknown_name_and_lists_the_known():
    for registry in REGISTRIES:
        with pytest.raises(ConfigError, match=f"unknown {registry.kind} 'no-such'; known: {min(registry)}"):
            registry.resolve("no-such")
