import io

import pytest
from rich.console import Console

from pagemill.cli.rich_view import MarkdownStream, RichView, split_finished

TEXT = "# Title\n\nSome **bold** text.\n\n1. one\n\n   more of one\n\n2. two\n\n```py\nx = 1\n\ny = 2\n```\n\nThe end."


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one line", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\ntwo\n\nthree", "one\n\ntwo\n\n"),
        ("- item\n\n  still the item", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("~~~\n```\n\nx", ""),
    ],
)
def test_only_what_cannot_change_is_finished(text: str, finished: str):
    assert split_finished(text) == (finished, text[len(finished) :])


def shown(pieces: list[str]) -> str:
    """What remains on a terminal after the pieces, without styles and cursor movements."""
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=20, record=True)
    stream = MarkdownStream(console)
    for piece in pieces:
        stream.write(piece)
    stream._live.update("", refresh=True)
    stream.finish()
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def test_a_stream_shows_what_the_whole_would():
    whole = shown([TEXT])
    assert "bold" in whole and "**" not in whole and "x = 1" in whole and "```" not in whole
    for size in (1, 5, 30):
        streamed = shown([TEXT[start : start + size] for start in range(0, len(TEXT), size)])
        for line in filter(None, whole.splitlines()):
            assert line in streamed


def test_markup_of_the_model_is_not_ours():
    out = io.StringIO()
    view = RichView(out)
    with view.answer() as write:
        write("[red]not red[/red] \x1b[2Jx")
    view.note("[bold]plain[/bold]")
    assert "[red]not red[/red] [2Jx" in out.getvalue()
    assert "[bold]plain[/bold]" in out.getvalue()
