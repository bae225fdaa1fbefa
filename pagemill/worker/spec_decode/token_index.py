"""`NgramIndex` and `TokenTrie`: where tokens were seen before, in the compiled kernels; `index_reference` is the same
in Python, for machines that cannot compile them.

Both read texts that lie elsewhere and stay where they are, and grow with them at a cost per token that does not depend
on their length. Both know tokens, neither slots nor requests.
"""

import ctypes
import secrets
from collections.abc import Sequence

import numpy as np

from pagemill.messages.step import Int32Array
from pagemill.model.kernels.mirrors import NgramsStruct, TrieStruct
from pagemill.model.kernels.native import library, loaded_library
from pagemill.worker.spec_decode.index_reference import MAX_DRAFT, PythonNgramIndex, PythonTokenTrie

_FEWEST = 256
"""Tokens, or nodes, for which there is room at first."""
_NODE_FIELDS = 6
"""int32 numbers of `PmTrieNode` in token_index.h."""


class NgramIndex:
    """The n-grams of one text, with `shortest` to `longest` tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._library = loaded_library()
        self._struct = NgramsStruct(shortest=shortest, longest=longest, seed=secrets.randbits(63))
        self.address = ctypes.addressof(self._struct)
        """Of what compiled code knows it by."""
        self._num_lengths = longest - shortest + 1
        self._room = 0
        self._count = 0
        self._text: Int32Array | None = None
        self._ends: Int32Array | None = None

    @property
    def num_tokens(self) -> int:
        """Of the text, that are in."""
        return self._count

    def restart(self, text: Int32Array) -> None:
        """Another text, of which nothing is known yet; its array must outlive the next restart."""
        self._text = text
        self._struct.text = text.ctypes.data
        self._room = 0
        self._count = 0

    def extend(self, count: int) -> None:
        """The text has `count` tokens, and has those that it had."""
        self._library.ngrams_extend(self.address, self.advance(count), count)

    def find(self, copied: int = 0) -> int:
        """Where the tokens go on that followed the longest of the last tokens when they were seen last; 0: never.

        `copied`, less than the tokens there are: where the text goes on if it still copies what it copied before; 0: it
        did not. That counts where more of the tokens before it are the last ones; and where these were never seen
        together, a place near it that follows the same token, or itself, where few of the tokens before it differ.
        """
        return self._library.ngrams_find(self.address, self._count, copied)

    def advance(self, count: int) -> int:
        """The text is to have `count` tokens; from which one on the caller must put them in."""
        begin = self._count
        if count > self._room:
            self._grow(count)
            begin = 0
        self._count = count
        return begin

    def _grow(self, count: int) -> None:
        bits = max(_FEWEST, 2 * count - 1).bit_length() + 1
        self._room = 1 << (bits - 1)
        self._ends = np.zeros((self._num_lengths, 1 << bits), np.int32)
        self._struct.ends = self._ends.ctypes.data
        self._struct.bits = bits


class TokenTrie:
    """The substrings of texts, with at most `max_depth` tokens and at most `max_nodes` of them that were seen twice or
    are the shortest that were seen once; how often each was seen."""

    def __init__(self, max_depth: int, max_nodes: int) -> None:
        self._library = loaded_library()
        self._max_depth = max_depth
        self._max_nodes = max_nodes
        self._struct = TrieStruct(max_depth=max_depth, seed=secrets.randbits(63))
        self._address = ctypes.addressof(self._struct)
        self._active = np.zeros(max_depth + 1, np.int32)
        self._struct.active = self._active.ctypes.data
        self._score = ctypes.c_double()
        self._out = np.zeros(MAX_DRAFT, np.int32)
        self._text: Int32Array | None = None
        self._nodes = np.zeros((0, _NODE_FIELDS), np.int32)
        self._slots = np.zeros(0, np.int32)

    @property
    def num_tokens(self) -> int:
        """Of the text, that are in."""
        return int(self._struct.num_tokens)

    def restart(self, text: Int32Array) -> None:
        """Another text, of which nothing is known yet; its array must outlive the next restart. It may hold several,
        each of which ends with -1."""
        self._text = text
        self._struct.text = text.ctypes.data
        self._struct.num_nodes = 0
        self._struct.num_active = 0
        self._struct.num_tokens = 0
        self._nodes = self._nodes[:0]
        self._resize(min(_FEWEST, self._max_nodes))

    def add_root(self) -> int:
        """For texts that know nothing of those of other roots. There must be room for a node."""
        if self._struct.num_nodes == len(self._nodes):
            self._resize(min(2 * len(self._nodes), self._max_nodes))
        root = int(self._struct.num_nodes)
        self._nodes[root] = (-1, -1, 0, -1, -1, 0)
        self._struct.num_nodes += 1
        return root

    @property
    def has_room(self) -> bool:
        """For a root."""
        return bool(self._struct.num_nodes < self._max_nodes)

    def extend(self, root: int, count: int) -> int:
        """The text has `count` tokens, and has those that it had. How many are in: less, where there is no room for
        more nodes."""
        while (reached := self._library.trie_extend(self._address, root, count)) < count:
            if len(self._nodes) >= self._max_nodes:
                return reached
            self._resize(min(2 * len(self._nodes), self._max_nodes))
        return count

    def propose(
        self, root: int, tokens: Int32Array, most: int, factor: float, least: float, own: bool
    ) -> tuple[Int32Array, float]:
        """What may follow the last of [N] contiguous tokens, and how many of these are expected to come true.

        Of all numbers of last tokens that were seen before, the one from which most is expected: at most `most` tokens,
        and `factor` for each that matches, each the most frequent one, for as long as it is at least as likely as
        `least` that all of them come true. `own`: the text ends with these tokens, which count for nothing.
        """
        score = ctypes.byref(self._score)
        count = self._library.trie_propose(
            self._address, root, tokens.ctypes.data, len(tokens), min(most, MAX_DRAFT), factor, least, own,
            self._out.ctypes.data, score,
        )  # fmt: skip
        return self._out[:count].copy(), self._score.value

    def counts(self) -> dict[tuple[int, ...], int]:
        """How often each substring was seen that has a node, behind its root: for tests."""
        found: dict[int, tuple[int, ...]] = {}
        for number, (parent, token, *_) in enumerate(self._nodes[: self._struct.num_nodes].tolist()):
            found[number] = (number,) if parent < 0 else (*found[parent], token)
        return {found[number]: int(node[2]) for number, node in enumerate(self._nodes[: len(found)]) if node[0] >= 0}

    def _resize(self, room: int) -> None:
        nodes = np.zeros((room, _NODE_FIELDS), np.int32)
        nodes[: len(self._nodes)] = self._nodes
        self._nodes = nodes
        bits = (2 * room - 1).bit_length()
        self._slots = np.zeros(1 << bits, np.int32)
        self._struct.nodes = nodes.ctypes.data
        self._struct.slots = self._slots.ctypes.data
        self._struct.bits = bits
        self._struct.max_nodes = room
        self._library.trie_rehash(self._address)


def ngram_index(shortest: int, longest: int) -> NgramIndex | PythonNgramIndex:
    """The compiled one where there is one."""
    return PythonNgramIndex(shortest, longest) if library() is None else NgramIndex(shortest, longest)


def follow_all(
    indexes: Sequence[NgramIndex | PythonNgramIndex], counts: Sequence[int], copied: Sequence[int]
) -> list[int]:
    """`extend` and `find` of each of [L] indexes; in one call where all are compiled."""
    compiled = [index for index in indexes if isinstance(index, NgramIndex)]
    if len(compiled) < len(indexes):
        for index, count in zip(indexes, counts, strict=True):
            index.extend(count)
        return [index.find(place) for index, place in zip(indexes, copied, strict=True)]
    begins = [index.advance(count) for index, count in zip(compiled, counts, strict=True)]
    addresses = np.array([index.address for index in compiled], np.int64)
    arrays = np.array((begins, counts, copied, begins), np.int32)
    places = [arrays.ctypes.data + row * arrays.strides[0] for row in range(len(arrays))]
    loaded_library().ngrams_follow(addresses.ctypes.data, len(compiled), *places)
    found: list[int] = arrays[-1].tolist()
    return found


def token_trie(max_depth: int, max_nodes: int) -> TokenTrie | PythonTokenTrie:
    """The compiled one where there is one."""
    return PythonTokenTrie(max_depth, max_nodes) if library() is None else TokenTrie(max_depth, max_nodes)
