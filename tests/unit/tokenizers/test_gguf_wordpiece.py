"""WordPiece from GGUF files, against the tokenizer that the files were made of."""

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from pagemill.errors import ModelError
from pagemill.tokenizers.load import load_tokenizer
from tests.unit.artifacts.gguf_builder import write_gguf

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "", "The cats' weather, in Köln!", "ÉTÉ à la plage", "low lower lowest", "日本語 and 🙂", "a\u0301b\tc\nd",
    "[MASK] it ##s", "x" * 120, "naïve café", "1,234.5", "the [SEP] end",
]  # fmt: skip
CORPUS = [
    "the weather of the cats is low and lower",
    "The Cats In Köln À la plage 1 2 3 4 5 , . ' !",
    "naïve café 日本",
]


def reference(cased: bool) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(CORPUS * 5, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL))
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.decoder = decoders.WordPiece()
    return made


def write(
    path: Path,
    theirs: tokenizers.Tokenizer,
    without: str | None = None,
    renamed: Mapping[int, str] | None = None,
    kinds: Mapping[int, int] | None = None,
) -> Path:
    """As llama.cpp's converter does, but for tokens that are `renamed`, or of other `kinds`."""
    texts = [theirs.id_to_token(index) for index in range(theirs.get_vocab_size())]
    tokens = [
        text if text in SPECIAL else text.removeprefix("##") if text.startswith("##") else f"▁{text}" for text in texts
    ]
    for index, text in (renamed or {}).items():
        tokens[index] = text
    types = [3 if text in SPECIAL else 1 for text in texts]
    for index, kind in (kinds or {}).items():
        types[index] = kind

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        adding: dict[str, Callable[[int], None]] = {
            "[PAD]": writer.add_pad_token_id, "[UNK]": writer.add_unk_token_id, "[CLS]": writer.add_bos_token_id,
            "[SEP]": writer.add_sep_token_id, "[MASK]": writer.add_mask_token_id,
        }  # fmt: skip
        for text, add in adding.items():
            if text != without:
                add(SPECIAL.index(text))
        writer.add_add_bos_token(True)

    return write_gguf(path, "bert", keys)


@pytest.mark.parametrize("cased", [False, True])
def test_ids_are_those_of_the_tokenizer_that_the_file_was_made_of(tmp_path: Path, cased: bool) -> None:
    theirs = reference(cased)
    ours = load_tokenizer(write(tmp_path / "m.gguf", theirs))
    for text in TEXTS:
        expected = theirs.encode(text)
        assert ours.encode(text) == expected.ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(expected.ids) == theirs.decode(expected.ids), text
    ids, second = ours.encode_pair("the cats", "lower")
    pair = theirs.encode("the cats", "lower")
    assert (ids, second) == (pair.ids, pair.type_ids.index(1))


def test_a_token_that_is_not_named_is_told_of(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", reference(cased=False), without="[SEP]")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.seperator_token_id is missing"):
        load_tokenizer(path)


@pytest.mark.parametrize("text", ["$A", "a b", "", ":", "$B:1", "[SEP]:99999999999", "x:1"])
def test_named_tokens_may_be_called_anything(tmp_path: Path, text: str) -> None:
    """Some of these mean something in the templates of the library."""
    theirs = reference(cased=False)
    for index in (1, 2, 3):
        ours = load_tokenizer(write(tmp_path / "m.gguf", theirs, renamed={index: text}))
        assert ours.encode("the cats ж") == theirs.encode("the cats ж").ids
        assert ours.encode_pair("the cats", "lower")[0] == theirs.encode("the cats", "lower").ids


@pytest.mark.parametrize("kind", [1, 2, 4, 5, 6])
def test_named_tokens_may_be_of_any_kind(tmp_path: Path, kind: int) -> None:
    """Words that cannot be written are the unknown token, whatever the file says of that."""
    theirs = reference(cased=False)
    ours = load_tokenizer(write(tmp_path / "m.gguf", theirs, kinds={1: kind, 2: kind, 3: kind}))
    assert ours.encode("the ж") == theirs.encode("the ж").ids
