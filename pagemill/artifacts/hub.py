"""Snapshots from the Hugging Face hub: json, safetensors and tokenizer files, never code and never pickles.
Knows nothing about what the files say."""

import errno
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

from pagemill.errors import ModelError

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PATTERNS: Final = ("*.json", "tokenizer.model", "*.jinja")
"""Files that describe a model."""
_WEIGHTS: Final = ("*.safetensors",)
_NOT_WRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


def is_hub_id(model: str) -> bool:
    """Whether the name has the form `org/name`."""
    return _HUB_ID.fullmatch(model) is not None


def snapshot(
    hub_id: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    weights: bool = True,
    ignore_patterns: Sequence[str] = (),
) -> Path:
    """Folder with the files of a hub repository, downloaded when they are not cached; those of weights if wanted, and
    none that a pattern to be ignored fits. The hub, the login and whether it may be asked are the library's business:
    HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HOME.

    Raises ModelError when it does not exist, needs a login, the hub cannot be reached, or the folder cannot be written.
    """
    # huggingface_hub takes 0.3 s to import; local models do not need it.
    import huggingface_hub
    from huggingface_hub import errors

    # Of the HTTP client that the library uses, which is httpx2 in newer versions.
    http_error = cast(type[Exception], errors.HfHubHTTPError.__bases__[0])
    at = f"{hub_id} (revision {revision})" if revision else hub_id
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=[*PATTERNS, *(_WEIGHTS if weights else ())],
            ignore_patterns=list(ignore_patterns),
        )
    except errors.GatedRepoError as error:
        raise ModelError(f"{at} is gated: accept its terms on the hub, and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"{at} does not exist on the hub, or is private (set HF_TOKEN)") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{hub_id} has no revision {revision!r}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        hub = huggingface_hub.constants
        why = "HF_HUB_OFFLINE is set" if hub.HF_HUB_OFFLINE else f"{hub.ENDPOINT} cannot be reached"
        raise ModelError(f"{at} is not cached, and {why}") from error
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise ModelError(f"{at} cannot be fetched from the hub: {_first_line(error)}") from error
        folder = download_dir or huggingface_hub.constants.HF_HUB_CACHE
        raise ModelError(
            f"{at} cannot be kept in {folder}: {error.strerror}; make room there, or choose another folder with "
            "--download-dir or HF_HOME"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, http_error) as error:
        raise ModelError(f"{at} cannot be fetched from the hub: {_first_line(error)}") from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
