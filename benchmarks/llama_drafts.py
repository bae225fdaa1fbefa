"""Drafts of llama.cpp, by its own programs: plain decoding, its lookup mode, and a draft model.

Each answer is a process, which says itself how long it decoded: neither loading nor the prompt is counted.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

WAYS = {
    "plain": ("llama-completion", "-no-cnv"),
    "lookup": ("llama-lookup", "--spec-draft-n-max", "{drafts}"),
    "draft": ("llama-speculative-simple", "--spec-type", "draft-simple", "-md", "{draft}", "--spec-draft-n-max", "4"),
}
"""Program and what it is told beside model, prompt and length. Of a draft model, four tokens: more gained less."""
_DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
_EVALUATED = re.compile(r" eval time =\s+([\d.]+) ms /\s+(\d+) runs")
_DRAFTED = re.compile(r"n_drafted\s*=\s*(\d+)")
_ACCEPTED = re.compile(r"n_accept\s*=\s*(\d+)")


class Decoded(NamedTuple):
    """What came of a prompt."""

    tokens_per_s: float
    acceptance: float | None
    """Share of drafts that were right; None: there were none."""


@dataclass(frozen=True)
class Llama:
    """Its programs in `folder`, a model as GGUF and, for the way `draft`, a smaller one."""

    folder: Path
    model: Path
    draft: Path | None
    threads: int

    @property
    def ways(self) -> list[str]:
        """Those that can be run."""
        return [way for way in WAYS if way != "draft" or self.draft is not None]

    def run(self, way: str, prompt: str, max_tokens: int, drafts: int) -> Decoded:
        """Greedy, to the length that is asked for. Raises RuntimeError with the last of what the program says."""
        program, *options = (part.format(drafts=drafts, draft=self.draft) for part in WAYS[way])
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(prompt)
            file.flush()
            asked = ["-m", str(self.model), "-f", file.name, "-n", str(max_tokens), "--temp", "0", "--ignore-eos"]
            asked += ["-c", "2048", "-t", str(self.threads)]
            done = subprocess.run(
                [str(self.folder / program), *asked, *options],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                env=os.environ | {"LD_LIBRARY_PATH": str(self.folder)},
                check=False,
            )
        said = done.stdout + done.stderr
        if way == "plain":
            found = [float(count) / (float(ms) / 1e3) for ms, count in _EVALUATED.findall(said)]
        else:
            found = [float(count) / float(seconds) for count, seconds in _DECODED.findall(said)]
        if not found:
            raise RuntimeError(f"{program} gave no speed (exit status {done.returncode}): {said[-500:]}")
        drafted, accepted = (sum(map(int, pattern.findall(said))) for pattern in (_DRAFTED, _ACCEPTED))
        return Decoded(found[-1], accepted / drafted if drafted else None)
