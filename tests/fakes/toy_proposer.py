"""`Toy`: a proposer that knows what follows, and is wrong now and then."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pagemill.catalog.proposers import PROPOSERS
from pagemill.messages.step import Int32Array
from pagemill.worker.spec_decode.interface import Proposer, ProposerContext

TEXTS: list[list[int]] = []
"""Prompts and what follows them, as the toy knows them."""


class Toy(Proposer):
    """Proposes what will follow, up to a wrong token at every seventh position; more than it may, in the end."""

    def __init__(self, context: ProposerContext) -> None:
        self.states = context.states

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        return [self.after(self.states.token_ids[slot, : self.states.num_tokens[slot]]) for slot in slots.tolist()]

    def after(self, tokens: Int32Array) -> Int32Array:
        count = len(tokens)
        [text] = [text for text in TEXTS if text[:count] == tokens.tolist()][:1] or [[]]
        found = np.array(text[count : count + 1 + count % 6] + [1] * (count % 3), np.int32)
        wrong: npt.NDArray[np.bool_] = (count + np.arange(len(found))) % 7 == 6
        proposed: Int32Array = np.where(wrong, np.where(found == 2, 1, 2), found).astype(np.int32)
        return proposed


class Wrong(Toy):
    """Is wrong from the first token on: proposes tokens that do not follow."""

    def after(self, tokens: Int32Array) -> Int32Array:
        proposed: Int32Array = (super().after(tokens) + 1) % 300
        return proposed


class Right(Toy):
    """Proposes all that follows."""

    def after(self, tokens: Int32Array) -> Int32Array:
        count = len(tokens)
        [text] = [text for text in TEXTS if text[:count] == tokens.tolist()][:1] or [[]]
        return np.array(text[count:], np.int32)


class Random(Toy):
    """Proposes anything, from nothing to more than it may."""

    def after(self, tokens: Int32Array) -> Int32Array:
        noise = np.random.default_rng([len(tokens), int(tokens[-1])])
        proposed: Int32Array = noise.integers(0, 300, int(noise.integers(0, 7))).astype(np.int32)
        return proposed


class Four(Toy):
    """Proposes four tokens, whatever came before."""

    def after(self, tokens: Int32Array) -> Int32Array:
        proposed: Int32Array = ((len(tokens) * 7 + np.arange(4)) % 290 + 5).astype(np.int32)
        return proposed


_NAMED = {"toy": Toy, "wrong": Wrong, "right": Right, "random": Random, "four": Four}


@contextlib.contextmanager
def toy_proposer() -> Iterator[None]:
    """While the body runs, they are known as "toy", "wrong", "right", "random" and "four"."""
    for name, cls in _NAMED.items():
        PROPOSERS.add(name, f"{__name__}:{cls.__name__}")
    try:
        yield
    finally:
        for name in _NAMED:
            PROPOSERS.remove(name)
        TEXTS.clear()
