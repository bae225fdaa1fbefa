"""`AdaptiveCounts`: how many of its drafts each slot verifies: those that make tokens come fastest, none where none do.

Two things are learnt while steps run: how often drafts of a slot are right, by their place, and what a step costs by
its number of tokens. Guesses that are not verified are compared with the tokens that come, which costs no step
anything: so a slot whose text cannot be guessed has no drafts, and has some again when it can. Knows no proposer.
"""

import numpy as np
import numpy.typing as npt

from pagemill.log import get_logger
from pagemill.messages.step import Int32Array
from pagemill.utils.step_costs import StepCosts
from pagemill.worker.batch.request_states import RequestStates

logger = get_logger(__name__)

BoolArray = npt.NDArray[np.bool_]

RATE = 0.2
"""What one guess weighs among those of its slot."""
SHARED_RATE = 0.02
"""What one guess weighs among those of all slots, with which a new request begins."""
FIRST_RATE = 0.6
"""How often a draft is right before anything is known; an optimist's guess, so that somebody finds out."""
LEAST_GAIN = 1.04
"""Tokens per time with drafts, over without, from which on they are worth it: less may be an error of what is known."""
PATIENCE = 4
"""Tokens until a slot that has no drafts is asked for a guess again, where it had none."""
IDLE_STEPS = 8
"""Steps in a row without drafts, after which nobody is asked in all but every PATIENCE-th step."""
PLAIN_EVERY = 64
"""Steps with drafts in a row after which one has none, so that what they cost can still be compared."""
COLLAPSED = 0.05
"""Share of drafts that are right, below which it is said once that they are of no use."""
FIRST_VERDICT = 500
"""Guesses that must have been judged before that."""
FEW_ROWS = 24
"""Of a step, for which lists are faster than arrays."""


