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
from collections.abc import Iterable, Iterator
from pathlib import Path

from pagemill import envs
from pagemill.config.arguments import ENGINE_SECTIONS, section_title
from pagemill.config.no_effect import IDLE, CompatConfig
from pagemill.config.refused_settings import REFUSED_SETTINGS
from pagemill.config.sections import FleetConfig, ServerConfig
from pagemill.model.attention import support_table
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.completions import CompletionBody
from pagemill.serve.http.schemas.embeddings import EmbeddingBody
from pagemill.serve.http.schemas.support import IGNORED_FIELDS_HEADER

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pagemill"
REQUEST_BODIES: dict[str, type[ChatBody] | type[CompletionBody] | type[EmbeddingBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
}
OPENED = ("fleet", "serve", "engine", "worker", "model")
"""Packages whose own modules and folders are drawn; of the others only the folder."""
TREE_BEGIN, TREE_END = "<!-- tree: written by `make docs` -->\n```\n", "```\n<!-- end of tree -->"
NOTE = "<!-- written by `make docs`; edit the code instead -->\n\n"


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
    architecture = ROOT / "ARCHITECTURE.md"
    return {
        reference / "flags.md": flags_page(),
        reference / "attention-backends.md": support_table.page(NOTE),
        reference / "environment.md": environment_page(),
        reference / "sampling-params.md": sampling_page(),
        ROOT / "docs" / "compat.md": compat_page(),
        architecture: with_tree(architecture.read_text()),
    }


def flags_page() -> str:
    """One table per section of the configuration."""
    text = (
        f"# Flags\n\n{NOTE}Every field of the configuration is a flag of `pagemill serve` and a keyword of\n"
        "`EngineArgs` and `LLM` (except those of the HTTP server and of its processes, which are flags only).\n"
        "Booleans have a `--no-` form too. Settings without a default are filled in from the model and the machine;\n"
        "start-up prints those that matter, and why. Which settings cannot matter, and what became of flags of\n"
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
        variable, _, meaning = (inspect.getdoc(function) or "").partition(": ")
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


def compat_page() -> str:
    """What becomes of each field of a request, from the schemas."""
    text = (
        f"# Compatibility\n\n{NOTE}Nothing is accepted and ignored. What a client or a command line asks for has its "
        "effect, is refused by name with\nwhat to do instead, or is of a third kind that cannot change an answer.\n\n"
        "## Fields of requests\n\n"
    )
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
    return text + compat_flags()


def compat_flags() -> str:
    """What becomes of each flag that has no effect, or not everywhere."""
    grouped: dict[str, list[str]] = {}
    for name, instead in REFUSED_SETTINGS.items():
        grouped.setdefault(instead, []).append(f"`--{name.replace('_', '-')}`")
    idle = [(f"`--{name.replace('_', '-')}`", item.where, item.why) for item in IDLE for name in item.names]
    always = [
        (f"`--{field.name.replace('_', '-')}`", ", ".join(field.metadata["choices"]), field.metadata["help"])
        for field in dataclasses.fields(CompatConfig)
    ]
    return (
        "\n## Flags\n\nFlags are keywords of `LLM` and `EngineArgs` too. [Those that have an "
        "effect](reference/flags.md) are tested one by one.\n\nThese cannot matter in some places; start-up "
        "says so when they are given there:\n\n"
        + table(("flag", "where", "why it cannot matter"), idle)
        + f"\n{inspect.getdoc(CompatConfig)} Start-up says so too:\n\n"
        + table(("flag", "values", "why it cannot matter"), always)
        + "\nThese are refused, with what to do instead:\n\n"
        + table(("instead", "flags"), ((instead, ", ".join(names)) for instead, names in grouped.items()))
        + "\nAny other flag is an error.\n"
    )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def with_tree(text: str) -> str:
    """ARCHITECTURE.md with the tree between its markers brought up to date."""
    before, begin, rest = text.partition(TREE_BEGIN)
    _, end, after = rest.partition(TREE_END)
    if not begin or not end:
        raise SystemExit("ARCHITECTURE.md has lost the markers around its tree")
    return before + TREE_BEGIN + tree() + TREE_END + after


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
