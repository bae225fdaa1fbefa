"""How byte-level BPE vocabularies split a text before merging, by the name in `tokenizer.ggml.pre`.
Knows nothing about vocabularies."""

from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers

from pagemill.errors import ModelError

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_TAIL}"
)
_O200K: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)
_CJK: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_BLOOM: Final = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreKind:
    """One way to split. The parts are split by each pattern in turn; then bytes become characters."""

    patterns: tuple[str, ...] = ()
    """Empty: GPT-2's own split."""
    single_digits: bool = False
    """Every digit stands alone, before anything else is split."""
    normal_form_c: bool = False
    ignore_merges: bool = False
    """A part that is a token as a whole stays whole, whatever the merges would do."""
    add_bos: bool = False
    """Whether texts begin with BOS when the file does not say."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """As a step of `tokenizers`."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """As a step of `tokenizers`, None when text is taken as it is."""
        return normalizers.NFC() if self.normal_form_c else None


_GPT2 = PreKind()
_NEOX = PreKind(normal_form_c=True)
_O200K_KIND = PreKind((_O200K,))
_DIGITS = PreKind(single_digits=True)
_LLAMA3_KIND = PreKind((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_KIND = PreKind((_QWEN2,), normal_form_c=True)
_DEEPSEEK3_KIND = PreKind((r"\p{N}{1,3}", _CJK, _DEEPSEEK3), add_bos=True)

# `default` is what files say that were made before the key existed: GPT-2's split is the honest guess.
PRE_KINDS: Final[dict[str, PreKind]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "exaone4": _GPT2,
    "granite-docling": _GPT2,
    "mpt": _NEOX,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "falcon3": _LLAMA3_KIND,
    "falcon-h1": _LLAMA3_KIND,
    "pixtral": _LLAMA3_KIND,
    "bloom": PreKind((_BLOOM,)),
    "chatglm-bpe": PreKind((_LLAMA3,)),
    "glm4": PreKind((_LLAMA3,)),
    "dbrx": PreKind((_LLAMA3,)),
    "smaug-bpe": PreKind((_LLAMA3,)),
    "qwen2": _QWEN2_KIND,
    "deepseek-r1-qwen": _QWEN2_KIND,
    "stablelm2": PreKind((_QWEN2,)),
    "tekken": PreKind((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _O200K_KIND,
    "llama4": _O200K_KIND,
    "deepseek-v3": _DEEPSEEK3_KIND,
}


def pre_kind(name: str) -> PreKind:
    """Look a name up. Raises ModelError that lists the known ones."""
    if name not in PRE_KINDS:
        raise ModelError(
            f"tokenizer.ggml.pre={name!r} is not known, and a guess would give wrong tokens; "
            f"known: {', '.join(sorted(PRE_KINDS))}"
        )
    return PRE_KINDS[name]
