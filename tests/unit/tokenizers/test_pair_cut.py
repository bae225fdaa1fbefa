"""Pairs of texts that are cut: what stays is what the tokenizers package leaves, with special tokens around it."""

import pytest
from tokenizers import Tokenizer, processors

from pagemill.tokenizers.hf_tokenizer import HfTokenizer, SpecialTokens
from pagemill.tokenizers.pair_cut import PairCut, longest_first
from tests.unit.tokenizers.vocabularies import byte_level

FIRST, SECOND = "abcdefgh", "uvwxyz"


def joining() -> Tokenizer:
    backend = byte_level()
    ends = [backend.id_to_token(number) for number in (0, 1)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{ends[0]} $A {ends[1]}",
        pair=f"{ends[0]} $A {ends[1]} $B:1 {ends[1]}:1",
        special_tokens=[(end, number) for number, end in enumerate(ends)],
    )
    return backend


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("most", [3, 4, 6, 9, 12, 15, 17, 40])
def test_the_longer_text_is_cut_first(most: int, side: str) -> None:
    backend = joining()
    backend.enable_truncation(most, strategy="longest_first", direction=side)
    wanted = backend.encode(FIRST, SECOND)
    ours = HfTokenizer(joining(), SpecialTokens(bos_token_id=0), None)
    ids, second_at = ours.encode_pair(FIRST, SECOND, PairCut(most, keep_end=side == "left"))
    assert ids == wanted.ids
    assert second_at == wanted.type_ids.index(1)


def test_each_text_by_itself_keeps_its_beginning() -> None:
    ours = HfTokenizer(joining(), SpecialTokens(bos_token_id=0), None)
    wanted = ours.encode_pair(FIRST[:3], SECOND[:4])
    assert ours.encode_pair(FIRST, SECOND, PairCut(first=3, second=4, keep_end=True)) == wanted
    assert ours.encode_pair(FIRST, SECOND, PairCut()) == ours.encode_pair(FIRST, SECOND)


@pytest.mark.parametrize(("first", "second", "room"), [(0, 9, 4), (9, 0, 4), (5, 5, 0), (3, 9, 7), (9, 3, 7)])
def test_no_room_is_left_over(first: int, second: int, room: int) -> None:
    kept = longest_first(first, second, room)
    assert sum(kept) == room
    assert kept[0] <= first and kept[1] <= second
