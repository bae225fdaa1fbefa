"""Small vocabularies made on the spot, and .gguf files that hold them."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import gguf
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.unit.artifacts.gguf_builder import write_gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog. I'm sure it's 12345 or 2024, isn't it?",
    "def f(x):\n    return x + 1  # comment\n\n\nclass A:\n\tpass\n",
    "日本語のテキスト、中文文本。 Привет, мир! مرحبا بالعالم café naïve 🙂🎉 👨‍👩‍👧",
    "HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n<html></html>",
    "aaaa bbbb    cccc   1 22 333 4444 ... !!! ???",
] * 8
TEXTS = [
    "", " ", "  ", "a", " a", "a  1", "x   22 y", "a\n\n\n1", "Hello World", "  two leading, two trailing  ",
    "I'm 3 o'clock  9am", "日本語 café 🙂", "👨‍👩‍👧‍👦 family", "tabs\t\tand\nlines\r\n", "Ünïcödé ñ ß", "мир 12 34",
    "def f(x):\n    return x+1\n", "\x00\x7f\x1b", "\U0001d539\U0001d560", "a\u0301 e\u0301", "¼½¾ ²³",
    "<|end|>", "x<|end|>y", "<|ui|>",
]  # fmt: skip
CONTROL, USER = "<|end|>", "<|ui|>"
SYMBOLS = (USER, "\n", "\n\n")


def byte_level(corpus: Sequence[str] = CORPUS, vocab_size: int = 400) -> tokenizers.Tokenizer:
    """A trained GPT-2-like tokenizer with a control token and a user-defined one."""
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    pipeline.train_from_iterator(corpus, trainer)
    pipeline.add_special_tokens([CONTROL])
    pipeline.add_tokens([tokenizers.AddedToken(USER, normalized=False)])
    return pipeline


def write_bpe_gguf(path: Path, pipeline: tokenizers.Tokenizer, pre: str | None, **flags: bool | int | str) -> Path:
    """The tokenizer above as a .gguf file."""
    state = json.loads(pipeline.to_str())
    tokens = [pipeline.id_to_token(i) for i in range(pipeline.get_vocab_size())]
    kinds = [{CONTROL: 3, USER: 4}.get(token, 1) for token in tokens]

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
        end = pipeline.token_to_id(CONTROL)
        writer.add_bos_token_id(end)
        writer.add_eos_token_id(end)
        add_flags(writer, flags)

    return write_gguf(path, keys=keys)


def sentencepiece_bpe(add_dummy_prefix: bool, symbols: Sequence[str] = SYMBOLS) -> sentencepiece.SentencePieceProcessor:
    """A trained SentencePiece BPE model with byte fallback and user-defined symbols."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.split("\n") if line]),
        model_writer=model, model_type="bpe", vocab_size=520, byte_fallback=True, add_dummy_prefix=add_dummy_prefix,
        normalization_rule_name="identity", remove_extra_whitespaces=False, user_defined_symbols=list(symbols),
        split_digits=True, allow_whitespace_only_pieces=True, minloglevel=3, character_coverage=0.98,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_spm_gguf(path: Path, model: sentencepiece.SentencePieceProcessor, **flags: bool | int | str) -> Path:
    """A SentencePiece model as a .gguf file."""

    def kind(i: int) -> int:
        for test, value in ((model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6)):
            if test(i):
                return value
        return 4 if model.id_to_piece(i) in SYMBOLS else 1

    def keys(writer: gguf.GGUFWriter) -> None:
        ids = range(model.get_piece_size())
        writer.add_tokenizer_model("llama")
        writer.add_token_list([model.id_to_piece(i) for i in ids])
        writer.add_token_scores([model.get_score(i) for i in ids])
        writer.add_token_types([kind(i) for i in ids])
        writer.add_bos_token_id(model.bos_id())
        writer.add_eos_token_id(model.eos_id())
        writer.add_unk_token_id(model.unk_id())
        add_flags(writer, flags)

    return write_gguf(path, keys=keys)


def add_flags(writer: gguf.GGUFWriter, flags: dict[str, bool | int | str]) -> None:
    """Keys below tokenizer.: booleans, ids of tokens and texts."""
    for name, value in flags.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_string(f"tokenizer.{name}", value)
