"""Choosing a backend: the first that fits, the requested one, or every reason why not; golden orders for GPUs."""

import dataclasses

import pytest

from pagemill.catalog.attention import ATTENTION, cuda_order, register_backend
from pagemill.errors import ConfigError
from pagemill.model.attention import flash_providers, interface
from pagemill.model.attention.backends.triton_attn import TritonBackend
from pagemill.model.attention.capability import AttentionContext, AttentionLayerSpec
from pagemill.model.attention.known_elsewhere import KNOWN_ELSEWHERE
from pagemill.model.attention.selector import BackendPreferences, BackendSelector, choose

SPEC = AttentionLayerSpec(4, 2, 64, 0.125)
SM80, SM90, SM100 = AttentionContext((8, 0)), AttentionContext((9, 0)), AttentionContext((10, 0))


class OwnBackend(TritonBackend):
    name = "OWN"


@pytest.fixture
def everything_installed(monkeypatch):
    monkeypatch.setattr(flash_providers, "find_spec", lambda name: name)
    monkeypatch.setattr(flash_providers, "_in_package", lambda package, folder: True)
    monkeypatch.setattr(flash_providers, "_torch_takes_blocks", lambda: True)
    monkeypatch.setattr(interface, "find_spec", lambda name: name)
    flash_providers.providers.cache_clear()
    yield
    flash_providers.providers.cache_clear()


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(flash_providers, "providers", lambda compute: [])
    monkeypatch.setattr("pagemill.model.attention.backends.flash_attn.providers", lambda compute: [])
    monkeypatch.setattr(interface, "find_spec", lambda name: None if name == "flashinfer" else name)


@pytest.fixture
def registry():
    before = dict(ATTENTION._paths)
    yield
    ATTENTION._paths = before


def on_gpu(where, spec=SPEC, dtype="bfloat16", requested=None, mla=False):
    return choose(spec, "cuda", dtype, requested, cuda_order(where.compute, mla), where)


def test_the_first_that_fits_is_taken():
    assert choose(SPEC, "cpu", "float16", None, ("CPU_ATTN", "TORCH_CPU")).name == "TORCH_CPU"


def test_a_requested_backend_that_does_not_fit_says_why():
    with pytest.raises(ConfigError, match=r"CPU_ATTN is not valid .* \['dtype float16 not supported'"):
        choose(SPEC, "cpu", "float16", "CPU_ATTN", ("TORCH_CPU",))


def test_every_reason_is_listed_when_none_fits():
    with pytest.raises(ConfigError, match=r"CPU_ATTN: device tpu not supported.*TORCH_CPU: device tpu not supported"):
        choose(SPEC, "tpu", "float32", None, ("CPU_ATTN", "TORCH_CPU"))


def test_what_is_asked_of_backends_is_told_in_words():
    spec = AttentionLayerSpec(4, 2, 64, 0.1, window=16, has_sinks=True, alibi_slopes=(0.5, 0.25, 0.1, 0.1))
    with pytest.raises(
        ConfigError, match=r"can run 4 heads \(2 of keys\) of size 64, window=16, has_sinks, alibi_slopes in"
    ):
        choose(spec, "tpu", "float32", None, ("CPU_ATTN",))


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match=r"unknown attention backend 'FLASH'; known: CPU_ATTN, .*, TRITON_ATTN"):
        choose(SPEC, "cpu", "float32", "FLASH", ())


