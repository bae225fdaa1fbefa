"""All layers as one native call: the same as the layers one by one, to the last bit."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.model.kernels.native import library
from pagemill.model.models import causal_lm
from pagemill.model.network.native_plan import NotPlannable
from tests.fakes.paged import PagedModel
from tests.fakes.stored_formats import gptq, store
from tests.fakes.tiny_checkpoint import PLANNABLE, make_checkpoint
from tests.fakes.tiny_families import FAMILIES
from tests.marks import slow

pytestmark = pytest.mark.cases(one_in=5)

TOKENS = [random.Random(0).randrange(3, 259) for _ in range(90)]


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise NotPlannable("for comparison")

    monkeypatch.setattr(causal_lm, "make_plan", refuse)


@pytest.fixture(autouse=True)
def native() -> None:
    found = library()
    if found is None or found.isa() == b"portable":
        pytest.skip("this machine has no native plan")


def logits(path: Path, chunk: int | None, *, planned: bool, kv_cache_dtype: str = "auto") -> torch.Tensor:
    model = PagedModel.load(path, "bfloat16", kv_cache_dtype=kv_cache_dtype)
    result = model.logits(TOKENS, chunk)
    assert (model.model._plan is not None) == planned
    return result


@pytest.mark.parametrize("architecture", PLANNABLE)
@pytest.mark.parametrize("chunk", [None, slow(1), 3, slow(40)])
def test_every_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, chunk: int) -> None:
    path = make_checkpoint(tmp_path, architecture)
    found = logits(path, chunk, planned=True)
    one_by_one(monkeypatch)
    assert torch.equal(found, logits(path, chunk, planned=False))


@pytest.mark.parametrize("architecture", PLANNABLE)
def test_a_cache_of_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Planned or not, whole or in chunks, the same bits; and they are about those of bfloat16."""
    path = make_checkpoint(tmp_path, architecture)
    found = logits(path, None, planned=True, kv_cache_dtype="int8")
    assert torch.equal(found, logits(path, 7, planned=True, kv_cache_dtype="int8"))
    wide = logits(path, None, planned=True)
    assert not torch.equal(found, wide)
    torch.testing.assert_close(found, wide, rtol=0, atol=float(wide.abs().max()) * 0.05)
    one_by_one(monkeypatch)
    assert torch.equal(found, logits(path, None, planned=False, kv_cache_dtype="int8"))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [slow(1), 2, slow(3)])
def test_chunks_and_threads_change_nothing(tmp_path: Path, threads: int) -> None:
    path = make_checkpoint(tmp_path, "Gemma3ForCausalLM")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = logits(path, None, planned=True)
        torch.set_num_threads(threads)
        for chunk in (1, 2, 4, 5, 33):
            assert torch.equal(logits(path, chunk, planned=True), alone)
    finally:
        torch.set_num_threads(before)


def test_what_cannot_be_planned_runs_layer_by_layer(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "LlamaForCausalLM")
    model = PagedModel.load(path, "float32")
    model.logits(TOKENS)
    assert model.model._plan is None
    model = PagedModel.load(path, "bfloat16", backend="TORCH_CPU")
    model.logits(TOKENS)
    assert model.model._plan is None


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("GPTNeoXForCausalLM", {"use_parallel_residual": False}),
        ("GPTNeoXForCausalLM", {"attention_bias": False, "hidden_act": "gelu_new"}),
        ("OPTForCausalLM", {"activation_function": "gelu"}),
        ("OPTForCausalLM", {"enable_bias": False, "activation_function": "silu"}),
    ],
)
def test_layer_norms_and_plain_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, changes: dict
) -> None:
    path = make_checkpoint(tmp_path, architecture, **changes)
    found = logits(path, 7, planned=True)
    wide = PagedModel.load(path).logits(TOKENS)
    assert (found - wide).abs().max() < 0.05 * wide.abs().max()
    one_by_one(monkeypatch)
    assert torch.equal(found, logits(path, 7, planned=False))


