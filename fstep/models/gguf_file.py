"""The container of a GGUF file: its metadata, its directory of tensors, and the tensors as float32.

The header is parsed here and not by `gguf.GGUFReader`, because that makes several NumPy views and objects for every
string of every list: on a model of 135 M parameters with a vocabulary of 49 thousand it takes 3 s, which is longer
than everything else that happens until the first token. This parser takes 0.1 s. The block formats, which are the
hard part, are `gguf.quants.dequantize`'s. It works on 16 rows at a time, which are short in a small model; blocks
don't depend on each other, so here they are laid in longer rows first, and several threads share the tensors (NumPy
lets go of the interpreter in between): 0.3 s instead of 1.1 s for the same bits on two cores.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from attrs import frozen
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from fstep.state import F32, CheckpointError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)  #: they differ in nothing that is read here
ALIGNMENT_KEY: Final = "general.alignment"

_SCALARS: Final = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")  # by type code, as struct has them
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4
_BLOCKS_A_ROW = 512  # one group of 16 such rows fits a core's cache

Value: TypeAlias = "str | int | float | bool | list[str] | list[Value] | NDArray[Any]"


@frozen
class GGUFTensor:
    """Where a tensor lies in the file, and in which format."""

    name: str
    shape: tuple[int, ...]  #: outermost dimension first; the file has them the other way round
    type: GGMLQuantizationType
    offset: int  #: bytes from the start of the file

    @property
    def nbytes(self) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block_size * block_bytes


@frozen(eq=False)
class GGUFFile:
    """An open GGUF file. The memory map is closed with the last array that looks into it."""

    path: Path
    metadata: Mapping[str, Value]  #: lists of numbers are arrays, lists of strings are lists
    tensors: Mapping[str, GGUFTensor]  #: by name, in the order of the file
    content: NDArray[np.uint8]  #: the whole file

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Reads the header and checks that every tensor lies in the file and has a type that can be dequantised.

        Raises `CheckpointError` naming the file and, where it applies, the key or tensor.
        """
        cursor = _Cursor(path, _mapped(path))
        num_tensors = _read_preamble(cursor)
        metadata = _read_metadata(cursor, int(cursor.scalar("Q", "the number of metadata entries")))
        entries = [_read_entry(cursor) for _ in range(num_tensors)]
        alignment = _alignment(path, metadata)
        start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, code, offset in entries:
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {name} stands twice in the directory")
            tensors[name] = GGUFTensor(name, shape, _type_of(path, name, shape, code), start + offset)
            _check_range(path, tensors[name], len(cursor.content), alignment)
        return cls(path, metadata, tensors, np.frombuffer(cursor.content, np.uint8))

    def read(self, name: str) -> F32:
        """A tensor as float32 in memory of its own, of the shape in the directory. May be called from many threads."""
        tensor = self.tensors[name]
        raw = self.content[tensor.offset : tensor.offset + tensor.nbytes]
        values: F32 = dequantize(raw.reshape(-1, _row_bytes(tensor)), tensor.type).reshape(tensor.shape)
        return values.copy() if tensor.type == GGMLQuantizationType.F32 else values  # that one is a view of the file


def dequantized_types() -> tuple[str, ...]:
    """The names of the tensor types that can be read."""
    return tuple(each.name for each in GGMLQuantizationType if _dequantizes(each))


