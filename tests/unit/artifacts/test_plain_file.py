"""Pipes, devices and enormous files in place of a model's small ones: one line each, and none is read."""

import os

import pytest

from pagemill.artifacts.describe import describe
from pagemill.artifacts.json_file import MAX_BYTES, read_json_object
from pagemill.artifacts.plain_file import check_plain
from pagemill.artifacts.weight_index import safetensors_header
from pagemill.errors import ModelError
from pagemill.tokenizers import hf_folder
from tests.fakes.tiny_checkpoint import byte_tokenizer


def test_what_is_read(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    check_plain(file, 5)
    check_plain(tmp_path, 1 << 30)
    with pytest.raises(OSError, match="it has 5 bytes, and at most 4 are read"):
        check_plain(file, 4)
    with pytest.raises(FileNotFoundError):
        check_plain(tmp_path / "nothing", 4)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("device", [True, False])
def test_a_pipe_or_device_in_a_folder(tmp_path, name, device):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    path = tmp_path / name
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero") if device else os.mkfifo(path)
    with pytest.raises(ModelError, match=rf"{name} cannot be read: it is a pipe, a socket or a device$"):
        describe("m", tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_in_place_of_what_a_tokenizer_has(tmp_path, name):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=rf"{name}.*: it is a pipe, a socket or a device$"):
        hf_folder.load(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match=f"it has {1 << 40} bytes, and at most {MAX_BYTES} are read"):
        read_json_object(path)


def test_a_safetensors_header_that_is_a_pipe_or_nested_too_deeply(tmp_path):
    path = tmp_path / "model.safetensors"
    deep = b'{"a":' * 100_000
    path.write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(ModelError, match=r"^model.safetensors cannot be read: maximum recursion depth"):
        safetensors_header(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match=r"^model.safetensors cannot be read: it is a pipe"):
        safetensors_header(path)
