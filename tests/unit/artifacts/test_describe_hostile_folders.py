"""Folders whose small files hold anything: a model comes of them, or one line that says what is wrong."""

import json
import pickle
import random
import sys

import pytest

from pagemill.artifacts.describe import describe
from pagemill.errors import PagemillError
from pagemill.tokenizers import hf_folder
from tests.fakes.paged import PagedModel
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


@pytest.fixture
def trapped(tmp_path):
    """A folder with code that leaves a file, and that file's path: a pickle, and modules that auto_map names."""
    folder = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    trace = tmp_path / "was-run"
    leave = f"open({str(trace)!r}, 'w').close()"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer"] * 2}})
    )
    for name in ("evil.py", "configuration_evil.py", "modeling_evil.py", "__init__.py"):
        (folder / name).write_text(leave)
    # Protocol 0: builtins.eval, called with the text.
    (folder / "pytorch_model.bin").write_bytes(b"cbuiltins\neval\n(V" + leave.encode() + b"\ntR.")
    return folder, trace


@pytest.mark.slow
def test_the_pickle_of_the_trap_would_run(trapped):
    folder, trace = trapped
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert trace.exists()


def test_code_and_pickles_of_a_folder_are_never_run(trapped):
    """The architecture is known, so the model loads, with its own code; without safetensors it is one line."""
    folder, trace = trapped
    describe("m", folder)
    assert hf_folder.load(folder).encode("abc")
    assert PagedModel.load(folder, max_len=64).logits([5, 9]).isfinite().all()
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(
        PagemillError, match=r"has weights as pickles only \(\.bin, \.pt\), which are never loaded"
    ) as raised:
        describe("m", folder)
    assert "\n" not in str(raised.value)
    assert not trace.exists()
    assert not {"evil", "configuration_evil", "modeling_evil"} & set(sys.modules)
