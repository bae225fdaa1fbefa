"""`Grammar`: what the output of one request must look like, as far as the scheduler cares. Knows no request."""

from collections.abc import Sequence
from typing import Protocol

from pagemill.messages.engine_io import Finish


class Grammar(Protocol):
    """Follows the output of one request. Tokens that it forces are known before the model has seen the one before
    them: nobody samples them, and several are computed in one step."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these tokens; forced ones are among them. Called for each token once, in order."""

    def forced_tokens(self) -> Sequence[int]:
        """The tokens that must come next, as far as there is no choice; none where there is one."""

    def hold(self, token_ids: Sequence[int]) -> bool:
        """These forced tokens are to be sampled, one after the other, from masks that leave nothing else; until they
        have come, nothing is forced. False where there are no masks for it: then nothing happens."""

    def is_complete_with(self, token_ids: Sequence[int]) -> bool:
        """Whether nothing may follow these forced tokens. The output does not go on."""

    def end(self) -> Finish | None:
        """Why the output ends here: it is complete, or cannot be followed any further. None: it goes on."""

    def count_allowed(self, draft_ids: Sequence[int], *, forces: bool) -> int:
        """How many of these drafts, from the first one on, the next step may verify. The others are not worth it, or
        would take the place of what the grammar forces, where this is appended (`forces`). Until the output goes on,
        the grammar has these drafts in mind."""
