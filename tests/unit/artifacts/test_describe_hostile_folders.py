"""Folders whose small files hold anything: a model comes of them, or one line that says what is wrong."""

import json
import random

import pytest

from pagemill.artifacts.describe import describe
from pagemill.errors import PagemillError
from pagemill.tokenizers import hf_folder
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.unit.artifacts.test_config_fields import HOSTILE

VALUES = [
    *HOSTILE, {"content": ["x"]}, {"content": 5}, [{"name": "default", "template": 5}], [{"name": [], "template": "x"}],
    [None], {"quant_method": 5}, {"quant_method": "evil"}, "", [[["x"]]],
]  # fmt: skip
CONFIG = ("rope_scaling", "rope_parameters", "quantization_config", "compression_config", "layer_types", "dtype")
GENERATION = ("eos_token_id", "temperature", "top_p", "top_k", "min_p")
TOKENIZER = ("bos_token", "eos_token", "unk_token", "add_bos_token", "chat_template", "added_tokens_decoder")


def changed(rng, content, names):
    return content | {name: rng.choice(VALUES) for name in rng.sample(names, rng.randrange(3))}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_small_files_that_hold_anything(tmp_path, seed):
    rng = random.Random(seed)
    folder = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    num_good = 0
    for _ in range(150):
        files = {
            "config.json": changed(rng, config, [*config, *CONFIG]) if rng.random() < 0.5 else config,
            "generation_config.json": changed(rng, {}, GENERATION),
            "tokenizer_config.json": changed(rng, {}, TOKENIZER),
            "special_tokens_map.json": changed(rng, {}, TOKENIZER[:3]),
        }
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        try:
            describe("m", folder)
            tokenizer = hf_folder.load(folder)
            assert tokenizer.encode("abc")
            num_good += 1
        except PagemillError as error:
            assert len(str(error)) < 1000
            assert "\n" not in str(error)
        (folder / "config.json").write_text(json.dumps(config))
    assert num_good