def test_orders_of_gpus():
    ampere = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TRITON_INVARIANT", "FLEX_ATTENTION", "TORCH_PAGED")
    assert cuda_order((8, 0)) == cuda_order((8, 9)) == cuda_order((9, 0)) == cuda_order((7, 5)) == ampere
    assert cuda_order((10, 0)) == ("FLASHINFER", "FLASH_ATTN", *ampere[2:])
    assert cuda_order((10, 0), mla=True) == (
        "FLASHINFER_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA", "FLASHMLA_SPARSE",
        "FLASHINFER_MLA_SPARSE",
    )  # fmt: skip
    assert cuda_order((9, 0), mla=True) == (
        "FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA", "FLASHMLA_SPARSE"
    )  # fmt: skip


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize(
    ("compute", "spec", "dtype", "settings", "expected"),
    [
        ((8, 0), {}, "bfloat16", {}, "FLASH_ATTN"),
        ((9, 0), {}, "bfloat16", {}, "FLASH_ATTN"),
        ((10, 0), {}, "bfloat16", {}, "FLASHINFER"),
        ((7, 5), {}, "float16", {}, "FLASHINFER"),
        ((9, 0), {}, "float32", {}, "TRITON_ATTN"),
        ((10, 0), {"head_size": 96}, "bfloat16", {}, "FLASH_ATTN"),
        ((9, 0), {"head_size": 512}, "bfloat16", {}, "TRITON_ATTN"),
        ((9, 0), {"has_sinks": True}, "bfloat16", {}, "TRITON_ATTN"),
        ((9, 0), {"chunk_size": 64}, "bfloat16", {}, "TRITON_ATTN"),
        ((9, 0), {"alibi_slopes": (0.5,) * 4}, "bfloat16", {}, "TRITON_ATTN"),
        ((9, 0), {"soft_cap": 30.0, "window": 64}, "bfloat16", {}, "FLASH_ATTN"),
        ((9, 0), {}, "bfloat16", {"kv_cache_dtype": "fp8"}, "FLASHINFER"),
        ((9, 0), {"head_size": 96}, "bfloat16", {"kv_cache_dtype": "fp8"}, "TRITON_ATTN"),
        ((9, 0), {}, "bfloat16", {"block_size": 128}, "FLASH_ATTN"),
        ((10, 0), {}, "bfloat16", {"block_size": 128}, "FLASH_ATTN"),
        ((9, 0), {}, "bfloat16", {"deterministic": True}, "TRITON_INVARIANT"),
        ((9, 0), {}, "bfloat16", {"block_size": 24}, "FLEX_ATTENTION"),
    ],
)
def test_what_is_chosen_on_gpus(compute, spec, dtype, settings, expected):
    where = AttentionContext(compute, **settings)
    assert on_gpu(where, dataclasses.replace(SPEC, **spec), dtype).name == expected


@pytest.mark.usefixtures("nothing_installed")
def test_without_packages_triton_runs():
    assert on_gpu(SM90) is TritonBackend
    with pytest.raises(ConfigError, match=r"\['FlashAttention not installed \(torch >= 2.12, flash-attn, flash_attn"):
        on_gpu(SM90, requested="FLASH_ATTN")
    with pytest.raises(ConfigError, match=r"\['the package flashinfer is not installed'\]"):
        on_gpu(SM90, requested="FLASHINFER")


def test_the_documented_message():
    with pytest.raises(ValueError) as caught:
        on_gpu(dataclasses.replace(SM80, mla=True), requested="FLASHMLA")
    assert str(caught.value) == (
        "Selected backend FLASHMLA is not valid for this configuration. Reason: ['compute capability not supported']"
    )
    with pytest.raises(ConfigError, match=r"Reason: \['pagemill has no implementation of it'\]"):
        on_gpu(dataclasses.replace(SM90, mla=True), requested="FLASHMLA")


def test_all_reasons_are_listed_for_a_gpu():
    mla = dataclasses.replace(SM100, mla=True)
    with pytest.raises(ConfigError) as caught:
        choose(SPEC, "cuda", "float32", None, ("FLASHMLA", "TRITON_ATTN", "FLASHMLA_SPARSE"), mla)
    assert "FLASHMLA: dtype float32 not supported; TRITON_ATTN: MLA not supported" in str(caught.value)
    assert "FLASHMLA_SPARSE: dtype float32 not supported, head size 64 not supported, non-sparse" in str(caught.value)


@pytest.mark.usefixtures("everything_installed")
def test_the_version_of_flash_attention_can_be_asked_for():
    def provider(**settings):
        return on_gpu(AttentionContext((9, 0), **settings), requested="FLASH_ATTN").impl.provider

    assert (provider().name, provider().version) == ("flash_attn_interface", 3)
    assert (provider(flash_attn_version=2).name, provider(block_size=16).version) == ("vllm.vllm_flash_attn", 3)
    assert on_gpu(SM90) is on_gpu(SM90), "one class, so that layers are planned together"
    with pytest.raises(ConfigError, match=r"\['FlashAttention 3 not installed"):
        on_gpu(AttentionContext((8, 0), flash_attn_version=3), requested="FLASH_ATTN")