@pytest.mark.parametrize("chunk", [None, 1, 3, slow(40)])
@pytest.mark.parametrize(
    "family",
    [
        *("granite", "exaone4", slow("exaone4-full"), "gemma4", slow("gemma4-key-is-value"), "olmo2", slow("olmo3")),
        *("gemma3n", slow("gemma3n-alone"), slow("granite-biases")),
        *("qwen2-moe", slow("olmoe"), "glm4-moe", "gpt-oss", "bloom", slow("falcon-rw")),
        *("deepseek-v2", slow("deepseek-v3"), "llama4", slow("llama4-two-experts"), "phi-qk-norm", "gemma4-experts"),
    ],
)
def test_families_with_more_than_the_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, chunk: int | None
) -> None:
    """Factors on what layers add, norms behind attention and MLP, several streams, experts, sinks, ALiBi, latent
    vectors, norms behind rotary embedding."""
    architecture, changes = FAMILIES[family]
    path = make_checkpoint(tmp_path, architecture, **changes)
    found = logits(path, chunk, planned=True)
    one_by_one(monkeypatch)
    assert torch.equal(found, logits(path, chunk, planned=False))


@pytest.mark.parametrize(
    "family", ["gemma3n", slow("gemma4"), "qwen2-moe", "deepseek-dense", slow("deepseek-v2"), slow("llama4")]
)
def test_many_rows_on_two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Enough that threads share rows and not panels."""
    architecture, changes = FAMILIES[family]
    path = make_checkpoint(tmp_path, architecture, **changes)
    tokens = TOKENS * 3
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        model = PagedModel.load(path, "bfloat16")
        found = model.logits(tokens)
        assert model.model._plan is not None
        one_by_one(monkeypatch)
        assert torch.equal(found, PagedModel.load(path, "bfloat16").logits(tokens))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}])
def test_inputs_in_an_order_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict) -> None:
    """GPTQ with activation order: inputs of each layer, and of the head, change places within the call. Layers one by
    one, of a few rows and of many, give the same bits."""
    changes |= {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
    path = make_checkpoint(tmp_path / "model", "LlamaForCausalLM", **changes)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "lm_head": True}
    packed, _ = store(path, tmp_path, config, lambda weight: gptq(weight, 4, 32, ordered=True))
    tensors = load_file(packed / "model.safetensors")
    head, _ = gptq(tensors.pop("lm_head.weight"), 4, 32, ordered=True)
    stored = {f"lm_head.{kind}": tensor.clone().contiguous() for kind, tensor in head.items()}
    save_file(tensors | stored, packed / "model.safetensors", {"format": "pt"})
    found = {chunk: logits(packed, chunk, planned=True) for chunk in (None, 1, 20)}
    assert torch.equal(found[1], found[None])
    assert torch.equal(found[20], found[None])
    one_by_one(monkeypatch)
    assert torch.equal(found[None], logits(packed, None, planned=False))


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True}, {"mlp_bias": True}, {"mlp_bias": True, "hidden_act": "gelu_new"}]
)
def test_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict) -> None:
    path = make_checkpoint(tmp_path, "LlamaForCausalLM", **changes)
    found = logits(path, 7, planned=True)
    one_by_one(monkeypatch)
    assert torch.equal(found, logits(path, 7, planned=False))


@pytest.mark.parametrize("family", ["stablelm-12b", slow("cohere-qk-norm")])
def test_a_layer_norm_of_each_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Which torch computes where layers run one by one: the same but for rounding."""
    architecture, changes = FAMILIES[family]
    path = make_checkpoint(tmp_path, architecture, **changes)
    found = logits(path, None, planned=True)
    assert torch.equal(found, logits(path, 7, planned=True))
    one_by_one(monkeypatch)
    one = logits(path, None, planned=False)
    assert (found - one).abs().max() < 0.02 * one.abs().max()
