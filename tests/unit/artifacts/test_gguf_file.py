import gguf
import numpy as np
import pytest

from pagemill.artifacts.gguf_file import TENSOR_TYPES, GgufStrings, read_gguf
from pagemill.errors import ModelError
from tests.unit.artifacts.gguf_builder import HIDDEN, VOCAB, write_gguf


def many_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -5)
    writer.add_uint64("a.u64", 1 << 60)
    writer.add_int64("a.i64", -(1 << 60))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "héllo 日本")
    writer.add_array("a.texts", ["", "x", "日本語", "a b"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.add_array("a.bools", [True, False])


def test_every_value_type_reads_as_it_was_written(tmp_path):
    metadata = read_gguf(write_gguf(tmp_path / "m.gguf", keys=many_keys)).metadata
    scalars = {key: metadata[key] for key in metadata if key.startswith("a.") and not key.endswith("s")}
    assert scalars == {
        "a.u8": 200, "a.i8": -3, "a.u16": 60000, "a.i16": -30000, "a.u32": 4_000_000_000, "a.i32": -5,
        "a.u64": 1 << 60, "a.i64": -(1 << 60), "a.f32": 0.5, "a.f64": 0.1, "a.bool": True, "a.text": "héllo 日本",
    }  # fmt: skip
    assert metadata["a.texts"].decode() == ["", "x", "日本語", "a b"]
    assert len(metadata["a.texts"]) == 4
    assert metadata["a.ints"].tolist() == [1, -2, 3]
    assert metadata["a.floats"].tolist() == [0.5, -1.5]
    assert metadata["a.bools"].tolist() == [True, False]


def test_tensors_lie_where_the_reference_reader_finds_them(tmp_path):
    data = np.arange(7 * 32, dtype=np.float32).reshape(7, 32)
    quantized = gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("odd", np.arange(3, dtype=np.float32))
    writer.add_tensor("quantized", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "m.gguf")
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for name, tensor in file.tensors.items():
        assert tensor.shape == tuple(reversed(theirs[name].shape.tolist()))
        assert tensor.offset == theirs[name].data_offset
        assert tensor.num_bytes == theirs[name].n_bytes
        assert tensor.type_name == theirs[name].tensor_type.name
    assert file.tensors["quantized"].shape == (7, 32)


def test_block_sizes_are_those_of_the_format():
    for type_id, (name, block, num_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, block, num_bytes)


def test_alignment_of_the_file_is_honoured(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("x", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf(tmp_path / "m.gguf").tensors["x"]
    assert tensor.offset % 256 == 0
    raw = (tmp_path / "m.gguf").read_bytes()[tensor.offset :][: tensor.num_bytes]
    assert np.frombuffer(raw, np.float32).tolist() == [1, 1, 1]


def test_missing_file(tmp_path):
    with pytest.raises(ModelError, match=r"absent.gguf cannot be read: No such file"):
        read_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"not a model at all"])
def test_other_files_are_named_as_such(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        read_gguf(path)


def test_every_truncation_is_found(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", keys=many_keys).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(4, 700, 7), len(whole) - VOCAB * HIDDEN * 2 - 1, len(whole) - 40]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="truncated or damaged") as raised:
            read_gguf(path)
        assert "\n" not in str(raised.value)


def test_flipped_bytes_never_crash_or_hang(tmp_path):
    whole = bytearray(write_gguf(tmp_path / "whole.gguf", keys=many_keys).read_bytes())
    path = tmp_path / "bad.gguf"
    for position in range(4, 900):
        damaged = whole.copy()
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            for value in read_gguf(path).metadata.values():
                if isinstance(value, GgufStrings):
                    value.decode()
        except ModelError:
            pass


def test_unknown_version(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x00\x00\x00\x03" + bytes(64))
    with pytest.raises(ModelError, match="GGUF version 50331648; supported: little-endian 2 and 3"):
        read_gguf(path)


def test_names_of_megabytes_are_one_short_line(tmp_path):
    """Of a tensor with more dimensions than there may be, and behind the end of the file."""
    name = "x\n" * 500_000
    path = write_gguf(tmp_path / "m.gguf", tensors={name: np.zeros((2, 32), np.float32)})
    raw = path.read_bytes()
    at = raw.index(name.encode()) + len(name)
    for spoilt in (raw[:at] + (9).to_bytes(4, "little") + raw[at + 4 :], raw[:-200]):
        path.write_bytes(spoilt)
        with pytest.raises(ModelError) as caught:
            read_gguf(path)
        assert "tensor x" in str(caught.value)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000


def test_rows_that_are_no_whole_blocks(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tensors={"blk.0.attn_q.weight": np.zeros((2, 33), np.float32)})
    raw = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = raw.index(name) + len(name) + 4 + 16
    path.write_bytes(raw[:at] + (8).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(ModelError, match="rows of 33, not a multiple of Q8_0's 32"):
        read_gguf(path)
