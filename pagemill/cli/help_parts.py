"""`--help=PART`: one group of flags, or one flag, instead of every flag that a command has.

`--help=listgroup` names the groups, `--help=all` is everything. Knows argparse; knows nothing about what flags mean.
"""

import argparse
from collections.abc import Sequence

from pagemill.cli.errors import UsageError

PREFIX = "--help="


def asked_part(words: Sequence[str]) -> str | None:
    """The part that a command line asks for; None when it asks for none."""
    before = words[: words.index("--")] if "--" in words else words
    return next((word.removeprefix(PREFIX) for word in before if word.startswith(PREFIX)), None)


def help_on(parser: argparse.ArgumentParser, part: str) -> str:
    """The text for a group by its title, for flags whose name has `part` in it, or for everything. Raises UsageError
    for a part that is none."""
    groups = [group for group in parser._action_groups if group._group_actions]
    titles = {str(group.title).lower(): group for group in groups}
    wanted = part.lower().replace("_", "-").removeprefix("--")
    if wanted == "all":
        return parser.format_help()
    if wanted == "listgroup":
        return "".join(f"{group.title}: {len(group._group_actions)} flags\n" for group in groups)
    if wanted in titles:
        return _formatted(parser, titles[wanted].title, titles[wanted].description, titles[wanted]._group_actions)
    found = [action for group in groups for action in group._group_actions if _has_name(action, wanted)]
    if not wanted or not found:
        known = ", ".join(str(group.title) for group in groups)
        raise UsageError(f"--help={part}: no group and no flag has that name; groups: {known}, listgroup, all")
    return _formatted(parser, None, None, found)


def _has_name(action: argparse.Action, part: str) -> bool:
    return action.help != argparse.SUPPRESS and any(part in name.lstrip("-") for name in action.option_strings)


def _formatted(
    parser: argparse.ArgumentParser, title: str | None, description: str | None, actions: Sequence[argparse.Action]
) -> str:
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.start_section(title)
    formatter.add_text(description)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()
