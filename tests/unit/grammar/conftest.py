import pytest

from tests.fakes.byte_vocabulary import Following


@pytest.fixture(scope="session", params=["guidance", "xgrammar"])
def vocabulary(request):
    """One token for each byte, and one that ends an output; followed by each backend."""
    return Following(request.param)
