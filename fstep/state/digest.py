"""A hash of any value of this package by its content, the same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import attrs
import numpy as np
from numpy.typing import NDArray

from fstep.state.logs import Log


def digest(value: object) -> str:
    """Hexadecimal SHA-256 of a value: attrs classes, tuples, mappings, arrays, tensors, logs, plain scalars.

    A log counts by the items that it sees, wherever they lie. Raises `TypeError` for anything else.
    """
    hasher = hashlib.sha256()
    for part in _parts(value):
        hasher.update(part)
    return hasher.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    yield f"<{type(value).__name__}>".encode()
    kind = cast(type[Any], type(value))
    if value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value).encode()
    elif isinstance(value, np.ndarray):
        array = cast(NDArray[Any], value)
        yield f"{array.dtype}{array.shape}".encode() + array.tobytes()
    elif isinstance(value, Log):
        for row in range(len(value)):
            yield from _parts(value[row])
    elif isinstance(value, tuple | list):
        for each in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _parts(each)
    elif isinstance(value, Mapping):
        for key in sorted(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            yield from _parts((key, value[key]))
    elif attrs.has(kind):
        for each in attrs.fields(kind):
            yield from _parts(getattr(value, each.name))
    elif hasattr(value, "detach"):  # a torch tensor, known by its verbs: this room does without torch
        yield f"{value.dtype}{tuple(value.shape)}".encode() + _bytes(value)
    else:
        raise TypeError(f"no digest for a {type(value).__name__}")


def _bytes(tensor: Any) -> bytes:
    import torch

    host = tensor.detach().cpu().contiguous().flatten()
    return host.view(torch.uint8).numpy().tobytes() if host.numel() else b""
