"""logit_bias, allowed_token_ids and bad_words against transformers' processors where there are some, float32."""

import torch
from transformers import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.worker.sampling.processors.allowed_token_ids import AllowedTokensProcessor
from pagemill.worker.sampling.processors.bad_words import BadWordsProcessor
from pagemill.worker.sampling.processors.logit_bias import LogitBiasProcessor
from tests.unit.worker.sampling.processors.rows import PROMPT, VOCAB, logits_of, processed, tokens_of


def of_transformers(processors):
    """[K, V]: one processor for each row, told of the output only."""
    ids = [torch.from_numpy(tokens_of(slot)[PROMPT:]).long()[None] for slot in range(len(processors))]
    rows = logits_of(len(processors))
    return torch.cat([one(ids[slot], rows[slot : slot + 1].clone()) for slot, one in enumerate(processors)])


def test_a_bias_is_added():
    biases = [{3: 5.0, 0: -100.0}, {VOCAB - 1: 0.25}]
    expected = of_transformers([SequenceBiasLogitsProcessor([[[t], b] for t, b in one.items()]) for one in biases])
    for logits in processed(LogitBiasProcessor, [SamplingParams(logit_bias=bias) for bias in biases]):
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_only_allowed_tokens_stay():
    allowed = [[4], [5, 9, 5, 1], list(range(VOCAB))]
    for logits in processed(AllowedTokensProcessor, [SamplingParams(allowed_token_ids=ids) for ids in allowed]):
        for before, after, ids in zip(logits_of(3), logits, allowed, strict=True):
            expected = torch.full((VOCAB,), -torch.inf)
            expected[ids] = before[ids]
            assert torch.equal(after, expected)


def test_a_word_is_forbidden_where_it_would_be_completed():
    said = [tokens_of(slot)[PROMPT:].tolist() for slot in range(3)]
    words = [
        [[7], [*said[0][-2:], 8], [said[0][-1], 8], [said[0][-2], 9], [50, 11]],
        [[said[1][-1], 30]],
        [[31, 32, 33]],
    ]
    expected = of_transformers([NoBadWordsLogitsProcessor(bad_words_ids=one) for one in words])
    assert expected.isinf().sum(1).tolist() == [2, 1, 0]
    for logits in processed(BadWordsProcessor, [SamplingParams(bad_words_token_ids=one) for one in words]):
        assert torch.equal(logits, expected)


def test_a_word_that_begins_in_the_prompt_is_not_the_outputs():
    whole = tokens_of(0).tolist()
    longer = [*whole[PROMPT - 1 :], 8]
    for logits in processed(BadWordsProcessor, [SamplingParams(bad_words_token_ids=[longer, longer[1:]])]):
        assert logits.isinf().nonzero().tolist() == [[0, 8]]
    for logits in processed(BadWordsProcessor, [SamplingParams(bad_words_token_ids=[longer])]):
        assert not logits.isinf().any()
