"""A decode step as one native call: what it samples, what it counts, and what it leaves to others. The network is an
embedding, a norm and a head; that attention is planned right is for test_decode_path.py."""

import numpy as np
import pytest
import torch

from pagemill.model.kernels import native, reference
from pagemill.model.kernels.layer_plan import NativeNetwork, PlanBuilder
from pagemill.model.kernels.linear import linear, pack_bf16
from pagemill.model.kernels.plan_parts import NormWeight
from pagemill.worker.batch.block_tables import SlotTable
from pagemill.worker.batch.request_states import SlotArrays
from pagemill.worker.batch.row_masks import ANY_TOKEN, LEFT, RowMasks
from pagemill.worker.native.decode_step import MAX_ROWS, MAX_SAMPLED, MAX_TOKENS, Acceptance, DecodeStep
from pagemill.worker.sampling.philox import uniform

VOCAB, HIDDEN, LENGTH, NUM_SLOTS = 301, 64, 40, 80
EPS = 1e-5


class Decoder:
    """Slots with random tokens, each with another number of them, all but the last computed."""

    def __init__(self, *, packed: bool = True, scale: float = 1.0) -> None:
        torch.manual_seed(0)
        random = np.random.default_rng(0)
        self.weight = torch.randn(VOCAB, HIDDEN).bfloat16()
        self.norm = torch.randn(HIDDEN).bfloat16()
        self.head = pack_bf16(self.weight)
        self.scale = scale
        builder = PlanBuilder()
        source = builder.buffer("embedded", HIDDEN)
        result = builder.norm(source, NormWeight(self.norm, EPS), "result")
        network = NativeNetwork(
            builder.finish(source, result, self.head), self.head if packed else self.weight.clone(), scale
        )
        counts = (np.arange(NUM_SLOTS, dtype=np.int32) % (LENGTH - 2)) + 1
        self.slots = SlotArrays(
            token_ids=random.integers(0, VOCAB, (NUM_SLOTS, LENGTH), np.int32),
            num_tokens=counts,
            num_computed=counts - 1,
            num_sampled=np.zeros(NUM_SLOTS, np.int32),
            processed=np.zeros(NUM_SLOTS, bool),
            greedy=np.arange(NUM_SLOTS) % 2 == 0,
            temperature=random.uniform(0.5, 1.5, NUM_SLOTS).astype(np.float32),
            min_p=np.where(np.arange(NUM_SLOTS) % 5 == 0, 0.01, 0).astype(np.float32),
            top_k=np.where(np.arange(NUM_SLOTS) % 3 == 0, 7, 0).astype(np.int32),
            top_p=np.where(np.arange(NUM_SLOTS) % 7 == 0, 0.8, 1).astype(np.float32),
            seed=random.integers(0, 2**64, NUM_SLOTS, np.uint64),
        )
        self.step = DecodeStep(network, self.slots, [SlotTable(np.zeros((NUM_SLOTS, 8), np.int32), 16, [])])

    def run(self, slots: np.ndarray) -> np.ndarray:
        """A step that computes a token of each."""
        assert self.step.accepts(slots, np.ones_like(slots)) is Acceptance.ACCEPTED
        return self.step.run().token_ids

    def run_several(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """A step that computes so many tokens of each: fewer count as computed before it."""
        self.slots.num_computed[slots] = self.slots.num_tokens[slots] - counts
        assert self.step.accepts(slots, counts) is Acceptance.ACCEPTED
        decoded = self.step.run()
        assert decoded.counts is None
        return decoded.token_ids

    def verify(self, slots: np.ndarray, own: np.ndarray, drafts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """A step that computes so many tokens of each, and these drafts behind them: tokens, and how many of each."""
        state = self.slots
        state.num_computed[slots] = state.num_tokens[slots] - own
        for slot, ids in zip(slots, drafts, strict=True):
            state.token_ids[slot, state.num_tokens[slot] :][: len(ids)] = ids
        num_drafts = np.array([len(ids) for ids in drafts], np.int32)
        assert self.step.accepts(slots, own + num_drafts) is Acceptance.ACCEPTED
        decoded = self.step.run()
        assert (decoded.counts is None) == (not num_drafts.any())
        return decoded.token_ids, np.ones_like(slots) if decoded.counts is None else decoded.counts

    def logits(self, slots: np.ndarray, *, natively: bool) -> torch.Tensor:
        """Of the slots' last tokens, before a step."""
        last = self.slots.token_ids[slots, self.slots.num_tokens[slots] - 1]
        embedded = self.weight[torch.from_numpy(last).long()] * torch.tensor(self.scale, dtype=torch.bfloat16)
        if natively:
            return linear(native.rms_norm(embedded, self.norm, EPS), self.head, torch.float32)
        return reference.rms_norm(embedded, self.norm, EPS).float() @ self.weight.float().T

    def expected(self, slots: np.ndarray) -> list[int]:
        """Tokens, from the kernels one by one for the logits and plain torch for the choice."""
        return chosen_in_torch(self.slots, slots, self.slots.num_tokens[slots], self.logits(slots, natively=True))


def chosen_in_torch(state: SlotArrays, slots: np.ndarray, positions: np.ndarray, logits: torch.Tensor) -> list[int]:
    """A token of each row of logits, as the slots' parameters say."""
    uniforms = torch.from_numpy(uniform(state.seed[slots], positions.astype(np.int64)))
    parameters = (
        torch.from_numpy(values[slots]) for values in (state.temperature, state.min_p, state.top_k, state.top_p)
    )
    drawn = reference.sample(logits, *parameters, uniforms)
    return torch.where(torch.from_numpy(state.greedy[slots]), reference.argmax(logits), drawn).tolist()


@pytest.fixture(autouse=True)
def needs_library(library: native.Library) -> None:
    """Skips where there are no kernels."""


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("slots", [[0], [1], [5, 2, 9], list(range(3, 3 + MAX_ROWS))])
@pytest.mark.parametrize(("packed", "scale"), [(True, 1.0), (False, 1.0), (True, 24.0)])
def test_tokens_are_those_of_single_operations(threads, slots, packed, scale):
    decoder = Decoder(packed=packed, scale=scale)
    slots = np.array(slots, np.int32)
    for _ in range(2):
        expected = decoder.expected(slots)
        assert decoder.run(slots).tolist() == expected


def test_greedy_tokens_are_the_likeliest_in_plain_torch(isa):
    decoder = Decoder()
    slots = np.arange(0, NUM_SLOTS, 2, dtype=np.int32)
    logits = decoder.logits(slots, natively=False)
    tokens = torch.from_numpy(decoder.run(slots).astype(np.int64))
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(chosen, logits.amax(1), rtol=0.01, atol=0.01)


def test_slots_have_and_count_what_was_sampled_and_others_are_left_alone():
    decoder, slots = Decoder(), np.array([7, 4], np.int32)
    state = decoder.slots
    names = ("token_ids", "num_tokens", "num_computed", "num_sampled")
    before = {name: getattr(state, name).copy() for name in names}
    tokens = decoder.run(slots)
    for slot, token in zip(slots, tokens, strict=True):
        before["token_ids"][slot, before["num_tokens"][slot]] = token
        for name in names[1:]:
            before[name][slot] += 1
    for name in names:
        np.testing.assert_array_equal(getattr(state, name), before[name])


@pytest.mark.parametrize("num_left", [1, 3])
def test_rows_whose_logits_are_changed_are_computed_and_nothing_else(threads, num_left):
    """The others sample as if nobody's were."""
    slots = np.array([7, 4, 10], np.int32)
    alone, decoder = Decoder(), Decoder()
    expected, left = alone.run(slots), np.arange(num_left)
    logits = decoder.logits(slots[left], natively=True)
    decoder.slots.processed[slots[left]] = True
    tokens = decoder.run(slots)
    assert tokens[num_left:].tolist() == expected[num_left:].tolist()
    torch.testing.assert_close(decoder.step.logits(left), logits, rtol=0, atol=0)
    for name in ("token_ids", "num_tokens", "num_sampled"):
        fresh, whole = getattr(Decoder().slots, name), getattr(alone.slots, name)
        np.testing.assert_array_equal(getattr(decoder.slots, name)[slots[left]], fresh[slots[left]])
        np.testing.assert_array_equal(getattr(decoder.slots, name)[slots[num_left:]], whole[slots[num_left:]])
    np.testing.assert_array_equal(decoder.slots.num_computed, alone.slots.num_computed)


@pytest.mark.parametrize(
    ("slots", "counts"),
    [
        ([12], [2]),
        ([12, 3, 5, 37], [1, 4, 1, 8]),
        ([9, 17, 33], [3, 1, 2]),
        (list(range(2, 2 + MAX_ROWS)), [1 + slot % 2 for slot in range(MAX_ROWS)]),
        ([20, 34, 37, 73], [20, 1, 36, 35]),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_a_slot_may_compute_several_tokens_and_samples_after_the_last(threads, slots, counts, packed):
    """All that follows is as if each had computed one: also what is left to others, and chosen by masks."""
    slots = np.array(slots, np.int32)
    counts = np.array(counts, np.int32)
    decoder = Decoder(packed=packed)
    single = Decoder(packed=packed)
    for each in (decoder, single):
        each.slots.processed[slots[::3]] = True
    logits = decoder.logits(slots, natively=True)
    words = random_masks(len(slots))
    rows = np.where(decoder.slots.processed[slots], np.arange(len(slots)), LEFT).astype(np.int32)
    tokens = decoder.run_several(slots, counts)
    expected = single.run(slots)
    for each, chosen in ((decoder, tokens), (single, expected)):
        torch.testing.assert_close(each.step.logits(np.arange(len(slots))), logits, rtol=0, atol=0)
        each.step.choose(RowMasks(words, rows), chosen)
    assert tokens.tolist() == expected.tolist()
    for name in ("token_ids", "num_tokens", "num_computed", "num_sampled"):
        np.testing.assert_array_equal(getattr(decoder.slots, name), getattr(single.slots, name))
    assert decoder.run(slots).tolist() == single.run(slots).tolist()


@pytest.mark.parametrize(
    ("slots", "own", "num_right", "num_wrong"),
    [
        ([12], [1], [2], [0]),
        ([13], [1], [0], [3]),
        ([12, 3, 5, 30], [1, 1, 1, 1], [4, 0, 1, 2], [0, 0, 2, 3]),
        ([9, 17, 33, 2], [3, 1, 2, 1], [2, 0, 0, 1], [0, 1, 0, 1]),
        (list(range(2, 32)), [1] * 30, [slot % 3 for slot in range(30)], [slot % 2 for slot in range(30)]),
    ],
)
def test_drafts_are_kept_as_far_as_they_are_what_is_sampled(threads, slots, own, num_right, num_wrong):
    """Tokens and counts are those of steps of one token each."""
    slots, own = np.array(slots, np.int32), np.array(own, np.int32)
    decoder, single = Decoder(), Decoder()
    sampled = np.stack([single.run(slots) for _ in range(max(num_right) + 1)], axis=1)
    drafts = [
        [*row[:right], *((row[right : right + 1] + 1) % VOCAB).tolist()[:wrong], *[5] * (wrong - 1)]
        for row, right, wrong in zip(sampled, num_right, num_wrong, strict=True)
    ]
    expected = Decoder().slots
    tokens, counts = decoder.verify(slots, own, drafts)
    assert counts.tolist() == [right + 1 for right in num_right]
    assert tokens.tolist() == [token for row, count in zip(sampled, counts, strict=True) for token in row[:count]]
    state = decoder.slots
    for slot, count in zip(slots, counts, strict=True):
        known = expected.num_tokens[slot] + count
        assert state.token_ids[slot, :known].tolist() == single.slots.token_ids[slot, :known].tolist()
        assert state.num_tokens[slot] == known
        assert state.num_computed[slot] == known - 1
        assert state.num_sampled[slot] == count


def test_a_slot_that_is_left_to_others_runs_beside_drafts(threads):
    slots = np.array([7, 4, 10, 20], np.int32)
    alone, decoder = Decoder(), Decoder()
    for each in (alone, decoder):
        each.slots.processed[slots[[1, 3]]] = True
    left = np.array([1, 3])
    logits = alone.logits(slots[left], natively=True)
    expected = alone.run(slots)
    words = random_masks(4)
    rows = np.array([LEFT, 0, LEFT, 3], np.int32)
    tokens, counts = decoder.verify(slots, np.array([1, 1, 2, 1], np.int32), [[expected[0], 3], [], [VOCAB - 1], []])
    assert counts[1:].tolist() == [1, 1, 1]
    assert counts[0] >= 2
    torch.testing.assert_close(decoder.step.logits(left), logits, rtol=0, atol=0)
    own = tokens[np.cumsum(counts) - counts]
    for each, chosen in ((alone, expected), (decoder, own)):
        each.step.choose(RowMasks(words, rows), chosen)
        each.step.choose(RowMasks(words, np.full(4, LEFT, np.int32)), chosen)
    assert own.tolist() == expected.tolist()
    np.testing.assert_array_equal(decoder.slots.num_tokens[slots[1:]], alone.slots.num_tokens[slots[1:]])


@pytest.mark.parametrize(
    "case",
    [
        "drafts alone",
        "changed drafts",
        "too many drafts",
        "unknown draft",
        "not the last token",
        "nothing",
        "none of one",
        "too many rows",
        "too many tokens",
        "unknown token",
    ],
)
def test_nothing_happens_in_any_other_step(case):  # noqa: C901 - a branch for each case
    decoder = Decoder()
    state, slots = decoder.slots, np.array([12, 3, 5], np.int32)
    counts = np.ones(3, np.int32)
    if case == "drafts alone":
        state.num_computed[3] += 1
    elif case == "changed drafts":
        state.processed[3] = True
        counts[1] = 2
    elif case == "too many drafts":
        slots = np.arange(MAX_ROWS, dtype=np.int32)
        counts = np.full(MAX_ROWS, 1 + MAX_SAMPLED // MAX_ROWS, np.int32)
    elif case == "unknown draft":
        state.token_ids[3, state.num_tokens[3]] = VOCAB
        counts[1] = 2
    elif case == "not the last token":
        state.num_computed[3] -= 1
    elif case == "none of one":
        state.num_computed[3] += 1
        counts[1] = 0
    elif case == "too many tokens":
        slots = np.arange(37, 27, -1, dtype=np.int32)
        counts = state.num_tokens[slots].copy()
        state.num_computed[slots] = 0
        assert counts.sum() > MAX_TOKENS
    elif case == "unknown token":
        counts[:] = 2
        state.num_computed[slots] -= 1
        state.token_ids[5, state.num_computed[5]] = VOCAB
    elif case == "nothing":
        slots, counts = slots[:0], counts[:0]
    else:
        slots = np.arange(MAX_ROWS + 1, dtype=np.int32)
        counts = np.ones_like(slots)
    before = state.num_tokens.copy(), state.num_computed.copy(), state.token_ids.copy()
    reasons = {
        "unknown token": Acceptance.UNKNOWN_TOKEN,
        "unknown draft": Acceptance.UNKNOWN_TOKEN,
        "too many rows": Acceptance.TOO_MANY_ROWS,
        "too many drafts": Acceptance.TOO_MANY_ROWS,
        "changed drafts": Acceptance.CHANGED_DRAFTS,
    }
    assert decoder.step.accepts(slots, counts) is reasons.get(case, Acceptance.NOT_A_DECODE_STEP)
    with pytest.raises(RuntimeError, match="accepted"):
        decoder.step.run()
    for found, kept in zip((state.num_tokens, state.num_computed, state.token_ids), before, strict=True):
        np.testing.assert_array_equal(found, kept)


def random_masks(count: int) -> np.ndarray:
    """[count, words] that allow about half of the tokens, in stretches and one by one; some none of the first 128."""
    random = np.random.default_rng(1)
    allowed = np.zeros((count, -(-VOCAB // 32) * 32), bool)
    allowed[:, :VOCAB] = random.random((count, VOCAB)) < random.choice([0.02, 0.5, 1.0], (count, 1))
    allowed[::3, :128] = False
    allowed[:, 200] = True
    return np.packbits(allowed, axis=1, bitorder="little").view(np.int32)


def masked(logits: torch.Tensor, words: np.ndarray) -> torch.Tensor:
    """Minus infinity where a mask says so, in plain torch."""
    logits = logits.clone()
    reference.mask_(logits, torch.from_numpy(words))
    return logits


@pytest.mark.parametrize("slots", [[1], [4], [5, 2, 9], list(range(3, 3 + MAX_ROWS))])
def test_rows_are_chosen_by_their_masks_as_if_their_logits_were_changed(isa, threads, slots):
    decoder, slots = Decoder(), np.array(slots, np.int32)
    state, num_words = decoder.slots, -(-VOCAB // 32)
    state.processed[slots] = True
    logits = decoder.logits(slots, natively=True)
    words = random_masks(len(slots))
    rows = np.arange(len(slots), dtype=np.int32)[::-1].copy()
    rows[1::3], rows[2::4] = ANY_TOKEN, LEFT
    full = np.full((len(slots), num_words), -1, np.int32)
    full[rows >= 0] = words[rows[rows >= 0]]
    before = state.num_tokens.copy()
    expected = chosen_in_torch(state, slots, before[slots], masked(logits, full))
    tokens = decoder.run(slots)
    tokens[:] = -7
    decoder.step.choose(RowMasks(words, rows), tokens)
    left = rows == LEFT
    assert tokens[~left].tolist() == [token for token, is_left in zip(expected, left, strict=True) if not is_left]
    assert (tokens[left] == -7).all()
    np.testing.assert_array_equal(state.num_tokens[slots] - before[slots], ~left)
    np.testing.assert_array_equal(state.num_sampled[slots], ~left)
    np.testing.assert_array_equal(state.token_ids[slots, before[slots]][~left], tokens[~left])
    torch.testing.assert_close(decoder.step.logits(np.arange(len(slots))), logits, rtol=0, atol=0)


@pytest.mark.parametrize("slot", [4, 5], ids=["greedy", "drawn"])
@pytest.mark.parametrize("nan_at", [None, 6, 7, 250])
def test_a_nan_counts_where_its_token_may_come(isa, slot, nan_at):
    decoder, slots = Decoder(), np.array([slot], np.int32)
    decoder.slots.processed[slots] = True
    tokens = decoder.run(slots)
    logits = decoder.step.logits(np.zeros(1, np.int64))
    if nan_at is not None:
        logits[0, nan_at] = torch.nan
    words = np.zeros((1, -(-VOCAB // 32)), np.int32)
    words[0, 0] = 1 << 7  # token 7 alone
    decoder.step.choose(RowMasks(words, np.zeros(1, np.int32)), tokens)
    assert tokens.tolist() == [-1 if nan_at == 7 else 7]
    known = decoder.slots.num_tokens[slot] - 1
    assert decoder.slots.token_ids[slot, known] == (0 if nan_at == 7 else 7)


@pytest.mark.parametrize("slot", [4, 5], ids=["greedy", "drawn"])
def test_no_token_where_none_may_come(isa, slot):
    decoder, slots = Decoder(), np.array([slot], np.int32)
    decoder.slots.processed[slots] = True
    tokens = decoder.run(slots)
    decoder.step.choose(RowMasks(np.zeros((1, -(-VOCAB // 32)), np.int32), np.zeros(1, np.int32)), tokens)
    assert tokens.tolist() == [-1]


def test_masks_of_another_step_or_vocabulary_are_refused():
    decoder, slots = Decoder(), np.array([4, 6], np.int32)
    decoder.slots.processed[slots] = True
    words, tokens = np.full((1, -(-VOCAB // 32)), -1, np.int32), np.zeros(2, np.int32)
    rows = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="step of 0"):
        decoder.step.choose(RowMasks(words, rows), tokens)
    decoder.run(slots)
    with pytest.raises(ValueError, match="masks of 1 rows for a step of 2"):
        decoder.step.choose(RowMasks(words, rows[:1]), tokens)
    with pytest.raises(ValueError, match="10 words each"):
        decoder.step.choose(RowMasks(words[:, :9].copy(), rows), tokens)