class AdaptiveCounts:
    """Of S slots and at most K drafts each. All ranks of a replica decide the same if they are told the same times.

    What is known is in lists: there are few numbers, and a step of few requests takes little longer than to run some
    tens of functions on arrays, which have left the caches since the step before.
    """

    def __init__(self, states: RequestStates, max_drafts: int, costs: StepCosts | None = None) -> None:
        num_slots = len(states.num_tokens)
        self.costs = StepCosts() if costs is None else costs
        self._states = states
        self._shared = [FIRST_RATE] * max_drafts
        """[K] how often the draft at a place is right where those before it are, in all slots."""
        self._rates = [self._shared.copy() for _ in range(num_slots)]
        """[S][K] the same, by slot."""
        self._rests = [False] * num_slots
        """[S] whether a slot has no drafts because they are not worth it."""
        self._guesses: list[list[int]] = [[] for _ in range(num_slots)]
        """[S] what was guessed and is not verified."""
        self._judged_at = [0] * num_slots
        """[S] tokens of the slot with which its guess is judged; 0: it has none."""
        self._num_drafted_steps = 0
        self._num_idle_steps = 0
        self.paused = False
        """Whether nobody was asked after the last step."""
        self._num_judged = 0
        self._share_right = FIRST_RATE
        self._said_collapse = False

    def begin(self, slot: int) -> None:
        """A slot has another request."""
        self._rates[slot] = self._shared.copy()
        self._num_idle_steps = 0
        self._rests[slot] = False
        self._judged_at[slot] = 0

    def replace(self, slot: int) -> None:
        """Tokens of a slot are others now: what was guessed of it is void."""
        self._judged_at[slot] = 0

    def verified(self, slots: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """[L] drafts that slots verified, some of which may be none, and how many of them were right."""
        for slot, count, right in zip(slots.tolist(), num_drafts.tolist(), num_accepted.tolist(), strict=True):
            if count > 0:
                self._learn(slot, count, right)

    def pauses(self) -> bool:
        """Whether nobody is to be asked for a guess after this step, nor told of what was sampled: steps had no drafts
        for long, and asking takes time. To be called for each step."""
        self._num_idle_steps += 1
        self.paused = self._num_idle_steps > IDLE_STEPS and self._num_idle_steps % PATIENCE > 0
        return self.paused

    def asks_all(self, slots: Int32Array) -> bool:
        """Whether all of these slots had drafts worth their time when they were asked last."""
        return self._num_idle_steps == 0 and not any(self._rests[slot] for slot in slots.tolist())

    def keeps_all(self, slots: Int32Array, most: Int32Array) -> bool:
        """Whether `choose` would find that slots which have had drafts should verify as many as they may have, whatever
        these are."""
        counts = most.tolist()
        return self.asks_all(slots) and self._best(slots.tolist(), counts) == counts

    def due(self, slots: Int32Array) -> BoolArray:
        """[L] which slots should be asked for a guess, now that they have sampled. Their former guesses are judged."""
        found = []
        for slot, known in zip(slots.tolist(), self._states.num_tokens[slots].tolist(), strict=True):
            judged_at = self._judged_at[slot]
            found.append(judged_at <= known or not self._rests[slot])
            if 0 < judged_at <= known:
                self._judge(slot)
        return np.array(found, np.bool_)

    def choose(self, slots: Int32Array, guesses: list[Int32Array]) -> Int32Array:
        """[L] how many of the first tokens of their guess slots verify in the next step, in which all of them run.

        Drafts are ranked by how likely they are accepted, and as many of them are taken as make the expected number
        of tokens, over the expected time of the step, largest.
        """
        rows = slots.tolist()
        most = [len(ids) for ids in guesses]
        counts = [0] * len(rows)
        if any(most):
            counts = self._best(rows, most)
            self._num_drafted_steps += 1
            if not any(counts):
                self._num_drafted_steps = 0
                self._put_off(rows, guesses, most, counts)
                return np.array(counts, np.int32)
            self._num_idle_steps = 0
            if self._num_drafted_steps > PLAIN_EVERY:
                self._num_drafted_steps = 0
                return np.zeros(len(rows), np.int32)
        else:
            self._num_drafted_steps = 0
        if counts != most or any(self._rests[slot] for slot in rows):
            self._put_off(rows, guesses, most, counts)
        return np.array(counts, np.int32)

    def _best(self, slots: list[int], most: list[int]) -> list[int]:
        if len(slots) > FEW_ROWS:
            return self._best_of_many(slots, most)
        drafts = []
        for row, slot in enumerate(slots):
            chance = 1.0
            for rate in self._rates[slot][: most[row]]:
                chance *= rate
                drafts.append((-chance, row))
        drafts.sort()
        seconds = self.costs.seconds(len(slots), len(slots) + len(drafts))
        tokens = float(len(slots))
        fastest = LEAST_GAIN * tokens / seconds[0]
        best = 0
        for count, (chance, _) in enumerate(drafts, 1):
            tokens -= chance
            if tokens > fastest * seconds[count]:
                fastest = tokens / seconds[count]
                best = count
        counts = [0] * len(slots)
        for _, row in drafts[:best]:
            counts[row] += 1
        return counts

    def _best_of_many(self, slots: list[int], most: list[int]) -> list[int]:
        """The same by arrays."""
        rates = np.array([self._rates[slot] for slot in slots])
        there = np.arange(rates.shape[1]) < np.array(most)[:, None]
        rows = np.nonzero(there)[0]
        chances = np.cumprod(rates, axis=1)[there]
        order = np.argsort(-chances, kind="stable")
        tokens = len(slots) + np.concatenate(([0.0], np.cumsum(chances[order])))
        speeds = tokens / self.costs.array(len(slots), len(slots) + len(rows))
        speeds[0] *= LEAST_GAIN
        best = int(speeds.argmax())
        counts: list[int] = np.bincount(rows[order[:best]], minlength=len(slots)).tolist()
        return counts

    def _put_off(self, slots: list[int], guesses: list[Int32Array], most: list[int], counts: list[int]) -> None:
        """Slots that verify nothing though they have a guess rest, and those that rested and verify none go on; a
        guess of theirs is kept until its tokens are known."""
        known = self._states.num_tokens
        for row, slot in enumerate(slots):
            if counts[row]:
                self._rests[slot] = False
                self._judged_at[slot] = 0
            elif most[row]:
                self._rests[slot] = True
                if self._judged_at[slot] <= known[slot]:
                    self._guesses[slot] = guesses[row].tolist()
                    self._judged_at[slot] = int(known[slot]) + most[row]
            elif self._rests[slot] and self._judged_at[slot] <= known[slot]:
                self._guesses[slot] = []
                self._judged_at[slot] = int(known[slot]) + PATIENCE

    def _judge(self, slot: int) -> None:
        """Compare a guess with the tokens that came, all of which are known."""
        guess = self._guesses[slot]
        end = self._judged_at[slot]
        self._judged_at[slot] = 0
        if not guess:
            return
        came = self._states.token_ids[slot, end - len(guess) : end].tolist()
        right = 0
        while right < len(guess) and came[right] == guess[right]:
            right += 1
        self._learn(slot, len(guess), right)

    def _learn(self, slot: int, num_drafts: int, num_right: int) -> None:
        """Of `num_drafts` > 0 guesses of a slot, the first `num_right` were right."""
        rates, shared = self._rates[slot], self._shared
        if num_right == num_drafts:
            # A place that nobody tries is taken, in time, for as good as the one before it.
            for place in range(len(rates) - 1, num_drafts, -1):
                rates[place] += RATE / 4 * (rates[place - 1] - rates[place])
        for place in range(min(num_right + 1, num_drafts)):
            right = float(place < num_right)
            rates[place] += RATE * (right - rates[place])
            shared[place] += SHARED_RATE * (right - shared[place])
        if num_right == num_drafts < len(rates):
            rates[num_drafts] += RATE / 4 * (rates[num_drafts - 1] - rates[num_drafts])
        self._note_share(num_drafts, num_right)

    def _note_share(self, num_drafts: int, num_right: int) -> None:
        self._num_judged += num_drafts
        kept = (1 - SHARED_RATE / 4) ** num_drafts
        self._share_right = kept * self._share_right + (1 - kept) * num_right / num_drafts
        if not self._said_collapse and self._num_judged >= FIRST_VERDICT and self._share_right < COLLAPSED:
            self._said_collapse = True
            logger.info(
                "only %.1f%% of the last drafts are what the model samples: requests have none until guesses come true "
                "again (docs/speculation.md)",
                100 * self._share_right,
            )
