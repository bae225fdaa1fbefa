"""`pagemill run-batch`: answers every request of a file, by a model in this process, without a server."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pagemill import envs
from pagemill.cli.config_file import ConfigFile, with_file
from pagemill.cli.engine_flags import add_engine_flags, engine_args
from pagemill.cli.errors import UsageError
from pagemill.config.arguments import EngineArgs, add_flags, make_section
from pagemill.config.server_config import ServerConfig

SERVER_SETTINGS = (
    "served_model_name", "reasoning_parser", "enable_auto_tool_choice", "tool_call_parser",
    "exclude_tools_when_tool_choice_none", "tool_strict_level", "reasoning_parser_plugin", "tool_parser_plugin",
)  # fmt: skip
"""Those of the HTTP server that change an answer."""
HOST = "http://localhost"


def add_parser(subparsers: Any) -> None:
    """Add the command and its flags."""
    parser = subparsers.add_parser(
        "run-batch",
        description="Answer every request of a file in OpenAI's batch format, one JSON object a line: custom_id, "
        "method, url (such as /v1/chat/completions) and body. Each gets a line in the output, also when it is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="JSON lines with the requests")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="JSON lines with the answers")
    parser.add_argument("--config", action=ConfigFile, metavar="FILE", help="YAML file of flags of the engine")
    others = {name for name in ServerConfig.__dataclass_fields__ if name not in SERVER_SETTINGS}
    add_flags(parser, [ServerConfig], skip=others)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Write an answer for each line; 0, also when some are errors."""
    import asyncio  # deferred: 0.05 s, which the help does not need

    args = with_file(args)
    source, target = _checked(args.input_file, args.output_file)
    server = make_section(ServerConfig, {name: getattr(args, name) for name in SERVER_SETTINGS})
    engine = engine_args(args)
    with source.open("rb") as lines, target.open("w", encoding="utf-8") as answers:
        num_answers, num_errors = asyncio.run(_run(engine, server, lines, answers))
    print(f"{num_answers} answers in {target}, of which {num_errors} are errors", file=sys.stderr)
    return 0


def _checked(source: str, target: str) -> tuple[Path, Path]:
    for name in (source, target):
        if "://" in name:
            raise UsageError(f"{name}: nothing is fetched or sent; give files of this machine")
    if not Path(source).is_file():
        raise UsageError(f"--input-file {source}: no such file")
    if Path(target).exists() and Path(source).samefile(target):
        raise UsageError(f"--output-file {target} is the input file")
    return Path(source), Path(target)


async def _run(engine: EngineArgs, server: ServerConfig, lines: BinaryIO, answers: Any) -> tuple[int, int]:
    """(answers, of which are errors)."""
    import httpx  # deferred, with the next: only a run needs them
    from tqdm import tqdm

    from pagemill.cli.batch_lines import answer_lines  # deferred: httpx; with the next, the engine and fastapi
    from pagemill.launch import build_inproc
    from pagemill.serve.http.app import build_app

    launched = build_inproc(engine)
    key = envs.api_key()
    num_answers = num_errors = 0
    try:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(build_app(launched.llm, server), raise_app_exceptions=False),
            base_url=HOST,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=None,
        )
        window = 2 * launched.config.scheduler.max_num_seqs
        async with client, contextlib.aclosing(answer_lines(client, _lines(lines), window)) as done:
            with tqdm(desc="Answering", unit="line", disable=not sys.stderr.isatty()) as bar:
                async for answer in done:
                    answers.write(answer.line + "\n")
                    num_answers += 1
                    num_errors += not answer.ok
                    bar.update()
    finally:
        await launched.llm.shutdown()
    return num_answers, num_errors


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file; of one that is too long the first part, which is no JSON."""
    from pagemill.cli.batch_lines import MAX_LINE_BYTES  # deferred: httpx

    while line := file.readline(MAX_LINE_BYTES + 1):
        whole = line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1)
        yield whole
