"""What forms force, and what is left to the model: `python benchmarks/forced_bytes.py [--every N]`.

Follows valid instances of the conformance corpus as jump-forward would: forced tokens first, then the one that the
tokenizer writes. Prints how many tokens were forced, at how many others there were bytes that must come, and which:
the last token of a stretch depends on what follows it. Counts, so any machine will do; needs no model's weights.
"""

import argparse
import json
import lzma
from collections import Counter
from collections.abc import Callable
from typing import Any

from peers.contestants import FOLDER
from structured import CORPUS

from pagemill.errors import RequestError
from pagemill.grammar.backends.guidance import GuidanceBackend, GuidanceMatcher
from pagemill.grammar.translate import translated
from pagemill.grammar.vocabulary import token_table
from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.tokenizers.load import load_tokenizer

LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
    "compact": (
        {"disable_any_whitespace": True},
        lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False),
    ),
    "indent of 2": ({}, lambda value: json.dumps(value, indent=2, ensure_ascii=False)),
}
NUM_INSTANCES = 2
"""Of a schema."""


class Follower:
    """Counts over instances."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer(FOLDER)
        self._table = token_table(self._tokenizer, self._tokenizer.vocab_size, self._tokenizer.eos_token_ids)
        self._backend = GuidanceBackend(self._table, self._tokenizer)
        self.num_forced = self.num_sampled = self.num_instances = 0
        self.left: Counter[bytes] = Counter()
        """Bytes that must come where a token is sampled."""

    def schema(self, schema: Any, form: dict[str, Any], texts: list[str]) -> None:
        """Follow instances of a schema, if it is supported."""
        try:
            matcher = self._backend.matcher(translated(StructuredOutputsParams(json=schema, **form)))
        except (RequestError, ValueError):
            return
        for text in texts:
            self._follow(matcher.copy(), text.encode())

    def _follow(self, matcher: GuidanceMatcher, text: bytes) -> None:
        self.num_instances += 1
        at = 0
        while at < len(text):
            bytes_of = matcher._matcher.compute_ff_bytes()
            forced = matcher.forced()
            forced = forced[: matcher.count_allowed(forced)]
            written = b"".join(self._table.tokens[token] for token in forced)
            if not text.startswith(written, at) or matcher.accept(forced) != len(forced):
                return  # the instance spells something in another way
            at += len(written)
            self.num_forced += len(forced)
            if at >= len(text):
                return
            [token, *_] = self._tokenizer.encode(text[at:].decode(errors="ignore"), add_special_tokens=False)
            self.num_sampled += 1
            if bytes_of[len(written) :]:
                self.left[bytes_of[len(written) :]] += 1
            if matcher.accept([token]) != 1:
                return
            at += len(self._table.tokens[token])


def main() -> None:
    """Prints a line for each layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=3, help="one schema in so many")
    arguments = parser.parse_args()
    with lzma.open(CORPUS, "rt") as lines:
        entries = [json.loads(line) for line in lines][:: arguments.every]
    for layout, (form, written) in LAYOUTS.items():
        follower = Follower()
        for entry in entries:
            valid = [test["data"] for test in entry["tests"] if test["valid"]][:NUM_INSTANCES]
            follower.schema(entry["schema"], form, [written(value) for value in valid])
        left = ", ".join(f"{text.decode(errors='replace')!r} {count}" for text, count in follower.left.most_common(8))
        print(
            f"{layout}: {follower.num_instances} instances, {follower.num_forced} tokens forced, "
            f"{follower.num_sampled} sampled, {follower.left.total()} where bytes must come: {left}"
        )


if __name__ == "__main__":
    main()
