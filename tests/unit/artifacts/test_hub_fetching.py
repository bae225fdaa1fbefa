"""Models by their names on a hub: a server of this test answers as the hub does, HF_ENDPOINT names it, and a process of
its own asks, for huggingface_hub reads the environment once."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.slow
MAIN, OLD = "1" * 40, "2" * 40
NAME = "some-org/tiny"
ASK = """
import sys
from pagemill.artifacts.describe import locate
from pagemill.errors import ModelError
try:
    print(locate(sys.argv[1], sys.argv[2] or None))
except ModelError as error:
    sys.exit(f"refused: {error}")
"""


class Hub(ThreadingHTTPServer):
    """Two revisions of one repository: `main`, and `old`, whose config.json differs."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        files["pytorch_model.bin"] = b"a pickle"
        config = json.loads(files["config.json"]) | {"max_position_embeddings": 77}
        self.files = {MAIN: files, OLD: files | {"config.json": json.dumps(config).encode()}}
        self.asked: list[str] = []
        """Files that were fetched, each as often as it was."""
        self.cut: set[str] = set()
        """Files of which the next answer ends in the middle."""
        self.broken: set[str] = set()
        """Files that nobody may have."""
        self.sent: dict[str, list[int]] = {}
        """Of each file, the byte that each answer began with."""
        self.token: str | None = None
        """Of the login that the repository is for, where it is gated."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        token = self.server.token
        if token is not None and self.headers["Authorization"] != f"Bearer {token}":
            message = f"Access to model {NAME} is restricted.\nYou must have access to it and be authenticated."
            self._end(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": message.replace("\n", " ")})
            return
        api = re.fullmatch(rf"/api/models/{NAME}/(revision|tree)/(\w+)", path)
        file = re.fullmatch(rf"/{NAME}/resolve/(\w+)/(.+)", path)
        if api is not None:
            self._describe(*api.groups())
        elif file is not None:
            self._file(*file.groups())
        else:
            self._end(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _describe(self, what: str, revision: str) -> None:
        sha = {"main": MAIN, "old": OLD}.get(revision, revision)
        files = self.server.files.get(sha)
        if files is None:
            self._end(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif what == "revision":
            self._end(200, json.dumps({"id": NAME, "sha": sha, "siblings": []}).encode())
        else:
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{hash((name, data)):x}".strip("-")}
                for name, data in files.items()
            ]
            self._end(200, json.dumps(found).encode())

    def _file(self, sha: str, name: str) -> None:
        data = self.server.files[sha][name]
        etag = f'"{name}-{len(data)}-{sha if name == "config.json" else ""}"'
        headers = {"ETag": etag, "X-Repo-Commit": sha}
        if self.command == "HEAD":
            self._end(200, data, headers)
            return
        self.server.asked.append(name)
        if name in self.server.broken:
            self._end(403, b"{}")
            return
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        first = int(begin[1]) if begin else 0
        self.server.sent.setdefault(name, []).append(first)
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self._end(206 if first else 200, data[first:], headers, cut=name in self.server.cut)
        self.server.cut.discard(name)

    def _end(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In shards, with an index."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    whole = make_checkpoint(folder / "whole", "LlamaForCausalLM", num_hidden_layers=2)
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(folder / "shards", max_shard_size="100KB")
    return folder / "shards"


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    server = Hub(checkpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(hub: Hub, home: Path, name: str = NAME, revision: str = "", **environment: str) -> str:
    """The folder that the name stands for, or the line of the refusal."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", ASK, name, revision],
        env=kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_a_mirror_gives_all_shards_of_the_revision_and_then_nothing_is_fetched_again(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(ask(hub, tmp_path))
    assert tmp_path in folder.parents
    assert folder.name == MAIN
    shards = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    assert len(shards) > 1
    assert not (folder / "pytorch_model.bin").exists()
    tokens = [5, 9, 20, 11]
    assert torch.equal(
        PagedModel.load(folder, max_len=128).logits(tokens), PagedModel.load(checkpoint, max_len=128).logits(tokens)
    )
    fetched = len(hub.asked)
    old = Path(ask(hub, tmp_path, revision="old"))
    assert old.name == OLD
    assert json.loads((old / "config.json").read_text())["max_position_embeddings"] == 77
    before = len(hub.asked)
    assert ask(hub, tmp_path) == str(folder)
    assert ask(hub, tmp_path, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9") == str(folder)
    assert len(hub.asked) == before > fetched


def test_what_cannot_be_had_is_one_line(hub: Hub, tmp_path: Path) -> None:
    assert ask(hub, tmp_path, "some-org/other").startswith("refused: some-org/other does not exist on the hub")
    assert ask(hub, tmp_path, revision="v9") == f"refused: {NAME} has no revision 'v9'"
    offline = ask(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert offline == f"refused: {NAME} is not cached, and HF_HUB_OFFLINE is set"
    nobody = ask(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert nobody == f"refused: {NAME} is not cached, and http://127.0.0.1:9 cannot be reached"
    assert not hub.asked


def test_a_file_that_was_cut_off_is_asked_for_again(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    name = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size).name
    hub.cut = {name}
    folder = Path(ask(hub, tmp_path))
    assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()
    assert hub.asked.count(name) == 2


def test_of_a_large_file_that_was_cut_off_only_the_rest_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    """Larger than what huggingface_hub writes at once."""
    data = bytes(range(256)) * (100 << 10)
    hub.files[MAIN]["large.safetensors"] = data
    hub.cut = {"large.safetensors"}
    folder = Path(ask(hub, tmp_path))
    assert (folder / "large.safetensors").read_bytes() == data
    first, second = hub.sent["large.safetensors"]
    assert (first, 0 < second <= len(data) // 2) == (0, True)


def test_a_gated_repository_is_for_who_has_the_token(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    line = f"refused: {NAME} is gated: accept its terms on the hub, and set HF_TOKEN"
    assert ask(hub, tmp_path) == line
    assert ask(hub, tmp_path, HF_TOKEN="hf_other") == line
    assert not hub.asked
    folder = Path(ask(hub, tmp_path, HF_TOKEN="hf_secret"))
    assert (folder / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()


def test_a_download_that_failed_is_an_error_and_the_next_one_fetches_what_is_missing(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    name = min(checkpoint.glob("*.safetensors")).name
    hub.broken = {name}
    refused = ask(hub, tmp_path)
    assert refused.startswith(f"refused: {NAME} cannot be fetched from the hub: ")
    hub.broken.clear()
    hub.asked.clear()
    folder = Path(ask(hub, tmp_path))
    assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()
    assert name in hub.asked
