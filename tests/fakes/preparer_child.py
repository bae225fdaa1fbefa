"""A helper process with a tokenizer of bytes, which some texts kill, stop or break."""

import os
import signal
import socket
import time
from pathlib import Path

import msgspec

from pagemill.serve.http import preparer_process
from pagemill.serve.http.preparer import Preparer
from pagemill.serve.http.preparer_process import HelperSpec, serve
from pagemill.serve.http.responses import ServedModel
from pagemill.serve.preparation import Preparation
from pagemill.utils.processes import Report
from tests.fakes.fake_tokenizer import ByteTokenizer

ENTRY = "tests.fakes.preparer_child:run"


class HostileTokenizer(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True, *, rendered: bool = False) -> list[int]:
        match text[:5]:
            case "kill!":
                os.kill(os.getpid(), signal.SIGKILL)
            case "slow!" if len(text) > 5:
                _wait_for_release(Path(text[5:]))
            case "slow!":
                time.sleep(3)
            case "hang!":
                time.sleep(600)
            case "grow!":
                preparer_process.MAX_RESIDENT_BYTES = 1 << 20
            case "fail!":
                raise RuntimeError("a library failed at 0x7f00deadbeef")
        return super().encode(text, add_special_tokens, rendered=rendered)


def _wait_for_release(folder: Path) -> None:
    """Say so in a folder, and wait until somebody else does."""
    (folder / "begun").touch()
    end_s = time.monotonic() + 300
    while not (folder / "end").exists() and time.monotonic() < end_s:
        time.sleep(0.01)


def run(payload: bytes, report: Report) -> None:
    spec = msgspec.msgpack.decode(payload, type=HelperSpec)
    preparation = Preparation(HostileTokenizer(), spec.facts, spec.ready, spec.scheduler)
    with socket.socket(fileno=spec.socket_fd) as sock:
        serve(sock, Preparer(preparation, ServedModel.of(spec.model_names, 0)))
