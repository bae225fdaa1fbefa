"""Families that have no implementation here, and run by that of transformers: against it, in float32."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill import LLM, SamplingParams
from pagemill.artifacts.describe import describe
from pagemill.catalog.models import MODELS
from pagemill.errors import ConfigError, ModelError
from pagemill.model.models.hosted.model import check_plan
from tests.conformance.reference import TIE_GAP, compare_greedy
from tests.conformance.served_runs import PROMPTS, ask, check_tokens, serve
from tests.conformance.test_architectures import PROMPT, relative_error
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import SPECIFIC, make_checkpoint

HOSTED: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": {},
    "NemotronForCausalLM": {},
    "HeliumForCausalLM": {},
    "VaultGemmaForCausalLM": {"sliding_window": 24, "final_logit_softcapping": 20.0, "tie_word_embeddings": True},
    "FlexOlmoForCausalLM": {"num_experts": 8, "num_experts_per_tok": 2},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 4, "moe_topk": 2},
    "GPTBigCodeForCausalLM": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512},
}
MIXED = "VaultGemmaForCausalLM"
SMALL = {"num_hidden_layers": 2}


@pytest.fixture(scope="module", autouse=True)
def _known(request: pytest.FixtureRequest) -> Any:
    patch = pytest.MonkeyPatch()
    for name, changes in (HOSTED | REFUSED).items():
        if name not in SPECIFIC:
            patch.setitem(SPECIFIC, name, changes)
    yield
    patch.undo()


REFUSED: dict[str, dict[str, Any]] = {
    "DiffLlamaForCausalLM": {},
    "MptForCausalLM": {"n_layers": 2, "n_heads": 4, "d_model": 64},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
}
REASONS = {
    "DiffLlamaForCausalLM": "DiffLlamaAttention attends more than once",
    "MptForCausalLM": "takes no position_ids",
    "Lfm2ForCausalLM": "tokens see each other in other ways",
}


def reference_of(folder: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Any] = {}

    def folder(name: str) -> Any:
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("hosted"), name, num_hidden_layers=2)
        return made[name]

    return folder


def test_none_of_them_has_an_implementation_here() -> None:
    assert not set(HOSTED | REFUSED) & set(MODELS)


@pytest.mark.parametrize("name", HOSTED)
def test_logits_equal_the_reference_whole_chunked_and_one_by_one(folders: Any, name: str) -> None:
    folder = folders(name)
    with torch.inference_mode():
        theirs = reference_of(folder)(torch.tensor([PROMPT])).logits[0]
    model = PagedModel.load(folder, max_len=512)
    assert relative_error(model.logits(PROMPT), theirs) < 1e-3
    assert relative_error(model.logits(PROMPT, chunk=16), theirs) < 1e-3
    assert relative_error(model.logits(PROMPT[:40], chunk=1), theirs[:40]) < 1e-3


@pytest.mark.parametrize("name", HOSTED)
def test_requests_in_batches_and_from_the_prefix_cache_equal_the_reference(folders: Any, name: str) -> None:
    client = serve(folders(name), max_num_batched_tokens=24, max_num_seqs=2)
    ask(client)
    ask(client, "again")
    assert client.cached["longagain"] > 0
    check_tokens(client, reference_of(folders(name)), ("", "again"))


def test_preempted_requests_equal_the_reference(folders: Any) -> None:
    client = serve(folders("ApertusForCausalLM"), num_gpu_blocks_override=8, max_model_len=96)
    prompts = {name: PROMPTS["long"][start : start + 30] for name, start in (("a", 0), ("b", 7), ("c", 20))}
    ask(client, prompts=prompts)
    assert client.stats is not None
    assert client.stats.num_preemptions
    check_tokens(client, reference_of(folders("ApertusForCausalLM")), prompts=prompts)


def test_a_native_model_equals_itself_by_transformers(tmp_path: Any) -> None:
    folder = make_checkpoint(tmp_path, "Gemma3ForCausalLM")
    ours = PagedModel.load(folder, max_len=512).logits(PROMPT)
    hosted = PagedModel.load(folder, max_len=512, model_impl="transformers")
    assert type(hosted.model).__name__ == "TransformersForCausalLM"
    assert relative_error(hosted.logits(PROMPT), ours) < 1e-3


def test_layers_keep_their_window_scale_and_cap(folders: Any) -> None:
    model = PagedModel.load(folders(MIXED), max_len=512).model
    specs = [layer.kv_spec(16, "float32") for layer in model.cache_layers().values()]
    assert [getattr(spec, "window", None) for spec in specs] == [24, None]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(tmp_path: Any, name: str) -> None:
    folder = make_checkpoint(tmp_path, name, **(SMALL if "n_layers" not in REFUSED[name] else {}))
    with pytest.raises(ModelError, match=REASONS[name]):
        PagedModel.load(folder, max_len=512)


def test_tensors_that_are_missing_unknown_or_misshapen_are_named(tmp_path: Any) -> None:
    folder = make_checkpoint(tmp_path, "FlexOlmoForCausalLM", **SMALL)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert expert in tensors
    for changed, message in (
        ({name: t for name, t in tensors.items() if name != expert}, f"lacks tensors of the architecture: {expert}"),
        (tensors | {"model.layers.0.extra.weight": torch.ones(2)}, "does not use: model.layers.0.extra.weight"),
        (tensors | {expert: torch.ones(3, 3)}, rf"{expert} has shape \(3, 3\), expected \(96, 64\)"),
        (tensors | {"model.norm.weight": torch.ones(3)}, r"model.norm.weight has shape \(3,\), expected \(64,\)"),
    ):
        save_file(changed, file)
        with pytest.raises(ModelError, match=message):
            PagedModel.load(folder, max_len=512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "no causal language model of that name"),
        ({"model_type": "no_such"}, "no causal language model of model_type 'no_such'"),
        (
            {"auto_map": {"AutoModelForCausalLM": "code.Model"}, "architectures": ["X"]},
            "code of a model's folder",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is not allowed"),
        ({"hidden_act": "no_such"}, "cannot be built"),
        ({"vocab_size": "many"}, "cannot read its config"),
        ({"hidden_size": 10**12}, "hidden_size=1000000000000 is not allowed"),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line(folders: Any, tmp_path: Any, changes: Any, message: str) -> None:
    for file in folders("ApertusForCausalLM").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message) as raised:
        PagedModel.load(tmp_path, max_len=512)
    assert "\n" not in str(raised.value)


def test_who_computes_can_be_chosen(folders: Any) -> None:
    folder = folders("ApertusForCausalLM")
    assert describe("x", folder).implementation == "transformers"
    for native in ("native", "vllm"):
        with pytest.raises(ModelError, match=f"model_impl='{native}' keeps the implementation of transformers"):
            describe("x", folder, model_impl=native)


def test_more_than_one_stage_is_refused(folders: Any) -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 and .* cannot be cut into stages"):
        serve(folders("ApertusForCausalLM"), pipeline_parallel_size=2)


def test_two_tensor_parallel_ranks_equal_the_reference(folders: Any) -> None:
    folder = folders("ApertusForCausalLM")
    reference = reference_of(folder)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(folder), dtype="float32", tensor_parallel_size=2, max_num_batched_tokens=32) as llm:
        for output in llm.generate(list(PROMPTS.values()), params, use_tqdm=False):
            difference = compare_greedy(reference, list(output.prompt_token_ids), list(output.outputs[0].token_ids))
            assert difference is None or difference.gap < TIE_GAP, difference


def test_a_model_that_transformers_splits_in_other_ways_is_refused_over_several_ranks() -> None:
    with pytest.raises(ConfigError, match="no plan to split it"):
        check_plan("it", {}, {"num_attention_heads": 4}, 2)
    with pytest.raises(ConfigError, match="does not divide num_key_value_heads=3"):
        check_plan("it", {"a": "colwise"}, {"num_attention_heads": 6, "num_key_value_heads": 3}, 2)
    with pytest.raises(ConfigError, match=r"splits model.layers.0.mlp.experts as 'moe_tp_experts'"):
        check_plan("it", {"model.layers.*.mlp.experts": "moe_tp_experts"}, {"num_attention_heads": 4}, 2)
