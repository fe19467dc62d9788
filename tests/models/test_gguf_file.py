"""The container of GGUF files against the package `gguf`'s own reader and decoders."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from fstep.models.gguf_file import GGUFFile, dequantized_types
from fstep.state import CheckpointError
from tests.models.gguf_files import default_model, patch_type, write

SIZES = gguf.GGML_QUANT_SIZES
SUPPORTED = [Type[name] for name in dequantized_types()]
SMALL = {"one": np.arange(6, dtype=np.float32).reshape(2, 3), "two": np.ones(4, np.float32)}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.gguf", {"llama.context_length": 7, "a.list": ["x", "yy"]}, SMALL)


@pytest.fixture(scope="module")
def reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(default_model())


def blocks_of(kind: Type, rows: int, columns: int) -> np.ndarray:
    """Random blocks: quantised values where the package can do that, else bytes that make finite scales."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    if kind in (Type.F32, Type.F16):
        return values.astype({Type.F32: np.float32, Type.F16: np.float16}[kind]).view(np.uint8)
    try:
        return quantize(values, kind)
    except NotImplementedError:
        nbytes = columns // SIZES[kind][0] * SIZES[kind][1]
        return rng.integers(0x11, 0x3C, (rows, nbytes), dtype=np.uint8)


def write_blocks(path: Path, kind: Type, blocks: np.ndarray) -> Path:
    raw = {Type.F32: np.float32, Type.F16: np.float16}.get(kind, np.uint8)
    return write(path, {}, {"blocks": blocks.view(raw)}, {"blocks": kind} if raw == np.uint8 else None)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "header", "quants", "expected"),
    [
        (Type.Q4_1, np.float16([0.5, -1.0]), range(0x10, 0x20), [*np.arange(-1, 7, 0.5), *[-0.5] * 16]),
        (Type.Q4_0, np.float16([0.5]), range(0x10, 0x20), [*np.arange(-4, 4, 0.5), *[-3.5] * 16]),
        (Type.Q8_0, np.float16([0.5]), [*range(16), *range(240, 256)], [*np.arange(0, 8, 0.5), *np.arange(-8, 0, 0.5)]),
    ],
)
def test_a_block_worked_out_by_hand(tmp_path: Path, kind: Type, header: Any, quants: Any, expected: Any) -> None:
    block = np.frombuffer(header.tobytes() + bytes(quants), np.uint8)
    file = GGUFFile.open(write_blocks(tmp_path / "block.gguf", kind, block[None]))
    assert file.read("blocks").tolist() == [expected]


def test_the_types_that_matter_are_supported() -> None:
    legacy, k_quants = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
    assert {"F32", "F16", "BF16", *legacy, *k_quants, "IQ4_NL", "IQ4_XS", "MXFP4"} <= set(dequantized_types())


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "columns"), [(2, 512), (33, 768)])
def test_every_type_equals_the_packages_decoder(tmp_path: Path, kind: Type, rows: int, columns: int) -> None:
    blocks = blocks_of(kind, rows, columns)
    values = GGUFFile.open(write_blocks(tmp_path / "blocks.gguf", kind, blocks)).read("blocks")
    assert values.shape == (rows, columns)
    assert values.dtype == np.float32
    assert np.isfinite(values).all()
    per_block = np.abs(values.reshape(-1, min(256, columns))).max(axis=-1)
    assert (per_block > 0).all()  # every super-block was decoded
    np.testing.assert_array_equal(values, dequantize(blocks, kind))


@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED if SIZES[kind][0] > 1], ids=lambda kind: kind.name)
def test_a_row_that_ends_within_a_block_is_refused(tmp_path: Path, kind: Type) -> None:
    columns = SIZES[kind][0] // 2
    path = write(tmp_path / "rows.gguf", {}, {"blk.0.ffn_up.weight": np.zeros((4, columns), np.float32)})
    patch_type(path, "blk.0.ffn_up.weight", kind)
    message = refused(path)
    for part in ("blk.0.ffn_up.weight", str(columns), str(SIZES[kind][0]), kind.name):
        assert part in message


@pytest.mark.parametrize(
    ("code", "name"), [(99, "99"), (Type.Q8_K, "Q8_K"), (Type.I32, "I32"), (2**32 - 1, "4294967295")]
)
def test_a_type_without_a_decoder_is_refused(tmp_path: Path, code: int, name: str) -> None:
    path = write(tmp_path / "type.gguf", {}, {"blk.0.attn_v.weight": np.zeros((2, 256), np.float32)})
    patch_type(path, "blk.0.attn_v.weight", code)
    message = refused(path)
    assert "blk.0.attn_v.weight" in message
    assert name in message
    assert all(works in message for works in dequantized_types())


def test_tensors_are_in_memory_of_their_own(small: Path) -> None:
    file = GGUFFile.open(small)
    for name, values in SMALL.items():
        read = file.read(name)
        np.testing.assert_array_equal(read, values)
        read += 1  # a view of the file would refuse
        np.testing.assert_array_equal(file.read(name), values)


