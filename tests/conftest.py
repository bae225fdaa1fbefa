"""Rules for every test run: says which tests were skipped for want of a browser, a model or a GPU, and in CI
(CI=true) counts a test that skips for want of a browser or a model as failed."""

import gc
import itertools
import logging
import os
import signal
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from pagemill.artifacts import aliases

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any test imports a kernel: Triton reads it only then

# What is ignored stays ignored in every process that a test starts, and a shell's background jobs ignore these.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

for _wait in ("connect", "read", "write", "pool"):  # 5 s by default, which a machine that does much else can take
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _wait, 120.0)

NEEDS = {"browser": "Chromium", "model": "the embedded default model", "gpu": "a CUDA device"}
FREEZE, UNFREEZE = gc.freeze, gc.unfreeze
gc.disable()  # until all tests are collected: modules and tests are no garbage, and each pass looks at all of them
NEVER_SKIPPED_IN_CI = ("browser", "model")


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """Without native kernels: layer by layer, and all of it seen by torch."""
    monkeypatch.setenv("PAGEMILL_NATIVE_KERNELS", "0")
    from pagemill.model.kernels import native

    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the mark `cases(one_in=N)`, all but every Nth case are slow."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("cases")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.kwargs["one_in"]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the run: every pass of the garbage collector over them takes half a second.

    An engine that ends thaws all that is frozen, and one that starts freezes what other tests have left: not here,
    unless a test uses `freezing`."""
    FREEZE()
    gc.freeze = gc.unfreeze = lambda: None
    # Torch's forty loggers keep to themselves: pytest would add its handlers to each, six times a test.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Also where pytest-xdist's workers collect, and nothing is collected here."""
    gc.enable()


@pytest.fixture
def freezing(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """`gc.freeze` and `gc.unfreeze` as they are elsewhere."""
    monkeypatch.setattr(gc, "freeze", FREEZE)
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    yield
    FREEZE()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not report.skipped or hasattr(report, "wasxfail"):
        return report
    report.lacks = [marker for marker in NEEDS if item.get_closest_marker(marker)]  # travels from a worker of xdist
    for need in report.lacks:
        if need in NEVER_SKIPPED_IN_CI and os.environ.get("CI") == "true":
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped, and CI must have {NEEDS[need]}: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = itertools.chain.from_iterable(terminalreporter.stats.values())
    counts = Counter(need for report in reports for need in getattr(report, "lacks", ()))
    for need, count in counts.items():
        terminalreporter.write_line(f"NOTE: {count} tests did not run, they need {NEEDS[need]}", yellow=True)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded default model; skips when it is not in the cache (python -m pagemill.artifacts.fetch smollm2)."""
    found = aliases.cached("smollm2")
    if found is None:
        pytest.skip("smollm2 is not in the cache")
    return found
