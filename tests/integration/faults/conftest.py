"""What all parts of the lab share: a tiny random model whose every token is a word, so that texts tell tokens."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.fakes.tiny_checkpoint import VOCAB_SIZE, make_checkpoint
from tests.integration.faults.lab import Server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """The logs of servers that several tests share belong to the report of a failure."""
    report = yield
    if report.failed:
        for name, value in item.funcargs.items():
            if isinstance(value, Server) and value.log_path.exists():
                report.sections.append((f"log of {name}, exit status {value.process.poll()}", value.log[-20_000:]))
    return report


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("lab"), "LlamaForCausalLM")
    tokenizer = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCAB_SIZE)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "t1", "eos_token": "t2", "add_bos_token": false}')
    return folder
