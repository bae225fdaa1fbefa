"""A tokenizer from a folder in Hugging Face format: tokenizer.json, tokenizer_config.json, chat template.
Knows nothing about architectures or weights."""

from pathlib import Path
from typing import Any, Final

import tokenizers

from pagemill.artifacts.json_file import read_optional_json_object
from pagemill.artifacts.plain_file import check_plain
from pagemill.errors import ModelError
from pagemill.log import get_logger
from pagemill.tokenizers.backtracking import may_stall
from pagemill.tokenizers.expansion import check_expansion
from pagemill.tokenizers.hf_tokenizer import HfTokenizer, SpecialTokens

logger = get_logger(__name__)

_MAX_BYTES: Final = 256 << 20
_MAX_TEMPLATE_BYTES: Final = 1 << 20
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load(folder: Path, chat_template: str | None = None) -> HfTokenizer:
    """Load it; `chat_template` replaces the folder's. Raises ModelError when files are missing or damaged."""
    source = folder / "tokenizer.json"
    if not source.exists():
        raise ModelError(f"{folder} has no tokenizer.json, which is needed (tokenizer.model alone is not enough)")
    try:
        check_plain(source, _MAX_BYTES)
        backend = tokenizers.Tokenizer.from_file(str(source))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelError(f"{source} is damaged: {error}") from error
    check_expansion(source, backend)
    if may_stall(backend.decoder):
        raise ModelError(f"{source}: its decoder has a regular expression that may take very long on a short text")
    # What a file says about cutting and filling up batches of texts does not hold for prompts.
    backend.no_truncation()
    backend.no_padding()
    config = read_optional_json_object(folder / "tokenizer_config.json")
    named = _named_tokens(read_optional_json_object(folder / "special_tokens_map.json") | config)
    template = chat_template if chat_template is not None else _chat_template(folder, config)
    tokenizer = HfTokenizer(backend, _special(folder, backend, config, named), template)
    tokenizer.response_template = config.get("response_template")
    if tokenizer.may_stall:
        logger.warning(
            "%s has a regular expression that may take very long on a short text: a server prepares all requests in "
            "helper processes, which are ended after a minute",
            source,
        )
    return tokenizer


def _special(
    folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]
) -> SpecialTokens:
    bos, eos = (backend.token_to_id(named[name]) if name in named else None for name in ("bos_token", "eos_token"))
    ends = _eos_ids(read_optional_json_object(folder / "generation_config.json"))
    eos_ids = tuple(dict.fromkeys(([] if eos is None else [eos]) + ends))
    return SpecialTokens(
        bos_token_id=bos,
        eos_token_ids=eos_ids,
        adds_bos=config.get("add_bos_token") is True,
        adds_eos=config.get("add_eos_token") is True and eos is not None,
        named=named,
    )


def _eos_ids(generation: dict[str, Any]) -> list[int]:
    value = generation.get("eos_token_id")
    return [token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)]


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is written as text or as an object with a content."""
    found = {}
    for name in _NAMED:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json or chat_template.json; of several, the default."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_template(file, _MAX_TEMPLATE_BYTES)
    value = config.get("chat_template") or read_optional_json_object(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = entries[-1].get("template") if entries else None
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{folder}: chat_template is a {type(value).__name__}, not a text")
    return value


def read_template(file: Path, most: int | None = None) -> str:
    """A Jinja source from a file; from a stranger's, of at most so many bytes. Raises ModelError when it cannot be
    read."""
    try:
        if most is not None:
            check_plain(file, most)
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"chat template {file} cannot be read: {error}") from error
