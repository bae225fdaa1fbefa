"""GuideLLM: a load of chats and of completions, which it streams. It needs a tokenizer: the folder in TOKENIZER."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Server, expect, run

GUIDELLM = Path(sys.executable).with_name("guidellm")


def load(server: Server, path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        words = [
            "--backend", f"kind=openai_http,target={server.url},model={server.model},request_format={path}",
            "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            "--tokenizer", f"kind=hf_auto,model={os.environ['TOKENIZER']}",
            "--output", f"kind=json,path={report}", "--disable-progress",
        ]  # fmt: skip
        done = subprocess.run([GUIDELLM, "run", *words], capture_output=True, text=True, timeout=900)
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
        expect(done.returncode == 0, done.stderr[-300:])
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    expect(totals["successful"] >= 4 and not totals["errored"], totals)


def chat(server: Server) -> None:
    load(server, "/v1/chat/completions")


def stream(server: Server) -> None:
    load(server, "/v1/completions")


if __name__ == "__main__":
    raise SystemExit(run(chat=chat, stream=stream))
