import pytest

from pagemill.catalog.platforms import PLATFORMS
from pagemill.errors import ConfigError
from pagemill.platforms import cuda
from pagemill.platforms.choose import choose_platform
from pagemill.platforms.cuda import CudaPlatform


@pytest.fixture
def no_driver(monkeypatch):
    """A machine without a GPU, and a torch that could use one."""

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)


class FakeManagement:
    """One GPU, as the driver's library answers."""

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        self.index = index.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total, memory._obj.free = 100, 60
        return 0

    def nvmlDeviceGetName(self, handle, title, size):
        title.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = 9, 0
        return 0


@pytest.fixture
def driver(monkeypatch):
    library = FakeManagement()
    monkeypatch.setattr(cuda, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


def test_auto_takes_the_cpu_where_there_is_no_gpu(no_driver):
    assert choose_platform("auto").name == "cpu"


def test_a_device_that_is_not_here_is_refused_with_the_reason(no_driver):
    with pytest.raises(
        ConfigError, match=r"device='cuda' cannot be used: the NVIDIA driver is not here .*--device cpu"
    ):
        choose_platform("cuda")


def test_a_torch_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(cuda, "_torch_has_cuda", lambda: False)
    assert "without CUDA" in CudaPlatform().absence()


def test_auto_prefers_a_gpu(driver):
    platform = choose_platform("auto")
    facts = platform.facts()
    assert platform.name == facts.kind == "cuda"
    assert (facts.title, facts.capability, facts.free_bytes) == ("NVIDIA H200", (9, 0), 60)
    assert facts.runs_ahead and facts.captures and facts.fast_dtypes[0] == "bfloat16"


def test_hidden_gpus_do_not_count(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert CudaPlatform().absence() == "the driver shows no GPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert CudaPlatform().absence() is None
    CudaPlatform().facts()
    assert driver.index == 1


def test_every_platform_of_the_catalog_has_its_name():
    assert [PLATFORMS.resolve(name)().name for name in PLATFORMS] == list(PLATFORMS)
