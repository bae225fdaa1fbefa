"""Models in the caches of this machine: those with an alias in ours, those of the hub in the hub's. Lists and removes
them; does not know what is inside."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pagemill.artifacts import aliases
from pagemill.errors import ModelError


class CachedModel(NamedTuple):
    """One model on this machine."""

    name: str
    """Alias or hub id, as --model takes it."""
    num_bytes: int
    path: Path
    """The file of an alias; the folder of a repository of the hub, with all its revisions."""


def cached_models(download_dir: str | None = None) -> list[CachedModel]:
    """By name, aliases first. `download_dir`: the hub's cache; None: its usual one."""
    return [*_aliases(), *_repositories(download_dir)]


def remove(name: str, download_dir: str | None = None) -> int:
    """Delete a model from the cache; the bytes that it took. Raises ModelError when it is not there, or cannot be
    deleted."""
    found = next((model for model in cached_models(download_dir) if model.name == name), None)
    if found is None:
        raise ModelError(f"{name} is not in the cache; see `pagemill models list`")
    try:
        if name in aliases.ALIASES:
            for file in (found.path, aliases.record_path(found.path)):
                file.unlink(missing_ok=True)
        else:
            _remove_repository(name, download_dir)
    except OSError as error:
        raise ModelError(f"{name} cannot be removed: {error.strerror or error}") from error
    return found.num_bytes


def _aliases() -> Iterator[CachedModel]:
    for alias in sorted(aliases.ALIASES):
        path = aliases.cached(alias)
        if path is not None:
            yield CachedModel(alias, path.stat().st_size, path)


def _repositories(download_dir: str | None) -> Iterator[CachedModel]:
    # huggingface_hub takes 0.3 s to import
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(download_dir)
    except (CacheNotFound, ValueError):  # no folder, or a file of that name
        return
    models = (item for item in found.repos if item.repo_type == "model")
    for item in sorted(models, key=lambda item: item.repo_id):
        yield CachedModel(item.repo_id, item.size_on_disk, item.repo_path)


def _remove_repository(name: str, download_dir: str | None) -> None:
    from huggingface_hub import scan_cache_dir  # deferred, as above

    for item in scan_cache_dir(download_dir).repos:
        if item.repo_id == name and item.repo_type == "model":
            hashes = [revision.commit_hash for revision in item.revisions]
            scan_cache_dir(download_dir).delete_revisions(*hashes).execute()
