"""Writes the documentation that follows from the code: docs/reference/*.md and the tree in ARCHITECTURE.md.

Knows the configuration, docstrings and import contracts; knows nothing about what they mean. `--check` writes nothing
and fails when a file is not current.
"""

import argparse
import ast
import configparser
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pagemill import envs
from pagemill.catalog.attention import ATTENTION, cuda_order
from pagemill.catalog.endpoints import ENDPOINTS, OPERATOR
from pagemill.catalog.parsers import REASONING_PARSERS, TOOL_PARSERS
from pagemill.catalog.registry import Registry
from pagemill.config.arguments import ENGINE_SECTIONS, section_title
from pagemill.config.fleet_config import FleetConfig
from pagemill.config.server_config import ServerConfig
from pagemill.messages.sampling_params import SamplingParams
from pagemill.model.attention.capability import ALL_TYPES, Capability, MultipleOf
from pagemill.model.attention.known_elsewhere import KNOWN_ELSEWHERE
from pagemill.serve.http.openapi import OF_ALL, OF_BODIES, Operation, operations_of
from pagemill.serve.http.schemas.anthropic import CountTokensBody, MessagesBody
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.completions import CompletionBody
from pagemill.serve.http.schemas.embeddings import EmbeddingBody
from pagemill.serve.http.schemas.ollama import OllamaChatBody, OllamaEmbedBody, OllamaEmbeddingsBody, OllamaGenerateBody
from pagemill.serve.http.schemas.responses import ResponsesBody
from pagemill.serve.http.schemas.support import IGNORED_FIELDS_HEADER
from pagemill.serve.http.schemas.tokenize import DetokenizeBody, TokenizeBody
from pagemill.serve.parsers.format import Calls, Channels, Reasoning

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this file is run as a script too

from tools import compat_tables  # noqa: E402 - found by the line above
from tools.markdown import table  # noqa: E402
from tools.model_table import models_table  # noqa: E402

PACKAGE = ROOT / "pagemill"
REQUEST_BODIES: dict[str, Any] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/api/chat": OllamaChatBody,
    "/api/generate": OllamaGenerateBody,
    "/api/embed": OllamaEmbedBody,
    "/api/embeddings": OllamaEmbeddingsBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
OPENED = ("fleet", "serve", "engine", "worker", "model")
"""Packages whose own modules and folders are drawn; of the others only the folder."""
FIELDS_BEGIN, FIELDS_END = "<!-- fields: written by `make docs` -->\n", "<!-- end of fields -->"
FORMATS_BEGIN, FORMATS_END = "<!-- formats: written by `make docs` -->\n", "<!-- end of formats -->"
MODELS_BEGIN = "<!-- models: written by `make docs` -->\n"
MODELS_END = "<!-- end of models -->"
ROUTES_BEGIN, ROUTES_END = "<!-- routes: written by `make docs` -->\n", "<!-- end of routes -->"
TREE_BEGIN, TREE_END = "<!-- tree: written by `make docs` -->\n```\n", "```\n<!-- end of tree -->"
NOTE = "<!-- written by `make docs`; edit the code instead -->\n\n"
BACKEND_COLUMNS = (
    "backend", "runs here", "dtypes", "KV dtypes", "block sizes", "head sizes", "window", "chunks", "soft cap",
    "sinks", "ALiBi", "sparse", "MM prefix", "DCP", "attention", "compute capability",
)  # fmt: skip
SHORT_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
BACKENDS_INTRODUCTION = """
A backend is chosen per layer. With `--attention-backend NAME` (or `--attention-config.backend NAME`,
`-ac.backend NAME`, `-ac '{"backend": "NAME"}'`; not both) it is checked against the model and the machine, and start-up
fails with every reason why it does not fit. Otherwise the first that fits is taken, in the order of the platform; when
none does, the error lists all of them with their reasons.
"""
BACKENDS_LEGEND = """
KV dtypes: `auto` is the model's type. Block sizes: `%N` means multiples of N. A backend that does not run here is
listed with what it can do elsewhere; choosing it fails, for pagemill has no implementation. FLASH_ATTN is version 3
where `flash_attn_interface` or a wheel with `vllm_flash_attn` is installed on compute capability 9, version 2
otherwise (`-ac.flash_attn_version` asks for one); that of torch (2.12 and later) and of the package flash-attn wants
blocks of multiples of 256 tokens.
"""


