"""`load_tokenizer`: the tokenizer of a folder or a .gguf file; `tokenizer_of`: that of a configuration.

Knows nothing about the model that its tokens are for.
"""

from pathlib import Path

from pagemill.artifacts.describe import locate
from pagemill.config.facts import ModelFacts
from pagemill.config.sections import ModelConfig
from pagemill.errors import ModelError
from pagemill.tokenizers import gguf_tokenizer, hf_folder
from pagemill.tokenizers.hf_tokenizer import HfTokenizer
from pagemill.tokenizers.interface import Tokenizer
from pagemill.tokenizers.no_tokenizer import NoTokenizer
from pagemill.tokenizers.template_budget import max_value_of


def load_tokenizer(path: Path, chat_template_file: str | None = None) -> HfTokenizer:
    """Load it; a chat template from `chat_template_file` replaces the model's.

    Raises ModelError when something is missing, damaged, or of a kind that is not supported.
    """
    template = None if chat_template_file is None else hf_folder.read_template(Path(chat_template_file).expanduser())
    if path.is_dir():
        return hf_folder.load(path, template)
    if path.is_file():
        return gguf_tokenizer.load(path, template)
    raise ModelError(f"{path}: no such file or folder")


def tokenizer_of(model: ModelConfig, facts: ModelFacts) -> Tokenizer:
    """The tokenizer that the settings ask for: the model's own, another that is named, or none. Raises ModelError."""
    if model.skip_tokenizer_init:
        return NoTokenizer()
    tokenizer = load_tokenizer(_path_of(model, facts), chat_template_file=model.chat_template)
    tokenizer.max_chat_chars = max_value_of(model.max_model_len)
    tokenizer.parses_control_tokens_of_prompts = model.parse_control_tokens != "none"
    tokenizer.parses_control_tokens_of_chats = model.parse_control_tokens == "all"
    return tokenizer


def _path_of(model: ModelConfig, facts: ModelFacts) -> Path:
    revision = model.tokenizer_revision
    if model.tokenizer is None and revision is None:
        return Path(facts.path)
    name = model.tokenizer or model.model
    if revision is None and name == model.model:
        revision = model.revision
    return locate(name, revision, model.download_dir, weights=False, ignore_patterns=model.ignore_patterns)
