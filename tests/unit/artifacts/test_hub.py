import errno
import os

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from pagemill.artifacts import hub
from pagemill.errors import ModelError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", True),
        ("HuggingFaceTB/SmolLM2-135M_x.1", True),
        ("name", False),
        ("a/b/c", False),
        ("./name", False),
        ("org/", False),
        ("/x", False),
        ("org/na me", False),
    ],
)
def test_hub_ids(name, expected):
    assert hub.is_hub_id(name) is expected


CLIENT_ERROR = errors.HfHubHTTPError.__bases__[0]
"""What errors of the HTTP client that huggingface_hub uses are."""


def test_only_data_files_are_asked_for(monkeypatch, tmp_path):
    seen = {}

    def download(repo, **options):
        seen.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.snapshot("org/name", "v1", "/cache") == tmp_path
    assert (seen["repo"], seen["revision"], seen["cache_dir"]) == ("org/name", "v1", "/cache")
    kept = huggingface_hub.utils.filter_repo_objects(
        ["config.json", "model-1-of-2.safetensors", "tokenizer.model", "chat_template.jinja",
         "pytorch_model.bin", "modeling_x.py", "model.pt", "evil.pkl", "weights.gguf"],
        allow_patterns=seen["allow_patterns"],
    )  # fmt: skip
    assert list(kept) == ["config.json", "model-1-of-2.safetensors", "tokenizer.model", "chat_template.jinja"]
    hub.snapshot("org/name", ignore_patterns=("original/*",))
    assert seen["ignore_patterns"] == ["original/*"]
    hub.snapshot("org/name", weights=False)
    assert "*.safetensors" not in seen["allow_patterns"]


def http_error(kind):
    return kind("long\nstory", response=httpx.Response(404, request=httpx.Request("GET", "https://hub")))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: http_error(errors.GatedRepoError), "org/name is gated: accept its terms"),
        (lambda: http_error(errors.RepositoryNotFoundError), "org/name does not exist on the hub"),
        (lambda: http_error(errors.RevisionNotFoundError), "org/name has no revision None"),
        (lambda: http_error(errors.HfHubHTTPError), "cannot be fetched from the hub: long"),
        (lambda: errors.LocalEntryNotFoundError("x"), r"is not cached, and https?://\S+ cannot be reached"),
        (lambda: errors.OfflineModeIsEnabled("x"), r"is not cached, and https?://\S+ cannot be reached"),
        (lambda: CLIENT_ERROR("refused"), "cannot be fetched from the hub: refused"),
        (lambda: OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_errors_become_one_line(monkeypatch, error, message):
    def fail(repo, **options):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=message) as raised:
        hub.snapshot("org/name")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("folder", [None, "/models"])
def test_a_folder_that_takes_nothing(monkeypatch, number, folder):
    def download(repo, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError) as raised:
        hub.snapshot("org/name", download_dir=folder)
    where = folder or huggingface_hub.constants.HF_HUB_CACHE
    assert f"org/name cannot be kept in {where}: {os.strerror(number)}" in str(raised.value)
    assert "--download-dir or HF_HOME" in str(raised.value)
