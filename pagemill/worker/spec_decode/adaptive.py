"""`AdaptiveCounts`: how many of its drafts each slot verifies: those that make tokens come fastest, none where none do.

Two things are learnt while steps run: how often drafts of a slot are right, by their place, and what a step costs by
its number of tokens. Guesses that are not verified are compared with the tokens that come, which costs no step
anything: so a slot whose text cannot be guessed has no drafts, and has some again when it can. Knows no proposer.
"""

from collections.abc import Sequence

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
FEW_ROWS = 24
"""Of a step, for which lists are faster than arrays."""


class AdaptiveCounts:
    """Of S slots and at most K drafts each. All ranks of a replica decide the same if they are told the same times.

    How often drafts are right is in an array, of which a step of few slots takes its part as lists: it takes little
    longer than to run some tens of functions on arrays, which have left the caches since the step before.
    """

    def __init__(self, states: RequestStates, max_drafts: int, costs: StepCosts | None = None) -> None:
        num_slots = len(states.num_tokens)
        self.costs = StepCosts() if costs is None else costs
        self._states = states
        self._places = np.arange(max_drafts)
        self._kept: FloatArray = np.power(1 - SHARED_RATE, np.arange(num_slots + 1), dtype=np.float64)
        """[S + 1] what is left of `_shared` after so many guesses."""
        self._shared = [FIRST_RATE] * max_drafts
        """[K] how often the draft at a place is right where those before it are, in all slots."""
        self._rates: FloatArray = np.full((num_slots, max_drafts), FIRST_RATE)
        """[S, K] the same, by slot."""
        self._resting: set[int] = set()
        """Slots that have no drafts because they are not worth it."""
        self._guesses: dict[int, tuple[int, list[int]]] = {}
        """By slot: what was guessed and is not verified, and the number of tokens of the slot with which it is judged.
        No guess: so many until it is asked for one again."""
        self._num_drafted_steps = 0
        self._num_idle_steps = 0
        self.paused = False
        """Whether nobody was asked after the last step."""
        self._num_judged = 0
        self._share_right = FIRST_RATE
        self._said_collapse = False

    def begin(self, slot: int) -> None:
        """A slot has another request."""
        self._rates[slot] = self._shared
        self._num_idle_steps = 0
        self._resting.discard(slot)
        self._guesses.pop(slot, None)

    def replace(self, slot: int) -> None:
        """Tokens of a slot are others now: what was guessed of it is void."""
        self._guesses.pop(slot, None)

    def verified(self, slots: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """[L] drafts that slots verified, some of which may be none, and how many of them were right."""
        if len(slots) > FEW_ROWS:
            some = num_drafts > 0
            if not some.all():
                slots, num_drafts, num_accepted = slots[some], num_drafts[some], num_accepted[some]
            self._learn_many(slots, num_drafts, num_accepted)
        else:
            self._learn(slots, num_drafts.tolist(), num_accepted.tolist())

    def pauses(self) -> bool:
        """Whether nobody is to be asked for a guess after this step, nor told of what was sampled: steps had no drafts
        for long, and asking takes time. To be called for each step."""
        self._num_idle_steps += 1
        self.paused = self._num_idle_steps > IDLE_STEPS and self._num_idle_steps % PATIENCE > 0
        return self.paused

    def asks_all(self, slots: Int32Array) -> bool:
        """Whether all of these slots had drafts worth their time when they were asked last."""
        return self._num_idle_steps == 0 and self._resting.isdisjoint(slots.tolist())

    def keep_all(self, slots: Int32Array, most: Int32Array) -> Int32Array | None:
        """As `choose`, before the guesses are known, of slots that may have [L] `most` drafts: as many as that, or in a
        step now and then none. None where it depends on the guesses; then `choose` is to be asked."""
        counts: list[int] = most.tolist()
        if not self.asks_all(slots) or self._best(slots, counts) != counts:
            return None
        if not any(counts):
            self._num_drafted_steps = 0
        elif self._is_plain():
            return np.zeros_like(most)
        return most

    def due(self, slots: Int32Array) -> BoolArray:
        """[L] which slots should be asked for a guess, now that they have sampled. Their former guesses are judged."""
        if not self._resting and not self._guesses:
            return np.ones(len(slots), np.bool_)
        found = []
        judged = []
        for slot, known in zip(slots.tolist(), self._states.num_tokens[slots].tolist(), strict=True):
            guess = self._guesses.get(slot)
            is_open = guess is None or guess[0] <= known
            found.append(is_open or slot not in self._resting)
            if is_open and guess is not None:
                del self._guesses[slot]
                judged.append((slot, *guess))
        if judged:
            self._judge(judged)
        return np.array(found, np.bool_)

    def choose(self, slots: Int32Array, guesses: Sequence[Int32Array]) -> Int32Array:
        """[L] how many of the first tokens of their guess slots verify in the next step, in which all of them run.

        Drafts are ranked by how likely they are accepted, and as many of them are taken as make the expected number
        of tokens, over the expected time of the step, largest.
        """
        most = [len(ids) for ids in guesses]
        counts = self._best(slots, most) if any(most) else most
        if not any(counts):
            self._num_drafted_steps = 0
        elif self._is_plain():
            return np.zeros(len(slots), np.int32)
        if self._resting or counts != most:
            self._put_off(slots.tolist(), guesses, counts)
        return np.array(counts, np.int32)

    def _is_plain(self) -> bool:
        """Count a step that should have drafts; whether it is one that has none, to compare what they cost."""
        self._num_idle_steps = 0
        self._num_drafted_steps += 1
        if self._num_drafted_steps <= PLAIN_EVERY:
            return False
        self._num_drafted_steps = 0
        return True

    def _best(self, slots: Int32Array, most: list[int]) -> list[int]:
        """[L] slots and the drafts that each may have -> how many it should have."""
        if len(slots) > FEW_ROWS:
            return self._best_of_many(slots, most)
        drafts = []
        for row, (rates, count) in enumerate(zip(self._rates[slots].tolist(), most, strict=True)):
            chance = 1.0
            for rate in rates[:count]:
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

    def _best_of_many(self, slots: Int32Array, most: list[int]) -> list[int]:
        """The same by arrays."""
        rates = self._rates[slots]
        there = self._places < np.array(most)[:, None]
        chances = np.multiply.accumulate(rates, axis=1)[there]
        order = np.argsort(-chances, kind="stable")
        speeds = np.empty(len(order) + 1)
        speeds[0] = 0
        np.add.accumulate(chances[order], out=speeds[1:])
        speeds += len(slots)
        speeds /= self.costs.array(len(slots), len(slots) + len(order))
        speeds[0] *= LEAST_GAIN
        best = int(speeds.argmax())
        if best == len(order):
            return most
        taken = np.zeros(len(order), np.bool_)
        taken[order[:best]] = True
        there[there] = taken
        counts: list[int] = there.sum(axis=1).tolist()
        return counts

    def _put_off(self, slots: list[int], guesses: Sequence[Int32Array], counts: list[int]) -> None:
        """Slots that verify nothing though they have a guess rest, and those that rested and verify none go on; a
        guess of theirs is kept until its tokens are known."""
        known = self._states.num_tokens
        resting, kept = self._resting, self._guesses
        for slot, guess, count in zip(slots, guesses, counts, strict=True):
            if count:
                resting.discard(slot)
                kept.pop(slot, None)
            elif len(guess) or slot in resting:
                resting.add(slot)
                if slot not in kept:
                    kept[slot] = int(known[slot]) + (len(guess) or PATIENCE), guess.tolist()

    def _judge(self, guesses: Sequence[tuple[int, int, list[int]]]) -> None:
        """Compare guesses of slots with the tokens that came, all of which are known."""
        token_ids = self._states.token_ids
        asked = [(slot, end - len(guess), guess) for slot, end, guess in guesses if guess]
        slots = [slot for slot, _, _ in asked]
        num_drafts = [len(guess) for _, _, guess in asked]
        num_right = [0] * len(asked)
        firsts = token_ids[slots, [start for _, start, _ in asked]].tolist()
        for index, (came, (slot, start, guess)) in enumerate(zip(firsts, asked, strict=True)):
            if came == guess[0]:
                found = token_ids[slot, start : start + len(guess)].tolist()
                num_right[index] = next(
                    (place for place, token in enumerate(guess) if token != found[place]), len(guess)
                )
        if len(slots) > FEW_ROWS:
            self._learn_many(*(np.array(values, np.int32) for values in (slots, num_drafts, num_right)))
        elif slots:
            self._learn(np.array(slots, np.int32), num_drafts, num_right)

    def _learn(self, slots: Int32Array, num_drafts: list[int], num_right: list[int]) -> None:
        """[L] of so many guesses of a slot, the first ones that were right; slots without guesses are as they were."""
        rates = self._rates[slots].tolist()
        for of_slot, count, right in zip(rates, num_drafts, num_right, strict=True):
            if count > 0:
                self._learn_one(of_slot, count, right)
        self._rates[slots] = rates
        self._note_share(sum(num_drafts), sum(num_right))

    def _learn_one(self, rates: list[float], num_drafts: int, num_right: int) -> None:
        shared = self._shared
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

    def _learn_many(self, slots: Int32Array, num_drafts: Int32Array, num_right: Int32Array) -> None:
        """The same by arrays, of `num_drafts` > 0."""
        if not len(slots):
            return
        places = self._places
        right = places < num_right[:, None]
        reached = (places < num_drafts[:, None]) & (places <= num_right[:, None])
        rates = self._rates[slots]
        learnt = np.where(reached, rates + RATE * (right - rates), rates)
        all_right = num_right == num_drafts
        if (num_drafts[all_right] < len(places)).any():
            untried = (places >= num_drafts[:, None]) & all_right[:, None] & (places > 0)
            before = np.concatenate((learnt[:, :1], learnt[:, :-1]), axis=1)
            learnt = np.where(untried, learnt + RATE / 4 * (before - learnt), learnt)
        self._rates[slots] = learnt
        # One guess after the other: those that come later weigh more.
        later = np.add.accumulate(reached[::-1], axis=0, dtype=np.int32)[::-1]
        gained = (self._kept[later - reached] * right).sum(axis=0)
        self._shared = (self._kept[later[0]] * self._shared + SHARED_RATE * gained).tolist()
        self._note_share(int(num_drafts.sum()), int(num_right.sum()))

    def _note_share(self, num_drafts: int, num_right: int) -> None:
        if not num_drafts:
            return
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
