"""Values as the Python that makes them, short enough to paste into a test."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import attrs
import numpy as np
from numpy.typing import NDArray

import fstep.state

PLAIN = (bool, int, float, str, bytes, type(None))


def as_code(value: Any) -> str:
    """Python that makes `value`: an attrs value with what differs from its defaults, an array as a list.

    What has no such form (a function, an engine) is shown by its name or its `repr`.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.ndarray):
        return repr(cast(NDArray[Any], value).tolist())
    if isinstance(value, np.generic):
        return repr(cast(Any, value).item())
    if attrs.has(_kind(value)):
        return f"{type(value).__name__}({', '.join(_arguments(value))})"
    if isinstance(value, Mapping):
        pairs = cast(Mapping[Any, Any], value).items()
        return f"{{{', '.join(f'{as_code(key)}: {as_code(each)}' for key, each in pairs)}}}"
    if isinstance(value, tuple):
        inner = [as_code(each) for each in cast(tuple[Any, ...], value)]
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(as_code(each) for each in cast(list[Any], value))}]"
    return repr(value) if isinstance(value, PLAIN) else getattr(value, "__name__", repr(value))


def _arguments(value: Any) -> Iterator[str]:
    """The arguments of an attrs value; those without a default come first and need no name."""
    for each in attrs.fields(_kind(value)):
        if not each.init:
            continue
        given = getattr(value, each.name)
        name = each.alias
        if each.default is attrs.NOTHING:
            yield as_code(given)
        elif as_code(given) != as_code(_default(each)):
            yield f"{name}={as_code(given)}"


def _kind(value: Any) -> type[Any]:
    return cast(type[Any], type(value))


def _default(field: attrs.Attribute[Any]) -> Any:
    factory: Any = getattr(field.default, "factory", None)
    return field.default if factory is None else factory()


def names_in(values: Iterable[Any]) -> set[str]:
    """The names of `fstep.state` that the code of some values needs."""
    found: set[str] = set()
    for value in values:
        name = type(value).__name__
        if getattr(fstep.state, name, None) is type(value):
            found.add(name)
        if attrs.has(_kind(value)):
            pairs = [(getattr(value, each.name), _default(each)) for each in attrs.fields(_kind(value)) if each.init]
            found |= names_in(each for each, default in pairs if as_code(each) != as_code(default))
        elif isinstance(value, tuple | list):
            found |= names_in(cast(Iterable[Any], value))
    return found