def test_metadata_of_every_type(tmp_path: Path) -> None:
    kinds = gguf.GGUFValueType
    scalars = {
        "u8": (255, kinds.UINT8),
        "i8": (-128, kinds.INT8),
        "u16": (65535, kinds.UINT16),
        "i16": (-32768, kinds.INT16),
        "u32": (2**32 - 1, kinds.UINT32),
        "i32": (-(2**31), kinds.INT32),
        "u64": (2**64 - 1, kinds.UINT64),
        "i64": (-(2**63), kinds.INT64),
        "f32": (1.5, kinds.FLOAT32),
        "f64": (0.1, kinds.FLOAT64),
        "yes": (True, kinds.BOOL),
        "no": (False, kinds.BOOL),
        "text": ("ключ 🔑", kinds.STRING),
        "empty": ("", kinds.STRING),
    }
    path = write(tmp_path / "kinds.gguf", scalars | {"ints": [1, -2, 3], "floats": [0.5], "texts": ["", "ß"]}, SMALL)
    metadata = GGUFFile.open(path).metadata
    for key, (value, _) in scalars.items():
        assert metadata[key] == value
        assert type(metadata[key]) is type(value)
    assert metadata["ints"].tolist() == [1, -2, 3]
    assert metadata["floats"].tolist() == [0.5]
    assert metadata["texts"] == ["", "ß"]


def test_the_default_models_metadata_and_tensors(reader: gguf.GGUFReader) -> None:
    file = GGUFFile.open(default_model())
    ours = dict(file.metadata)
    for key in [key for key in reader.fields if not key.startswith("GGUF.")]:
        expected, value = reader.fields[key].contents(), ours.pop(key)
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected
    assert ours == {}
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for index in (0, 1, 2, 6, 100, 271):
        theirs = reader.tensors[index]
        expected = dequantize(theirs.data, theirs.tensor_type)
        np.testing.assert_array_equal(file.read(theirs.name), expected)


def test_every_truncation_is_noticed(small: Path) -> None:
    content = small.read_bytes()
    end = max(tensor.offset + tensor.nbytes for tensor in GGUFFile.open(small).tensors.values())
    for length in range(end):
        small.write_bytes(content[:length])
        message = refused(small)
        assert "truncated" in message or length == 0
    small.write_bytes(content[:end])
    np.testing.assert_array_equal(GGUFFile.open(small).read("two"), SMALL["two"])


@pytest.mark.parametrize(
    ("at", "replacement", "says"),
    [
        (0, b"PK\x03\x04", "isn't a GGUF file"),
        (4, struct.pack("<I", 1), "version 1: those that work are 2 and 3"),
        (4, struct.pack("<I", 4), "version 4"),
        (4, struct.pack(">I", 3), "big-endian"),
        (16, struct.pack("<Q", 2**60), "truncated"),
        (8, struct.pack("<Q", 2**60), "dimensions"),  # what follows the directory is taken for its entries
    ],
)
def test_a_wrong_preamble(small: Path, at: int, replacement: bytes, says: str) -> None:
    content = bytearray(small.read_bytes())
    content[at : at + len(replacement)] = replacement
    small.write_bytes(content)
    assert says in refused(small)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"\x03\0\0\0\0\0\0\0two", b"\x03\0\0\0\0\0\0\0one", "one stands twice"),
        (b"\x06\0\0\0\0\0\0\0a.list", b"\x06\0\0\0\0\0\0\0a.li\xff\xfe", "UTF-8"),
        (b"a.list\x09\0\0\0", b"a.list\x0d\0\0\0", "a.list: value type 13"),
        (b"yy", b"y\xff", "a.list holds a string that isn't UTF-8"),
        (b"two\x01\0\0\0\x04", b"two\x05\0\0\0\x04", "two: 5 dimensions"),
        (b"two\x01\0\0\0\x04", b"two\x01\0\0\0\x00", "two: has shape [0]"),
        (b"two\x01\0\0\0\x04" + b"\0" * 6, b"two\x01\0\0\0\x04" + b"\0" * 5 + b"\x01", "tensor two ends at byte"),
        (b"a.list\x09\0\0\0\x08", b"a.list\x09\0\0\0\x09", "a.list"),
    ],
)
def test_a_damaged_header(small: Path, old: bytes, new: bytes, says: str) -> None:
    content = small.read_bytes()
    assert content.count(old) == 1
    small.write_bytes(content.replace(old, new))
    assert says in refused(small)


def test_lists_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    deep = struct.pack("<IQ", 9, 1) * 5000
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + deep)
    assert "metadata key k" in refused(path)


@pytest.mark.parametrize("alignment", [0, 7, 12, -32, 1.5, True])
def test_an_alignment_that_is_none(tmp_path: Path, alignment: Any) -> None:
    header = write(tmp_path / "a.gguf", {}, {}).read_bytes()
    kinds = {
        bool: b"\x07\0\0\0" + struct.pack("<?", alignment == 1),
        float: b"\x06\0\0\0" + struct.pack("<f", alignment),
    }
    value = kinds.get(type(alignment)) or b"\x05\0\0\0" + struct.pack("<i", int(alignment))
    entry = struct.pack("<Q", 17) + b"general.alignment" + value
    path = tmp_path / "aligned.gguf"
    path.write_bytes(header[:16] + struct.pack("<Q", 1) + entry)
    assert "general.alignment" in refused(path)


def test_an_alignment_of_its_own(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
    writer.add_custom_alignment(256)
    for name, values in SMALL.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "wide.gguf")
    assert all(tensor.offset % 256 == 0 for tensor in file.tensors.values())
    np.testing.assert_array_equal(file.read("two"), SMALL["two"])


def test_what_isnt_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    assert "empty" in refused(tmp_path / "empty.gguf")
    assert "can't be read" in refused(tmp_path / "absent.gguf")
    assert "can't be read" in refused(tmp_path)