def main() -> int:
    """Write or check every generated file; 1 when --check finds one that is not current."""
    parser = argparse.ArgumentParser(description="write the generated documentation")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not current")
    only_check = parser.parse_args().check
    stale = [path for path, text in generated().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if only_check:
            print(f"{name} is not current: run `make docs`")
        else:
            path.write_text(generated()[path])
            print(f"wrote {name}")
    return 1 if stale and only_check else 0


def generated() -> dict[Path, str]:
    """Every generated file, as it should be."""
    reference = ROOT / "docs" / "reference"
    architecture, sampling = ROOT / "ARCHITECTURE.md", ROOT / "docs" / "sampling.md"
    calls, api = ROOT / "docs" / "tool-calls.md", ROOT / "docs" / "http-api.md"
    models = ROOT / "docs" / "models.md"
    return {
        reference / "flags.md": flags_page(),
        reference / "attention-backends.md": backends_page(),
        reference / "environment.md": environment_page(),
        reference / "sampling-params.md": sampling_page(),
        ROOT / "docs" / "compat.md": compat_page(),
        models: between(models.read_text(), MODELS_BEGIN, MODELS_END, models_table()),
        calls: between(calls.read_text(), FORMATS_BEGIN, FORMATS_END, formats_tables()),
        api: between(api.read_text(), ROUTES_BEGIN, ROUTES_END, routes_table()),
        sampling: between(sampling.read_text(), FIELDS_BEGIN, FIELDS_END, fields_table()),
        architecture: between(architecture.read_text(), TREE_BEGIN, TREE_END, tree()),
    }


def routes_table() -> str:
    """Every route of /openapi.json, from what it says of itself. Raises ValueError for one that says nothing."""
    rows = []
    for name in ENDPOINTS:
        for operation in operations_of(ENDPOINTS.resolve(name).routes):
            if not operation.is_described:
                raise ValueError(
                    f"{operation.method} {operation.path} says nothing of its bodies: give it "
                    "openapi_extra=describes(...) of serve/http/described.py, or include_in_schema=False"
                )
            rows.append(_route_row(operation, is_of_operators=name == OPERATOR))
    return table(("route", "what it does", "body", "answer", "statuses"), rows)


def _route_row(operation: Operation, is_of_operators: bool) -> tuple[str, ...]:
    about = operation.description
    answers = [_schema_name(about.answer, about.media_type)]
    if about.event is not None:
        answers.append(f"or `{about.stream_type}` of {_schema_name(about.event, '')}")
    usual = {*OF_ALL, 401, *(OF_BODIES if about.body is not None else ())}
    statuses = ", ".join(["200", *(str(status) for status in operation.statuses if status not in usual)])
    marks = [word for word, holds in (("no key", operation.is_public), ("operators", is_of_operators)) if holds]
    route = f"`{operation.method} {operation.path}`" + (f" ({', '.join(marks)})" if marks else "")
    return route, operation.summary, _schema_name(about.body, ""), " ".join(answers), statuses


def _schema_name(kind: Any, media_type: str) -> str:
    """A type for a cell of a table; empty where there is none."""
    if kind is None:
        return ""
    if kind in (str, Any) or getattr(kind, "__origin__", None) is dict:
        return f"`{media_type}`"
    if getattr(kind, "__origin__", None) is list:
        return f"list of {_schema_name(kind.__args__[0], '')}"
    return f"`{kind.__name__}`"


def formats_tables() -> str:
    """The formats of reasoning and of tool calls, each with its names."""
    text = "| `--tool-call-parser` | models | a call begins with |\n| --- | --- | --- |\n"
    for names, found in _by_format(TOOL_PARSERS):
        text += f"| {names} | {found.models} | {_beginning(found)} |\n"
    text += "\n| `--reasoning-parser` | models | reasoning stands between |\n| --- | --- | --- |\n"
    for names, found in _by_format(REASONING_PARSERS):
        text += f"| {names} | {found.models} | {_beginning(found)} |\n"
    return text


def _by_format(table: Registry[Any]) -> list[tuple[str, Any]]:
    """Names of the same format together, in the order of the first."""
    names: dict[int, list[str]] = {}
    formats = {name: table.resolve(name) for name in sorted(table)}
    for name, found in formats.items():
        names.setdefault(id(found), []).append(f"`{name}`")
    return [(", ".join(same), formats[same[0].strip("`")]) for same in names.values()]


def _beginning(found: Any) -> str:
    """What to look for in a message, for a cell of a table."""
    return _shown_beginning(found).replace("|", "\\|")


def _shown_beginning(found: Any) -> str:
    match found:
        case Reasoning():
            marks = " and ".join(f"`{mark.strip()}`" for mark in (found.begin, found.end))
            return f"{marks}; so does what begins without the first" if found.unasked else marks
        case Channels():
            return f"a header with `{found.channel}`"
        case Calls():
            shown = [f"`{mark.strip()}`" for mark in found.begin]
            return ", ".join(shown + [f"`{mark}` at the beginning of the answer" for mark in found.starts])
    return ""


def flags_page() -> str:
    """One table per section of the configuration."""
    text = (
        f"# Flags\n\n{NOTE}Every field of the configuration is a flag of `pagemill serve` and a keyword of\n"
        "`EngineArgs` and `LLM` (except those of the HTTP server and of its processes, which are flags only).\n"
        "Booleans have a `--no-` form too; whole numbers may be written as 4k (4,000) or 4K (4,096). Settings\n"
        "without a default are filled in from the model and the machine; start-up prints those that matter, and\n"
        "why. Which settings cannot matter, and what became of flags of\n"
        "vLLM that are not here: [compatibility](../compat.md).\n"
    )
    for cls in [*ENGINE_SECTIONS.values(), ServerConfig, FleetConfig]:
        text += f"\n## {section_title(cls)}\n\n{inspect.getdoc(cls)}\n\n"
        text += table(("flag", "keyword", "default", "meaning"), flag_rows(cls))
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(field.default):
                text += nested_section(field.name, type(field.default))
    return text


def nested_section(name: str, cls: type) -> str:
    """The fields of a setting that is a JSON object."""
    rows = table(("field", "default", "meaning"), (row[1:] for row in flag_rows(cls)))
    return f"\n### --{name.replace('_', '-')}\n\n{inspect.getdoc(cls)}\n\n{rows}"


def flag_rows(section: type) -> Iterator[tuple[str, ...]]:
    """(flag, keyword, default, meaning) of each field."""
    for field in dataclasses.fields(section):
        meta = field.metadata
        allowed = f"; one of {', '.join(f'`{name}`' for name in meta['choices'])}" if meta["choices"] else ""
        lowest = f"; at least {meta['low']}" if meta["low"] is not None else ""
        flag = f"`--{field.name.replace('_', '-')}`"
        yield flag, f"`{field.name}`", default_text(field), meta["help"] + allowed + lowest


def default_text(field: "dataclasses.Field[object]") -> str:
    """A field's default for the table; empty where there is none, or `resolve` fills it in."""
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()}`"
    if dataclasses.is_dataclass(field.default):
        return "`{}`"
    return "" if field.default in (None, "") else f"`{field.default}`"


def environment_page() -> str:
    """The variables that `pagemill.envs` reads, from the docstrings of its functions."""
    rows = []
    for name, function in inspect.getmembers(envs, inspect.isfunction):
        variable, _, meaning = " ".join((inspect.getdoc(function) or "").split()).partition(": ")
        if not name.startswith("_") and function.__module__ == envs.__name__:
            rows.append((f"`{variable}`", meaning) if meaning else (f"`PAGEMILL_{name.upper()}`", variable))
    return (
        f"# Environment variables\n\n{NOTE}Switches for debugging and for the machine; features are flags. `VLLM_` in "
        "place of `PAGEMILL_` is accepted too.\n\n" + table(("variable", "meaning"), rows)
    )


def sampling_page() -> str:
    """The fields of `SamplingParams`, from its source: msgspec keeps no docstrings of fields."""
    source = ast.parse((PACKAGE / "messages" / "sampling_params.py").read_text())
    cls = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams")
    rows = []
    for field, doc in zip(cls.body, cls.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            default = f"`{ast.unparse(field.value)}`" if field.value else ""
            meaning = " ".join(str(doc.value.value).split())
            rows.append((f"`{ast.unparse(field.target)}`", f"`{ast.unparse(field.annotation)}`", default, meaning))
    return (
        f"# SamplingParams\n\n{NOTE}{ast.get_docstring(cls)}\n\n"
        f"{table(('field', 'type', 'default', 'meaning'), rows)}\nHow they act together: [sampling](../sampling.md).\n"
    )


def fields_table() -> str:
    """What becomes of each field of a request that generates, on one page, from the schemas."""
    chat, text = ChatBody, CompletionBody
    names = sorted({name for body in (chat, text) for name in (*body.model_fields, *body.refused, *body.hints)})
    rows = ((f"`{name}`", fate(chat, name), fate(text, name), meaning(chat, text, name)) for name in names)
    return table(("field", "chat", "completions", "what follows"), rows)


def fate(body: type[ChatBody] | type[CompletionBody], name: str) -> str:
    """One of the three classes; empty for a name that the endpoint does not know."""
    if name in body.hints:
        return "hint"
    return "refused" if name in body.refused else "effect" if name in body.model_fields else ""


def meaning(chat: type[ChatBody], text: type[CompletionBody], name: str) -> str:
    """Where its effect is described, what to do instead, or why nothing follows."""
    sampling = {"vllm_xargs": "extra_args", "max_completion_tokens": "max_tokens"}.get(name, name)
    if sampling in SamplingParams.__struct_fields__ and name in text.model_fields | chat.model_fields:
        return f"`SamplingParams.{sampling}`"
    for body in (chat, text):
        if name in body.refused:
            return body.refused[name].instead
        if name in body.hints:
            return body.hints[name]
    return "[the request](http-api.md#request)"


def compat_page() -> str:
    """What becomes of each field of a request, from the schemas."""
    text = (
        f"# Compatibility\n\n{NOTE}Nothing is accepted and ignored. What a client or a command line asks for has its "
        "effect, is refused by name with\nwhat to do instead, or is of a third kind that cannot change an answer.\n\n"
    )
    text += compat_tables.counts_table(REQUEST_BODIES) + "\n## Fields of requests\n\n"
    for path, body in REQUEST_BODIES.items():
        works = sorted(name for name in body.model_fields if name not in body.hints)
        text += f"### {path}\n\nThese have an effect: {', '.join(f'`{name}`' for name in works)}.\n\n"
        text += "These are refused with status 400, unless their value asks for nothing:\n\n"
        rows = [
            (f"`{name}`", ", ".join(f"`{json.dumps(value)}`" for value in (None, *rule.neutral)), rule.instead)
            for name, rule in sorted(body.refused.items())
        ]
        text += table(("field", "asks for nothing", "instead"), rows)
        text += "\nThese are hints, which promise nothing:\n\n"
        text += table(
            ("field", "why nothing follows"), ((f"`{name}`", why) for name, why in sorted(body.hints.items()))
        )
        text += "\n"
    text += (
        f"A field that is in no table is accepted and named in the header `{IGNORED_FIELDS_HEADER}` of the answer.\n"
        "So are `reasoning_effort` and the entries of `chat_template_kwargs` (as `chat_template_kwargs.NAME`) that\n"
        "the model's chat template does not read.\n"
    )
    return text + compat_tables.flags_part() + compat_tables.environment_part()


def backends_page() -> str:
    """Attention backends, from what they say of themselves."""
    backends = KNOWN_ELSEWHERE | {name: ATTENTION.resolve(name).capability for name in ATTENTION}
    standard = [name for name in sorted(backends) if not backends[name].mla]
    latent = [name for name in sorted(backends) if backends[name].mla]
    return (
        f"# Attention backends\n\n{NOTE}{BACKENDS_INTRODUCTION.lstrip()}"
        f"\n## Order\n\n{backend_orders()}"
        f"\n## Attention with keys and values per head\n\n{backends_table(standard, backends)}"
        f"\n## Multi-head latent attention\n\n{backends_table(latent, backends)}{BACKENDS_LEGEND}"
    )


def backend_orders() -> str:
    """In which order backends are tried, per device."""
    rows = []
    for title, compute in (("Blackwell (10.x)", (10, 0)), ("Ampere, Ada, Hopper (8.x, 9.x)", (9, 0))):
        for kind, mla in (("standard", False), ("MLA", True)):
            rows.append((title, kind, ", ".join(f"`{name}`" for name in cuda_order(compute, mla))))
    rows.append(("CPU", "standard", "`CPU_ATTN`, `TORCH_CPU`"))
    return table(("device", "attention", "tried in this order"), rows)


def backends_table(names: Iterable[str], backends: Mapping[str, Capability]) -> str:
    """What backends can do, a row each."""
    return table(BACKEND_COLUMNS, (tuple(backend_cells(name, backends[name])) for name in names))


def backend_cells(name: str, able: Capability) -> Iterator[str]:
    """The row of one of them."""
    yield f"`{name}`"
    yield yes_or_no(name in ATTENTION)
    yield ", ".join(SHORT_DTYPES[name] for name in ("float16", "bfloat16", "float32") if name in able.dtypes)
    yield ", ".join(sorted(able.kv_dtypes - {"float16", "float32"}))
    yield sizes_of_blocks(able)
    yield "any" if able.head_sizes is None else ", ".join(str(size) for size in able.head_sizes)
    for value in (able.sliding_window, able.chunked_local, able.soft_cap, able.sinks, able.alibi, able.sparse):
        yield yes_or_no(value)
    yield yes_or_no(able.mm_prefix)
    yield yes_or_no(able.decode_context_parallel)
    yield "all" if able.attention_types == ALL_TYPES else ", ".join(sorted(able.attention_types))
    yield capabilities(able)


def sizes_of_blocks(able: Capability) -> str:
    """Of the KV cache that a backend takes."""
    if able.block_sizes is None:
        return "any"
    if isinstance(able.block_sizes, MultipleOf):
        return f"%{able.block_sizes.number}"
    return ", ".join(str(size) for size in able.block_sizes)


def capabilities(able: Capability) -> str:
    """Of GPUs that a backend runs on."""
    if "cuda" not in able.devices:
        return "n/a"
    if able.compute is None:
        return "any"
    (low, low_minor), (high, _) = able.compute
    if high >= 99:
        return f"{low}.{low_minor} and up"
    return f"{low}.x" if low == high else f"{low}.x to {high}.x"


def yes_or_no(value: bool) -> str:
    """For a cell."""
    return "yes" if value else "no"


def between(text: str, begin: str, end: str, content: str) -> str:
    """A page with what stands between two markers brought up to date."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"a page has lost the markers {begin.strip()} and {end.strip()}")
    return before + begin + content + end + after


def tree() -> str:
    """The package as a tree, in the order of the import contracts: what is above may import what is below."""
    order = layer_order()
    lines = ["pagemill/"]
    for entry, branch in branches(children(PACKAGE, order["pagemill"])):
        lines.append(tree_line(entry, branch))
        if entry.name in OPENED:
            inner = children(entry, order.get(f"pagemill.{entry.name}", {}))
            rail = "│   " if branch == "├── " else "    "
            lines += [tree_line(child, rail + twig) for child, twig in branches(inner)]
    return "\n".join(lines) + "\n"


def branches(entries: list[Path]) -> Iterator[tuple[Path, str]]:
    """Each entry with the line that leads to it."""
    for place, entry in enumerate(entries, start=1):
        yield entry, "└── " if place == len(entries) else "├── "


def tree_line(path: Path, lead: str) -> str:
    """`│   ├── scheduler/    first sentence of its docstring`."""
    name = lead + path.name + ("/" if path.is_dir() else "")
    return f"{name:<30}{first_sentence(path / '__init__.py' if path.is_dir() else path)}"


def first_sentence(module: Path) -> str:
    """First sentence of a module's docstring, without the dot."""
    doc = ast.get_docstring(ast.parse(module.read_text())) or ""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?:\s|$)", paragraph, maxsplit=1)[0]


def children(folder: Path, order: dict[str, int]) -> list[Path]:
    """Modules and packages directly inside a folder, in layer order, then by name."""
    found = [path for path in folder.iterdir() if is_listed(path)]
    return sorted(found, key=lambda path: (order.get(path.stem, len(order)), path.name))


def is_listed(path: Path) -> bool:
    """Packages and modules; not the `__init__` of the folder itself."""
    if path.is_dir():
        return (path / "__init__.py").exists()
    return path.suffix == ".py" and path.name != "__init__.py"


def layer_order() -> dict[str, dict[str, int]]:
    """Container -> layer member -> place from the top, from the import contracts."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    order: dict[str, dict[str, int]] = {}
    for name in contracts.sections():
        section = contracts[name]
        if section.get("type") == "layers":
            members = re.findall(r"\w+", section["layers"])
            order[section["containers"].strip()] = {member: place for place, member in enumerate(members)}
    return order


if __name__ == "__main__":
    sys.exit(main())
