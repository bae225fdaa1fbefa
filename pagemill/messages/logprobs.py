"""`TokenLogprobs`: log-probabilities of tokens as arrays, a row per token. Knows neither requests nor text.

The collector does not look at these either (gc=False): arrays of numbers refer to nothing.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """N tokens at one position each, with C candidates for the same position. Values are log-probabilities, or logits
    where the engine was started with such a `logprobs_mode`."""

    token_ids: npt.NDArray[np.int32]
    """[N, 1 + C] the token itself, then the candidates: the most likely first, or as the request named them."""
    values: npt.NDArray[np.float32]
    """[N, 1 + C]."""
    ranks: npt.NDArray[np.int32]
    """[N] one more than the number of tokens that are more likely than the token itself."""

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.ranks)

    def rows(self, which: slice | npt.NDArray[np.int64], num_candidates: int | None = None) -> "TokenLogprobs":
        """Some of the tokens, with the first `num_candidates` candidates or all of them."""
        width = None if num_candidates is None else 1 + num_candidates
        return TokenLogprobs(self.token_ids[which, :width], self.values[which, :width], self.ranks[which])


def joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """The tokens of several, which have as many candidates as each other; there is one at least."""
    if len(parts) == 1:
        return parts[0]
    return TokenLogprobs(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )
