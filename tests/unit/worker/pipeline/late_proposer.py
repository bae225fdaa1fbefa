"""A proposer of somebody's own: prompt lookup, for slots of some length only."""

from collections.abc import Sequence

from pagemill.messages.step import Int32Array
from pagemill.worker.spec_decode.ngram import NgramProposer


class LateNgram(NgramProposer):
    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        found = super().propose(slots)
        known = self._states.num_tokens[slots].tolist()
        return [ids if count > 20 else ids[:0] for ids, count in zip(found, known, strict=True)]
