"""`ToolChoice`: which tools an answer is to call, as requests say it. Does not know how models write calls."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pagemill.errors import RequestError
from pagemill.utils.text import shown

AUTO: Final = "auto"
NONE: Final = "none"
REQUIRED: Final = "required"


class ToolChoice(msgspec.Struct, frozen=True):
    """What may be called."""

    mode: str = AUTO
    """AUTO: the model chooses; NONE: nothing is called; REQUIRED: something is."""
    names: tuple[str, ...] | None = None
    """Only these functions; None: all."""
    one: bool = False
    """Whether one call is all that may be made."""

    @classmethod
    def of(cls, value: Any) -> "ToolChoice | None":
        """Of a field in OpenAI's form; None where nothing is said. Raises RequestError."""
        if value is None:
            return None
        if isinstance(value, str) and value in (AUTO, NONE, REQUIRED):
            return cls(value)
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind == "function":
            return cls(REQUIRED, (_name_of(value, "tool_choice"),), one=True)
        if kind == "allowed_tools":
            return cls._of_allowed(value)
        raise RequestError(
            f"tool_choice={shown(value)} is not allowed: 'auto', 'none', 'required', or an object of type function or "
            "allowed_tools",
            "tool_choice",
        )

    @classmethod
    def _of_allowed(cls, value: Mapping[str, Any]) -> "ToolChoice":
        inner = value.get("allowed_tools", value)
        inner = inner if isinstance(inner, Mapping) else {}
        mode = inner.get("mode", AUTO)
        tools = inner.get("tools")
        if mode not in (AUTO, REQUIRED) or not isinstance(tools, list) or not tools:
            raise RequestError(
                f"tool_choice={shown(value)} is not allowed: allowed_tools has a mode, 'auto' or 'required', and a "
                "list of tools that is not empty",
                "tool_choice",
            )
        names = tuple(_name_of(tool, f"tool_choice.tools.{index}") for index, tool in enumerate(tools))
        return cls(mode, tuple(dict.fromkeys(names)))

    def check(self, tools: list[dict[str, Any]]) -> None:
        """Raises RequestError where these tools do not have what is to be called."""
        if self.mode == REQUIRED and not tools:
            raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
        known = [tool["function"]["name"] for tool in tools]
        missing = [name for name in self.names or () if name not in known]
        if missing and (tools or self.mode == REQUIRED):
            raise RequestError(
                f"tool_choice names {shown(missing[0])}; the tools are {shown(', '.join(known))}", "tool_choice"
            )


def _name_of(tool: Any, field: str) -> str:
    """Of a function, in the form of chats or in that of responses."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f"{field}={shown(tool)} is not an object of type function with a name", "tool_choice")
    return name