def _dequantizes(kind: GGMLQuantizationType) -> bool:
    """Whether the installed `gguf` has a decoder: asked with one block of zeros, for want of a list."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _row_bytes(tensor: GGUFTensor) -> int:
    """Bytes of the rows in which a tensor's blocks are dequantised: longer than its own if those are short."""
    block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
    own = tensor.shape[-1] // block_size
    return max(own, math.gcd(math.prod(tensor.shape) // block_size, _BLOCKS_A_ROW)) * block_bytes


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path}: is empty") from None


class _Cursor:
    """A place in the file that moves on with each read; past the end is a `CheckpointError`."""

    __slots__ = ("content", "path", "position")

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.position = path, content, 0

    def take(self, nbytes: int, what: str) -> bytes:
        end = self.position + nbytes
        if end > len(self.content):
            raise self.truncated(what)
        taken = self.content[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str, what: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))
        return value

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings, each behind its length. One loop without calls: vocabularies are long."""
        content, position, size = self.content, self.position, len(self.content)
        strings: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + int.from_bytes(content[position:start], "little")
                if position > size:
                    raise self.truncated(what)
                strings.append(content[start:position].decode())
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {what} holds a string that isn't UTF-8") from None
        self.position = position
        return strings

    def truncated(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: is truncated: it ends after {len(self.content)} bytes, within {what}")


def _read_preamble(cursor: _Cursor) -> int:
    """Checks magic and version, and returns the number of tensors."""
    magic = cursor.take(len(MAGIC), "the magic number")
    if magic != MAGIC:
        raise CheckpointError(f"{cursor.path}: isn't a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    version = cursor.scalar("I", "the version")
    if version not in VERSIONS:
        big_endian = " (it looks like a big-endian file)" if version & 0xFFFF == 0 else ""
        works = " and ".join(map(str, VERSIONS))
        raise CheckpointError(f"{cursor.path}: GGUF version {version}: those that work are {works}{big_endian}")
    return int(cursor.scalar("Q", "the number of tensors"))


def _read_metadata(cursor: _Cursor, count: int) -> Mapping[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = cursor.string(f"the key of metadata entry {index}")
        if key in metadata:
            raise CheckpointError(f"{cursor.path}: metadata key {key} stands twice")
        metadata[key] = _read_value(cursor, cursor.scalar("I", key), key, 0)
    return metadata


def _read_value(cursor: _Cursor, code: int, key: str, depth: int) -> Value:
    if code == _STRING:
        return cursor.string(key)
    if code == _ARRAY and depth < _MAX_NESTING:
        return _read_list(cursor, cursor.scalar("I", key), cursor.scalar("Q", key), key, depth + 1)
    return cursor.scalar(_scalar_code(cursor, code, key), key)


def _read_list(cursor: _Cursor, code: int, count: int, key: str, depth: int) -> Value:
    if code == _STRING:
        return cursor.strings(count, key)
    if code == _ARRAY:
        return [_read_value(cursor, code, key, depth) for _ in range(count)]
    kind = np.dtype(f"<{_scalar_code(cursor, code, key)}")
    return np.frombuffer(cursor.take(count * kind.itemsize, key), kind)


def _scalar_code(cursor: _Cursor, code: int, key: str) -> str:
    name = _SCALARS[code] if code < len(_SCALARS) else ""
    if not name:
        raise CheckpointError(f"{cursor.path}: metadata key {key}: value type {code} is unknown, or nested too deep")
    return name


_Entry: TypeAlias = tuple[str, tuple[int, ...], int, int]  # name, shape, type code, offset in the data


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.string("the directory of tensors")
    what = f"tensor {name}'s entry in the directory"
    dimensions = cursor.scalar("I", what)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.path}: tensor {name}: {dimensions} dimensions; must be 1 to {_MAX_DIMENSIONS}")
    shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, what))[::-1]
    if 0 in shape:
        raise CheckpointError(f"{cursor.path}: tensor {name}: has shape {list(shape)}, so no values")
    return name, shape, cursor.scalar("I", what), cursor.scalar("Q", what)


def _alignment(path: Path, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get(ALIGNMENT_KEY, 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: {ALIGNMENT_KEY}={alignment!r}: must be a power of 2, at least 8")
    return alignment


def _type_of(path: Path, name: str, shape: tuple[int, ...], code: int) -> GGMLQuantizationType:
    """The type of a tensor, if it can be dequantised and rows of this length can have it."""
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise _unreadable(path, name, f"type {code}, which is unknown") from None
    if not _dequantizes(kind):
        raise _unreadable(path, name, f"type {kind.name} ({code})")
    block_size = GGML_QUANT_SIZES[kind][0]
    if shape[-1] % block_size:
        limit = f"no multiple of the {block_size} values in a block of {kind.name}"
        raise CheckpointError(f"{path}: tensor {name}: rows of {shape[-1]} values, {limit}")
    return kind


def _unreadable(path: Path, name: str, kind: str) -> CheckpointError:
    return CheckpointError(f"{path}: tensor {name}: {kind}; those that work are {', '.join(dequantized_types())}")


def _check_range(path: Path, tensor: GGUFTensor, size: int, alignment: int) -> None:
    if tensor.offset % alignment:
        raise CheckpointError(f"{path}: tensor {tensor.name}: offset {tensor.offset} is no multiple of {alignment}")
    end = tensor.offset + tensor.nbytes
    if end > size:
        raise CheckpointError(f"{path}: is truncated: tensor {tensor.name} ends at byte {end}, the file at {size}")
