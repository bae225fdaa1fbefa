"""Other people's clients against `pagemill serve` with the embedded model, each in an environment of its own.

    python benchmarks/clients/run.py [--only NAME ...] [--url URL --model NAME]

An environment is what NAME.txt pins, installed under build/clients/NAME when it is not there or the file has changed;
none is shared, because what the clients want of each other's libraries clashes. The version of torch is that of
constraints.txt. The table has a row for each check; the exit status is 1 when one fails, or a client cannot be
installed.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "clients"
INSTALL_S, CHECK_S, START_S = 3600, 1800, 300
MODEL = "smollm2"
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "2048", "--seed", "0")


class Client(NamedTuple):
    """One client: the script that uses it; its environment is pinned in the file of its name."""

    script: str
    needs_tokenizer: bool = False
    needs_configuration: bool = False
    """Whether it is configured by what `pagemill connect` prints."""
    is_partial: bool = False
    """Whether only what it imports is pinned: less than its package says that it depends on."""


CLIENTS = {
    "langchain": Client("langchain_client.py"),
    "litellm": Client("litellm_client.py"),
    "llm": Client("llm_tool.py", needs_configuration=True),
    "instructor": Client("instructor_client.py"),
    "pydantic-ai": Client("pydantic_ai_client.py"),
    "guidellm": Client("guidellm_client.py", needs_tokenizer=True),
    "lm-eval": Client("lm_eval_client.py"),
    "vllm": Client("vllm_bench.py", needs_tokenizer=True, is_partial=True),
}


class Row(NamedTuple):
    """What became of one check."""

    client: str
    check: str
    reason: str
    """Empty: it passed."""


def environment(name: str) -> Path:
    """The interpreter of a client's environment, which is made when it is not current. Raises RuntimeError with the
    reason when it cannot be."""
    pins = HERE / f"{name}.txt"
    folder, stamp = BUILD / name, BUILD / name / ".installed"
    python = folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == pins.read_text():
        return python
    print(f"{name}: installing {pins.relative_to(ROOT)}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    torch = folder / "torch.txt"
    torch.write_text("".join(re.findall(r"^torch==.*\n", (ROOT / "constraints.txt").read_text(), re.MULTILINE)))
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", torch, "-r", pins]
    command += ["--no-deps"] * CLIENTS[name].is_partial
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError("blocked: " + (errors or ["pip failed"])[0][:200])
    stamp.write_text(pins.read_text())
    return python


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The address of `pagemill serve` with the embedded model."""
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "pagemill", "serve", MODEL, "--port", "0", *FLAGS]
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT)
        try:
            deadline = time.monotonic() + START_S
            while not (found := re.search(r"ready: (http://\S+)", said := os.pread(log.fileno(), 1 << 20, 0).decode())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start:\n{said}")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()
            process.wait()


def tokenizer() -> Path:
    """A folder with the embedded model's tokenizer, in the form that transformers reads."""
    from transformers import AutoTokenizer  # deferred: only some clients need it

    from pagemill.artifacts.aliases import cached

    folder, model = BUILD / "tokenizer", cached(MODEL)
    if model is None:
        raise RuntimeError(f"{MODEL} is not in the cache: python -m pagemill.artifacts.fetch {MODEL}")
    if not (folder / "tokenizer.json").is_file():
        AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name).save_pretrained(str(folder))
    return folder


def ask(name: str, url: str, model: str) -> list[Row]:
    """The rows of one client."""
    client, variables = CLIENTS[name], os.environ | {"PAGEMILL": sys.executable}
    try:
        python = environment(name)
        if client.needs_tokenizer:
            variables["TOKENIZER"] = str(tokenizer())
        if client.needs_configuration:
            command = [sys.executable, "-m", "pagemill", "connect", name, "--url", url]
            variables["CONNECT"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [python, str(HERE / client.script), "--url", url, "--model", model]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S, env=variables, cwd=HERE)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return [Row(name, "-", str(error)[:300])]
    rows = [Row(name, *found) for found in read(done.stdout)]
    if any(row.reason for row in rows) or not rows:
        print(done.stderr[-6000:], file=sys.stderr)
    return rows or [Row(name, "-", f"the script ended with status {done.returncode} and no result")]


def read(output: str) -> list[tuple[str, str]]:
    """Check and reason of each line that is a result."""
    found: list[Any] = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [(entry["check"], entry["reason"]) for entry in found if isinstance(entry, dict) and "check" in entry]


def table(rows: list[Row]) -> str:
    """In Markdown."""
    lines = [f"| {row.client} | {row.check} | {row.reason or 'passed'} |" for row in rows]
    return "\n".join(["| client | check | result |", "| --- | --- | --- |", *lines])


def main() -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(CLIENTS), default=list(CLIENTS), metavar="NAME")
    parser.add_argument("--url", help="a server that runs already, without /v1")
    parser.add_argument("--model", default=MODEL, help="what that server calls its model")
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext(args.url) if args.url else served() as url:
        rows = []
        for name in args.only:
            rows += ask(name, url, args.model)
    print(table(rows))
    num_failed = sum(bool(row.reason) for row in rows)
    print(f"{len(rows) - num_failed} of {len(rows)} passed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