def test_layers_and_phases_have_backends_of_their_own():
    wishes = BackendPreferences("TORCH_CPU", layers={"*.1.attn": "FLEX_ATTENTION", "*.attn": "TRITON_ATTN"})
    assert wishes.of("model.1.attn") == "FLEX_ATTENTION"
    assert wishes.of("model.2.attn") == "TRITON_ATTN"
    assert wishes.of("other") == "TORCH_CPU"
    order = cuda_order((9, 0))
    both = BackendSelector(
        "cuda", "bfloat16", order, BackendPreferences(prefill="FLEX_ATTENTION", decode="TRITON_ATTN"), SM90
    )
    assert both(SPEC).name == "FLEX_ATTENTION+TRITON_ATTN"
    assert both(SPEC) is both(SPEC)
    only = BackendSelector("cuda", "bfloat16", order, BackendPreferences("TRITON_ATTN", prefill="TRITON_ATTN"), SM90)
    assert only(SPEC) is TritonBackend
    with pytest.raises(ConfigError, match="keep the KV cache in different shapes"):
        mixed = BackendPreferences(prefill="TORCH_PAGED", decode="TRITON_ATTN")
        BackendSelector("cuda", "bfloat16", order, mixed, SM90)(SPEC)


@pytest.mark.usefixtures("registry")
def test_a_backend_of_ones_own():
    register_backend("OWN", f"{__name__}:OwnBackend")
    assert on_gpu(SM90, requested="OWN") is OwnBackend
    register_backend("FLASH_ATTN", f"{__name__}:OwnBackend")
    assert on_gpu(SM90) is OwnBackend, "in place of the first of the order"
    with pytest.raises(ConfigError, match="not of the form"):
        register_backend("FLASH_ATTN", "nonsense")
    assert on_gpu(SM90) is OwnBackend


def test_every_name_of_the_catalogue_says_what_it_can_do():
    for name in ATTENTION:
        backend = ATTENTION.resolve(name)
        assert backend.name == name
        assert backend.unsupported(SPEC, "nowhere", "float32")


def test_a_cpu_keeps_the_models_own_type():
    one_byte = AttentionContext(kv_cache_dtype="fp8", block_size=16)
    allowed = (
        r"^kv_cache_dtype='fp8' is not supported on cpu in float32; allowed: auto, float32, int8, int8_per_token_head$"
    )
    with pytest.raises(ConfigError, match=allowed):
        choose(SPEC, "cpu", "float32", None, ("CPU_ATTN", "CPU_ENCODER", "TORCH_CPU"), one_byte)
    same = AttentionContext(kv_cache_dtype="float32")
    assert choose(SPEC, "cpu", "float32", "TORCH_CPU", (), same).name == "TORCH_CPU"
    with pytest.raises(ConfigError, match="kv cache dtype bfloat16 not supported"):
        choose(SPEC, "cpu", "float32", "TORCH_CPU", (), AttentionContext(kv_cache_dtype="bfloat16"))


@pytest.mark.parametrize("name", ["int8", "int8_per_token_head"])
def test_integers_are_for_cpus(name):
    """Native where blocks and heads are multiples of 16, else in torch; GPUs say what they can keep."""
    where = AttentionContext(kv_cache_dtype=name, block_size=16)
    order = ("CPU_ATTN", "TORCH_CPU")
    native = ATTENTION.resolve("CPU_ATTN").unsupported(SPEC, "cpu", "bfloat16") == []
    assert choose(SPEC, "cpu", "bfloat16", None, order, where).name == ("CPU_ATTN" if native else "TORCH_CPU")
    narrow = dataclasses.replace(SPEC, head_size=24)
    assert choose(narrow, "cpu", "bfloat16", None, order, where).name == "TORCH_CPU"
    with pytest.raises(
        ConfigError, match=rf"head size 24 not supported with kv cache dtype {name} \(allowed: multiples"
    ):
        choose(narrow, "cpu", "bfloat16", "CPU_ATTN", (), where)
    with pytest.raises(
        ConfigError, match=rf"block size 8 not supported with kv cache dtype {name} \(allowed: multiples"
    ):
        choose(SPEC, "cpu", "bfloat16", "CPU_ATTN", (), dataclasses.replace(where, block_size=8))
    with pytest.raises(ConfigError, match=rf"kv cache dtype {name} not supported \(allowed: auto, bfloat16, fp8"):
        choose(SPEC, "cuda", "bfloat16", "TRITON_ATTN", (), where)


@pytest.mark.parametrize("name", KNOWN_ELSEWHERE)
def test_a_backend_of_other_engines_is_refused_with_its_reasons(name):
    assert name not in ATTENTION
    with pytest.raises(ConfigError, match=f"Selected backend {name} is not valid .*device nowhere not supported"):
        choose(SPEC, "nowhere", "float32", name, ())
