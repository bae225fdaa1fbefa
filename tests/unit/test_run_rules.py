"""The rules of tests/conftest.py, on a test run of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARKERS = "[pytest]\nmarkers =\n    browser\n    model\n    gpu\n"


def run(folder: Path, body: str, ci: bool) -> tuple[int, str]:
    """Exit status and output of pytest over one file with these tests."""
    (folder / "pytest.ini").write_text(MARKERS)
    (folder / "test_it.py").write_text("import pytest\n" + body)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CI": "true" if ci else ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("marker", ["browser", "model"])
@pytest.mark.parametrize(
    "body",
    [
        "@pytest.mark.{}\ndef test(): pytest.skip('not here')\n",
        "@pytest.mark.{}\n@pytest.mark.skip(reason='not here')\ndef test(): pass\n",
    ],
)
def test_what_ci_must_have_is_not_skipped_there(tmp_path: Path, marker: str, body: str):
    status, output = run(tmp_path, body.format(marker), ci=True)
    assert status == 1
    assert "was skipped, and CI must have" in output
    assert "not here" in output


@pytest.mark.slow
def test_elsewhere_the_summary_says_what_is_missing(tmp_path: Path):
    status, output = run(tmp_path, "@pytest.mark.browser\ndef test(): pytest.skip('not here')\n", ci=False)
    assert status == 0
    assert "NOTE: 1 tests did not run, they need Chromium" in output


@pytest.mark.slow
def test_other_skips_and_expected_failures_are_left_alone_in_ci(tmp_path: Path):
    body = (
        "@pytest.mark.gpu\ndef test_gpu(): pytest.skip('none')\n"
        "def test_extra(): pytest.skip('not installed')\n"
        "@pytest.mark.model\n@pytest.mark.xfail\ndef test_known(): raise ValueError\n"
    )
    status, output = run(tmp_path, body, ci=True)
    assert status == 0, output
    assert "2 skipped, 1 xfailed" in output
