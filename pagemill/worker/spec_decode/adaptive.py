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
FloatArray = npt.NDArray[np.float64]

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


class AdaptiveCounts:
    """Of S slots and at most K drafts each. All ranks of a replica decide the same if they are told the same times."""

    def __init__(self, states: RequestStates, max_drafts: int, costs: StepCosts | None = None) -> None:
        num_slots = len(states.num_tokens)
        self.costs = StepCosts() if costs is None else costs
        self._states = states
        self._max_drafts = max_drafts
        self._places = np.arange(max_drafts)
        self._shared: FloatArray = np.full(max_drafts, FIRST_RATE)
        """[K] how often the draft at a place is right where those before it are, in all slots."""
        self._rates: FloatArray = np.full((num_slots, max_drafts), FIRST_RATE)
        """[S, K] the same, by slot."""
        self._rests = np.zeros(num_slots, bool)
        """[S] whether a slot has no drafts because they are not worth it."""
        self._guesses = np.zeros((num_slots, max_drafts), np.int32)
        """[S, K] what was guessed and is not verified."""
        self._num_guessed = np.zeros(num_slots, np.int32)
        self._judged_at = np.zeros(num_slots, np.int32)
        """[S] tokens of the slot with which its guess is judged; 0: it has none."""
        self._num_drafted_steps = 0
        self._num_idle_steps = 0
        self._num_judged = 0
        self._share_right = FIRST_RATE
        self._said_collapse = False

    def begin(self, slot: int) -> None:
        """A slot has another request."""
        self._rates[slot] = self._shared
        self._num_idle_steps = 0
        self._rests[slot] = False
        self._judged_at[slot] = 0

    def replace(self, slot: int) -> None:
        """Tokens of a slot are others now: what was guessed of it is void."""
        self._judged_at[slot] = 0

    def verified(self, slots: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """[L] drafts that slots verified, some of which may be none, and how many of them were right."""
        had = num_drafts > 0
        self._learn(slots[had], num_drafts[had], num_accepted[had])

    def pauses(self) -> bool:
        """Whether nobody is to be asked for a guess after this step, nor told of what was sampled: steps had no drafts
        for long, and asking takes time. To be called for each step."""
        self._num_idle_steps += 1
        return self._num_idle_steps > IDLE_STEPS and self._num_idle_steps % PATIENCE > 0

    def due(self, slots: Int32Array) -> BoolArray:
        """[L] which slots should be asked for a guess, now that they have sampled. Their former guesses are judged."""
        known = self._states.num_tokens[slots]
        judged_at = self._judged_at[slots]
        waits = (judged_at > known) & self._rests[slots]
        judged = slots[(judged_at > 0) & (judged_at <= known)]
        if len(judged):
            self._judge(judged)
        return ~waits

    def choose(self, slots: Int32Array, guesses: list[Int32Array]) -> Int32Array:
        """[L] how many of the first tokens of their guess slots verify in the next step, in which all of them run.

        Drafts are ranked by how likely they are accepted, and as many of them are taken as make the expected number
        of tokens, over the expected time of the step, largest.
        """
        most = np.array([len(ids) for ids in guesses], np.int32)
        counts = np.zeros(len(slots), np.int32)
        if most.any():
            counts = self._best(slots, most)
            self._num_drafted_steps += 1
            if not counts.any():
                self._num_drafted_steps = 0
                self._put_off(slots, guesses, most, counts)
                return counts
            self._num_idle_steps = 0
            if self._num_drafted_steps > PLAIN_EVERY:
                self._num_drafted_steps = 0
                counts[:] = 0
                return counts
        else:
            self._num_drafted_steps = 0
        if self._rests[slots].any() or (most > counts).any():
            self._put_off(slots, guesses, most, counts)
        return counts

    def _best(self, slots: Int32Array, most: Int32Array) -> Int32Array:
        num_rows = len(slots)
        likely = np.cumprod(self._rates[slots], axis=1)
        rows, places = np.nonzero(self._places < most[:, None])
        chances = likely[rows, places]
        order = np.argsort(-chances, kind="stable")
        tokens = num_rows + np.append(0.0, np.cumsum(chances[order]))
        speeds = tokens / self.costs.seconds(num_rows + np.arange(len(tokens)))
        best = int(speeds.argmax())
        if speeds[best] < speeds[0] * LEAST_GAIN:
            best = 0
        found: Int32Array = np.bincount(rows[order[:best]], minlength=num_rows).astype(np.int32)
        return found

    def _put_off(self, slots: Int32Array, guesses: list[Int32Array], most: Int32Array, counts: Int32Array) -> None:
        """Slots that verify nothing though they have a guess rest, and those that rested and verify none go on; a
        guess of theirs is kept until its tokens are known."""
        known = self._states.num_tokens[slots]
        for row, slot in enumerate(slots.tolist()):
            if counts[row]:
                self._rests[slot] = False
                self._judged_at[slot] = 0
            elif most[row]:
                self._rests[slot] = True
                if self._judged_at[slot] <= known[row]:
                    self._guesses[slot, : most[row]] = guesses[row]
                    self._num_guessed[slot] = most[row]
                    self._judged_at[slot] = known[row] + most[row]
            elif self._rests[slot] and self._judged_at[slot] <= known[row]:
                self._num_guessed[slot] = 0
                self._judged_at[slot] = known[row] + PATIENCE

    def _judge(self, slots: Int32Array) -> None:
        """Compare guesses with the tokens that came, all of which are known."""
        num_guessed = self._num_guessed[slots]
        starts = self._judged_at[slots] - num_guessed
        self._judged_at[slots] = 0
        asked = num_guessed > 0
        slots, num_guessed, starts = slots[asked], num_guessed[asked], starts[asked]
        if not len(slots):
            return
        token_ids = self._states.token_ids
        positions = np.minimum(starts[:, None] + self._places, token_ids.shape[1] - 1)
        right = token_ids[slots[:, None], positions] == self._guesses[slots]
        right &= self._places < num_guessed[:, None]
        num_right = np.minimum.accumulate(right, axis=1).sum(axis=1)
        self._learn(slots, num_guessed, num_right.astype(np.int32))

    def _learn(self, slots: Int32Array, num_drafts: Int32Array, num_right: Int32Array) -> None:
        """[L] of `num_drafts` > 0 guesses of a slot, the first `num_right` were right."""
        if not len(slots):
            return
        places = self._places
        right = places < num_right[:, None]
        reached = (places < num_drafts[:, None]) & (places <= num_right[:, None])
        rates = self._rates[slots]
        learnt = np.where(reached, rates + RATE * (right - rates), rates)
        # A place that nobody tries is taken, in time, for as good as the one before it.
        untried = (places >= num_drafts[:, None]) & (num_right == num_drafts)[:, None] & (places > 0)
        before = np.concatenate((learnt[:, :1], learnt[:, :-1]), axis=1)
        self._rates[slots] = np.where(untried, learnt + RATE / 4 * (before - learnt), learnt)
        counts = reached.sum(axis=0)
        means = (reached & right).sum(axis=0) / np.maximum(counts, 1)
        self._shared += (1 - (1 - SHARED_RATE) ** counts) * (means - self._shared)
        self._note_share(int(num_drafts.sum()), int(num_right.sum()))

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
