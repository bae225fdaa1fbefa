"""`GraphDump`: graphs of the compiler as readable text, one file each. Knows folders and names."""

import re
from pathlib import Path

from torch.fx import GraphModule


class GraphDump:
    """Files NAME.py in a folder, which is made; does nothing without one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, graph: GraphModule) -> None:
        """Write, or write over, the file of this name."""
        if self._folder is None:
            return
        file = re.sub(r"\W", "_", name) + ".py"
        (self._folder / file).write_text(graph.print_readable(print_output=False))
