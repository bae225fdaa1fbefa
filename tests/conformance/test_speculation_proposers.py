"""Drafts of a second model change no token: with chunked prompts, shared prefixes, preemption and other companions; and
a model that guesses for itself is right."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.errors import ConfigError, ModelError
from pagemill.launch import build_config
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_gguf import convert

NUM_DRAFTS = 4
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SETTINGS = {
    "device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 64, "block_size": 8,
}  # fmt: skip
SHARED = [11, 12, 13, 14] * 5
PROMPTS = {
    "short": [5],
    "chunked": list(range(20, 90)),
    "first": [*SHARED, 7],
    "second": [*SHARED, 8, 9],
    "again": [*SHARED, 7],
    "whole": SHARED[:16],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def checkpoint(name, seed=0, **changes):
        key = (name, seed, *sorted(changes))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp("tiny"), name, seed, **changes)
        return str(made[key])

    return checkpoint


class Run:
    """Requests in waves of three, so that later ones find what earlier ones left."""

    def __init__(self, checkpoint, speculative=None, depth=1, params=None, prompts=PROMPTS, **settings):
        settings = SETTINGS | settings
        if speculative is not None:
            settings["speculative_config"] = {"num_speculative_tokens": NUM_DRAFTS, "adaptive": False} | speculative
        config = build_config(EngineArgs(checkpoint, **settings))
        core = EngineCore(config, UniprocExecutor(Worker(config)), depth=depth)
        client = Client(core)
        self.num_steps = 0
        names = list(prompts)
        for start in range(0, len(names), 3):
            for name in names[start : start + 3]:
                client.add(
                    core_request(name, prompts[name], **({"temperature": 0.0, "max_tokens": 40} | (params or {})))
                )
            while core.has_work():
                client.step()
                self.num_steps += 1
        core.check_integrity()
        self.stats = core.stats()
        core.shutdown()
        self.tokens = client.tokens
        self.finish = client.finish

    @property
    def acceptance(self):
        """Share of drafts that were right."""
        return self.stats.drafts.num_accepted_tokens / self.stats.drafts.num_draft_tokens


def draft_of(model, **fields):
    return {"method": "draft_model", "model": model} | fields


def compare(checkpoint, speculative, **options):
    plain = Run(checkpoint, **options)
    drafted = Run(checkpoint, speculative, **options)
    assert drafted.tokens == plain.tokens
    assert drafted.finish == plain.finish
    return plain, drafted


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_speculation_with_a_small_model_changes_no_text(checkpoints, seed, depth):
    target = checkpoints("LlamaForCausalLM", seed)
    small = checkpoints("LlamaForCausalLM", seed + 10, **SMALL)
    _, drafted = compare(target, draft_of(small), depth=depth)
    assert drafted.stats.drafts.num_draft_tokens > 100


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_speculation_of_a_model_for_itself_is_right(checkpoints, seed, depth):
    target = checkpoints("LlamaForCausalLM", seed)
    plain, drafted = compare(target, draft_of(target), depth=depth)
    assert drafted.acceptance > 0.99
    assert drafted.num_steps < 0.5 * plain.num_steps


def test_speculation_is_right_after_preemption(checkpoints):
    target = checkpoints("LlamaForCausalLM")
    plain, drafted = compare(target, draft_of(target), num_gpu_blocks_override=19)
    assert plain.stats.num_preemptions
    assert drafted.stats.num_preemptions
    assert drafted.acceptance > 0.99


def test_speculation_is_right_in_blocks_that_were_found(checkpoints):
    target = checkpoints("LlamaForCausalLM")
    prompts = {str(number): [*SHARED * 3, number + 30] for number in range(9)}
    _, drafted = compare(target, draft_of(target), prompts=prompts)
    assert drafted.stats.prefix_cache_hits > 6 * 48
    assert drafted.acceptance > 0.99
    _, without = compare(target, draft_of(target), prompts=prompts, enable_prefix_caching=False)
    assert without.tokens == drafted.tokens


@pytest.mark.parametrize("target", ["Gemma3ForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM"])
def test_speculation_where_layers_keep_unlike_things(checkpoints, target):
    """Windows, and a draft model of another family: groups of their own."""
    _, drafted = compare(checkpoints(target), draft_of(checkpoints("Qwen3ForCausalLM", 3, num_hidden_layers=2)))
    assert drafted.stats.drafts.num_draft_tokens > 100
    _, own = compare(checkpoints(target), draft_of(checkpoints(target)))
    assert own.acceptance > 0.99


def test_speculation_of_sampled_text(checkpoints):
    params = {"temperature": 0.8, "top_k": 20, "seed": 7}
    _, drafted = compare(checkpoints("LlamaForCausalLM"), draft_of(checkpoints("LlamaForCausalLM")), params=params)
    assert 0 < drafted.acceptance < 1


def test_speculation_that_adapts(checkpoints):
    target = checkpoints("LlamaForCausalLM")
    small = checkpoints("LlamaForCausalLM", 10, **SMALL)
    compare(target, draft_of(small, adaptive=True))
    compare(target, draft_of(target, adaptive=True))
    compare(target, draft_of(target, disable_by_batch_size=2))


def test_speculation_as_far_as_the_draft_model_knows_positions(checkpoints):
    target = checkpoints("LlamaForCausalLM")
    whole = Run(target, draft_of(target))
    _, drafted = compare(target, draft_of(target, max_model_len=64))
    assert 0 < drafted.stats.drafts.num_draft_tokens < whole.stats.drafts.num_draft_tokens
    assert drafted.acceptance > 0.99


def test_speculation_up_to_the_longest_text(checkpoints):
    target = checkpoints("LlamaForCausalLM")
    _, drafted = compare(target, draft_of(target), max_model_len=72, params={"max_tokens": 71})
    assert drafted.finish["first"].reason.value == "length"
    assert drafted.acceptance > 0.99


def test_speculation_with_a_quantized_draft_model(checkpoints):
    target = checkpoints("LlamaForCausalLM")
    _, drafted = compare(target, draft_of(target, quantization="int8"), dtype="bfloat16")
    assert drafted.acceptance > 0.5


def test_speculation_with_a_draft_model_in_a_gguf_file(checkpoints, tmp_path):
    target = checkpoints("LlamaForCausalLM")
    _, drafted = compare(target, draft_of(str(convert(Path(target), tmp_path / "draft.gguf"))))
    assert drafted.acceptance > 0.5


def broken(folder, checkpoint, token_id):
    """A copy whose embedding of a token is not a number."""
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    [name] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors["lm_head.weight"] = tensors[name].clone()
    tensors[name][token_id] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    return str(folder)


def test_speculation_with_a_broken_draft_model_only_loses_its_drafts(checkpoints, tmp_path):
    target = checkpoints("LlamaForCausalLM")
    draft = broken(tmp_path / "broken", target, 5)
    _, drafted = compare(target, draft_of(draft), prompts={"of it": [5], "without": [9, 8, 7]})
    assert 20 < drafted.stats.drafts.num_draft_tokens <= 45, "of the other request alone"
    assert drafted.acceptance > 0.9


REFUSED = [
    ({"vocab_size": 300}, "has a vocabulary of 300 tokens, and .* one of 320"),
    ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2 is not supported"),
    ({"max_model_len": 256}, "max_model_len=256 is more than the 128 tokens"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_speculation_refuses_a_draft_model_that_does_not_go_with_the_model(checkpoints, changes, message):
    target = checkpoints("LlamaForCausalLM")
    small = checkpoints("LlamaForCausalLM", 10, **SMALL, **{k: v for k, v in changes.items() if k == "vocab_size"})
    fields = {name: value for name, value in changes.items() if name != "vocab_size"}
    with pytest.raises(ConfigError, match=f"speculative_config: .*{message}"):
        Run(target, draft_of(small, **fields))


def test_speculation_refuses_a_draft_model_whose_tokens_are_others(checkpoints, tmp_path):
    target = checkpoints("LlamaForCausalLM")
    other = tmp_path / "other"
    shutil.copytree(target, other)
    file = other / "tokenizer.json"
    text = file.read_text()
    file.write_text(text.replace('"A":', '"?":').replace('"B":', '"A":').replace('"?":', '"B":'))
    with pytest.raises(
        ConfigError, match=r"model='.*' has another vocabulary than .*: token \d+ is 'B' there, and 'A'"
    ):
        Run(target, draft_of(str(other)))


def test_speculation_with_a_draft_model_that_cannot_be_loaded_fails_the_start(checkpoints, tmp_path):
    target = checkpoints("LlamaForCausalLM")
    with pytest.raises(ModelError, match=r"speculative_config: model='/nowhere': .*no such file or folder"):
        Run(target, draft_of("/nowhere"))
    damaged = tmp_path / "damaged"
    shutil.copytree(target, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors.pop(next(name for name in tensors if "q_proj" in name))
    save_file(tensors, damaged / "model.safetensors")
    with pytest.raises(ModelError, match=r"speculative_config: model='.*damaged': .*q_proj"):
        Run(target, draft_of(str(damaged)))
    with pytest.raises(ConfigError, match="method='draft_model' needs model"):
        Run(target, {"method": "draft_model"})
