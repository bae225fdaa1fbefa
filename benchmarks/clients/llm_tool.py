"""The `llm` tool, as a command, with the model configured by what `pagemill connect llm` prints."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import QUESTION, Server, expect, run

LLM = Path(sys.executable).with_name("llm")


def ask(*words: str) -> str:
    done = subprocess.run([LLM, "-m", "pagemill", *words], capture_output=True, text=True, timeout=300)
    expect(done.returncode == 0, done.stderr)
    return done.stdout


def chat(server: Server) -> None:
    answer = ask("--no-stream", "-o", "max_tokens", "24", "-o", "temperature", "0", QUESTION)
    expect(answer.strip(), answer)


def stream(server: Server) -> None:
    limits = ("-o", "max_tokens", "24", "-o", "temperature", "0")
    answer = ask(*limits, QUESTION)
    expect(answer == ask("--no-stream", *limits, QUESTION), answer)


def tools(server: Server) -> None:
    """The model may call, or not: what it is shown, and what comes of it, passes both ways."""
    answer = ask("-T", "llm_version", "--cl", "2", "-o", "max_tokens", "48", "-o", "temperature", "0", QUESTION)
    expect(answer.strip(), answer)


def structured(server: Server) -> None:
    answer = ask("--schema", "name, population int", "-o", "max_tokens", "400", "-o", "seed", "1", QUESTION)
    expect(isinstance(json.loads(answer)["population"], int), answer)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        os.environ["LLM_LOAD_PLUGINS"] = ""
        Path(folder, "extra-openai-models.yaml").write_text(os.environ["CONNECT"])
        Path(folder, "keys.json").write_text(json.dumps({"pagemill": "none"}))
        raise SystemExit(run(chat=chat, stream=stream, tools=tools, structured=structured))
