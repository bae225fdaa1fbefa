"""Tries a wheel where there is no compiler: installed into a fresh environment, it must generate with its own kernels.

torch and the rest come from the versions in constraints.txt, the model from the cache of this machine. Knows nothing
about how the wheel was built.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this file is run as a script too

from pagemill import envs  # noqa: E402 - found by the line above
from pagemill.artifacts import aliases  # noqa: E402 - as above
from pagemill.model.kernels.build import prebuilt_name  # noqa: E402 - as above
from pagemill.model.kernels.compile import machine  # noqa: E402 - as above

MODEL = "smollm2"
PROMPT = "The capital of France is"
EXPECTED = "Paris"
_LOOK = "from pagemill.model.kernels import native; found = native.library(); print(found.path, found.isa().decode())"


class WheelError(Exception):
    """What is wrong with a wheel."""


def main(arguments: list[str]) -> int:
    """Exit status: 0, 1 where something is wrong with the wheel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, metavar="FOLDER", help="folder with the wheel for this machine")
    asked = parser.parse_args(arguments)
    try:
        try_wheel(newest_wheel(asked.wheels))
    except WheelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def newest_wheel(folder: Path) -> Path:
    """The last one that was built for this kind of machine. Raises WheelError where there is none."""
    found = sorted(folder.glob(f"pagemill-*_{machine()}.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise WheelError(f"{folder} has no wheel for {machine()}; `make wheel` builds one")
    return found[-1]


def try_wheel(wheel: Path) -> None:
    """Install and use it. Raises WheelError for what does not work."""
    aliases.fetch(MODEL)
    with tempfile.TemporaryDirectory(prefix="pagemill-try-") as scratch:
        python = Path(scratch) / "venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
        cache = Path(scratch) / "cache"
        cache.mkdir()
        (cache / "models").symlink_to(envs.cache_home() / "models")
        used = _run([str(python), "-c", _LOOK], Path(scratch), cache)
        if prebuilt_name(machine()) not in used.stdout:
            raise WheelError(f"its kernels are not used: {used.stdout or used.stderr}")
        print(f"kernels: {used.stdout.split()[-1]}, prebuilt")
        command = [str(python.parent / "pagemill"), "complete", "-q", PROMPT, "--model", MODEL]
        done = _run([*command, "--max-tokens", "8", "--temperature", "0"], Path(scratch), cache)
        if EXPECTED not in done.stdout or "plain torch" in done.stderr:
            raise WheelError(f"to {PROMPT!r} it says {done.stdout!r}: {done.stderr[-2000:]}")
        print(f"{wheel.name}: {PROMPT} {done.stdout.strip()}")


def _run(command: list[str], folder: Path, cache: Path) -> "subprocess.CompletedProcess[str]":
    """With no compiler to be found, and away from this checkout. Raises WheelError for a command that fails."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH")}
    environment = {**inherited, "PATH": str(folder / "venv/bin"), "PAGEMILL_CACHE_ROOT": str(cache)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
