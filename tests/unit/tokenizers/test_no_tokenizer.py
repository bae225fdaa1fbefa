from pathlib import Path

import pytest

from pagemill.config.facts import ModelFacts
from pagemill.errors import RequestError
from pagemill.tokenizers.load import tokenizer_of
from pagemill.tokenizers.no_tokenizer import NoTokenizer
from tests.fakes.configs import model_config


def test_it_makes_no_text_and_takes_none():
    tokenizer = NoTokenizer()
    decoder = tokenizer.incremental([1, 2])
    assert decoder.step([3, 4]) + decoder.flush() + tokenizer.decode([5]) == ""
    with pytest.raises(RequestError, match="prompt_token_ids"):
        tokenizer.encode("text")
    with pytest.raises(RequestError, match="conversations need a tokenizer"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_the_settings_choose_it(tmp_path: Path):
    """The folder has no tokenizer, and none is looked for."""
    facts = ModelFacts("m", str(tmp_path), "dummy", "LlamaForCausalLM", {}, "bfloat16", 512, 320)
    assert isinstance(tokenizer_of(model_config(skip_tokenizer_init=True), facts), NoTokenizer)
