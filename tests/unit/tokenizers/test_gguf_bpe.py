import pytest
from tokenizers import Regex, pre_tokenizers

from pagemill.errors import ModelError
from pagemill.tokenizers.load import load_tokenizer
from pagemill.tokenizers.pre_tokenizers import PRE_KINDS
from tests.unit.artifacts.gguf_builder import write_gguf
from tests.unit.tokenizers.vocabularies import CONTROL, TEXTS, byte_level, write_bpe_gguf

# As published in the tokenizer.json of the models.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def trained():
    return byte_level()


def split_with(pipeline, *patterns):
    copy = type(pipeline).from_str(pipeline.to_str())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    copy.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return copy


@pytest.mark.parametrize("pre", ["gpt-2", "default", None])
def test_gpt2_kind_equals_the_original(tmp_path, trained, pre):
    ours = load_tokenizer(write_bpe_gguf(tmp_path / "m.gguf", trained, pre))
    for text in TEXTS:
        assert ours.encode(text) == trained.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


def test_llama_kind_equals_the_published_pattern(tmp_path, trained):
    ours = load_tokenizer(write_bpe_gguf(tmp_path / "m.gguf", trained, "llama-bpe", add_bos_token=False))
    reference = split_with(trained, LLAMA3)
    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text).ids


def test_qwen_kind_composes_and_takes_single_digits(tmp_path, trained):
    ours = load_tokenizer(write_bpe_gguf(tmp_path / "m.gguf", trained, "qwen2"))
    assert ours.encode("cafe\u0301") == ours.encode("caf\u00e9")
    assert [ours.decode([token]) for token in ours.encode("2024")] == ["2", "0", "2", "4"]


def test_digits_are_split_off_before_anything_else(tmp_path, trained):
    ours = load_tokenizer(write_bpe_gguf(tmp_path / "m.gguf", trained, "smollm"))
    assert [ours.decode([token]) for token in ours.encode("2024")] == ["2", "0", "2", "4"]
    # The whitespace before a digit is a part of its own, and is merged like whitespace at the end of a text.
    assert ours.encode("a   1") == [*ours.encode("a   "), *ours.encode("1")]


def test_a_whole_token_ignores_merges_where_the_kind_says_so(tmp_path):
    pipeline = byte_level(["ab"], 257)
    # "xyz" is a token, but no merge leads there.
    pipeline.add_tokens(["xyz"])
    path = write_bpe_gguf(tmp_path / "m.gguf", pipeline, "llama-bpe", add_bos_token=False)
    assert len(load_tokenizer(path).encode("xyz")) == 1
    path = write_bpe_gguf(tmp_path / "m.gguf", pipeline, "gpt-2")
    assert len(load_tokenizer(path).encode("xyz")) == 3


@pytest.mark.parametrize("pre", sorted(PRE_KINDS))
def test_every_kind_keeps_every_text(tmp_path, trained, pre):
    ours = load_tokenizer(write_bpe_gguf(tmp_path / "m.gguf", trained, pre, add_bos_token=False))
    for text in TEXTS:
        if not PRE_KINDS[pre].normal_form_c:
            assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


def test_unknown_kind_lists_the_known(tmp_path, trained):
    with pytest.raises(ModelError, match=r"tokenizer.ggml.pre='martian' is not known.*known: bloom, .*command-r, dbrx"):
        load_tokenizer(write_bpe_gguf(tmp_path / "m.gguf", trained, "martian"))


def test_control_tokens_are_recognised_and_hidden(tmp_path, trained):
    ours = load_tokenizer(write_bpe_gguf(tmp_path / "m.gguf", trained, "gpt-2"))
    end = trained.token_to_id(CONTROL)
    ids = ours.encode(f"a{CONTROL}b")
    assert end in ids
    assert ours.decode(ids) == "ab"
    assert ours.decode(ids, skip_special_tokens=False) == f"a{CONTROL}b"
    assert ours.eos_token_ids == (end,)


def test_bos_and_eos_as_the_file_says_and_never_twice(tmp_path, trained):
    end = trained.token_to_id(CONTROL)
    plain = load_tokenizer(write_bpe_gguf(tmp_path / "m.gguf", trained, "gpt-2"))
    assert plain.encode("hi")[0] != end
    framed = load_tokenizer(
        write_bpe_gguf(tmp_path / "m.gguf", trained, "gpt-2", add_bos_token=True, add_eos_token=True)
    )
    assert framed.encode("hi") == [end, *plain.encode("hi"), end]
    assert framed.encode("hi", add_special_tokens=False) == plain.encode("hi")
    assert framed.encode(f"{CONTROL}hi{CONTROL}") == framed.encode("hi")
    by_kind = load_tokenizer(write_bpe_gguf(tmp_path / "m.gguf", trained, "llama-bpe"))
    assert by_kind.encode("hi")[0] == end


def test_merges_that_do_not_fit(tmp_path):
    def keys(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a c"])

    with pytest.raises(ModelError, match=r"tokenizer.ggml.merges do not fit the tokens"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", keys=keys))


def test_special_token_out_of_range(tmp_path):
    def keys(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(3)

    with pytest.raises(ModelError, match=r"bos_token_id=3 is not one of the 3 tokens"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", keys=keys))


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("a  1", [81, 256, 33]),
        ("x   22 y", [104, 333, 34, 34, 329]),
        ("tel: 555-1234", [33369, 42, 216, 37, 37, 37, 29, 33, 34, 35, 36]),
        ("def f(x):\n    return x+1\n", [1604, 275, 24, 104, 727, 472, 1003, 1792, 27, 33, 198]),
        ("I'm 3 o'clock  9am", [57, 5248, 216, 35, 263, 23, 17466, 256, 41, 332]),
        ("日本語 café 🙂", [23274, 115, 40993, 179, 120, 248, 37366, 47526]),
        ("a\n\n\n1", [81, 16506, 33]),
    ],
)
def test_default_model(smollm2, text, ids):
    """Ids as llama.cpp's own tokenizer gives them for this file."""
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids) == text


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_tokenizer(smollm2_path)
