"""Tools as requests describe them: checked. Does not know templates or how models write calls."""

from collections.abc import Mapping
from typing import Any

from pagemill.errors import RequestError
from pagemill.utils.text import shown

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """Functions that a model may call, in OpenAI's form; None is none. Raises RequestError."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"tools={shown(value)} is not allowed: a list of functions", "tools")
    if len(value) > MAX_TOOLS:
        raise RequestError(f"there are {len(value)} tools; at most {MAX_TOOLS} are allowed", "tools")
    return [_parse_tool(tool, f"tools.{index}") for index, tool in enumerate(value)]


def _parse_tool(tool: Any, field: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise RequestError(f"{field}={shown(tool)} is not an object of type 'function'", field)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{field}.function={shown(function)} is not an object with a name", f"{field}.function")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise RequestError(
            f"{field}.function.name={shown(name)} is not a text of 1 to {MAX_NAME_CHARS} characters",
            f"{field}.function.name",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(
            f"{field}.function.description={shown(description)} is not a text", f"{field}.function.description"
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(
            f"{field}.function.parameters={shown(parameters)} is not a JSON schema, which is an object",
            f"{field}.function.parameters",
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{field}.function.strict={shown(strict)} is not true or false", f"{field}.function.strict")
    return dict(tool)
