"""What the kit checks beside `fstep.ops.checks`: that no phase changes what it was given, and that NaN stays unread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from fstep.state import (
    KV,
    BatchState,
    BlockPool,
    Bool,
    CheckError,
    Env,
    Log,
    Plan,
    SamplingParams,
    SchedState,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")

Snapshot: TypeAlias = list[tuple[str, object]]


def poison(
    kv: KV, state: BatchState, keep: Sequence[str] | None = None, cached: Sequence[Collection[int]] = ()
) -> None:
    """I8, I17: NaN in every cell of the cache that holds no computed token of a live row, the null block too.

    With `keep` only the cells of these requests are spared; `cached` are blocks to spare, one collection a KV group.
    A cell that the present step is to write holds nothing yet. Changes the cache in place: a step that gives other
    tokens afterwards has read a cell that isn't its own.
    """
    import torch

    names = state.rows.request_ids
    rows = [int(row) for row in state.rows.live() if keep is None or names[int(row)] in keep]
    for number, group in enumerate(state.plan.groups):
        owned = _owned_cells(state, number, rows).reshape(group.num_blocks, group.block_size)
        owned[list(cached[number]) if cached else []] = True
        nobodys = torch.from_numpy(~owned)  # pyright: ignore[reportUnknownMemberType]
        for layer in (kv.layers[index] for index in group.layers):
            for pages in (layer.k, layer.v):
                pages.permute(0, 2, 1, 3)[nobodys.to(pages.device)] = float("nan")


def still_cached(before: SchedState, after: SchedState) -> list[list[int]]:
    """The blocks that are cached before and after `schedule`, one list a KV group: what they hold must stay."""
    pairs = zip(before.pools, after.pools, strict=True)
    return [[block for block, _ in old.settled().hashes.items() & new.hashes.items()] for old, new in pairs]


def _owned_cells(state: BatchState, number: int, rows: list[int]) -> Bool:
    """Which slots hold a computed token of one of `rows`: `[num_blocks * block_size]`."""
    group, blocks = state.plan.groups[number], state.rows.blocks[number]
    owned = np.zeros(group.num_blocks * group.block_size, np.bool_)
    for row in rows:
        cells = blocks[row][:, None] * group.block_size + np.arange(group.block_size)
        owned[cells.ravel()[: state.rows.num_computed_tokens[row]]] = True
    if state.step is not None:
        owned[state.step.inputs.slot_mapping[number]] = False
        for source, copy in state.step.schedule.copies[number] if state.step.schedule.copies else ():
            owned[copy * group.block_size :][: group.block_size] = False
            owned[source * group.block_size :][: group.block_size] = True
    return owned


def guarded(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """I2: the same function, which raises `CheckError` if a call changes a value that it was given, naming the field.

    Of an `Env` the parameters are looked at; a KV cache is left out, since `forward` may write to it.
    """

    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        before = snapshot((args, kwargs))
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", repr(function))
        _compare("I2", f"argument of {name}()", snapshot((args, kwargs)), before)
        return result

    return wrapper


def check_same(invariant: str, what: str, actual: object, expected: object) -> None:
    """Two values that must have the same bits: raises `CheckError` that names the first field in which they differ."""
    _compare(invariant, what, snapshot(actual), snapshot(expected))


def _compare(invariant: str, what: str, actual: Snapshot, expected: Snapshot) -> None:
    if actual != expected:
        pairs = zip_longest(actual, expected, fillvalue=("nothing", None))
        found, wanted = next((found, wanted) for found, wanted in pairs if found != wanted)
        raise CheckError(invariant, what, found[0], wanted[1], found[1])


def snapshot(value: object) -> Snapshot:
    """All that a value is made of, flat: where each part lies in it, and its bits."""
    parts: Snapshot = []
    _add_parts(parts, "", value)
    return parts


def _add_parts(parts: Snapshot, path: str, value: Any) -> None:
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if issubclass(kind, np.ndarray):
        parts.append((path, (value.dtype.char, value.shape, value.tobytes())))
    elif issubclass(kind, tuple | list):
        for number, each in enumerate(value):
            _add_parts(parts, f"{path}[{number}]", each)
    elif kind is Log:
        parts.append((f"{path}.length", value.length.tolist()))
        parts += [(f"{path}[{row}]", value[row].tolist()) for row in np.flatnonzero(value.length).tolist()]
    elif kind is BlockPool:
        _add_parts(
            parts, path, {"free": value.free, "ref_counts": value.ref_counts, "hashes": sorted(value.hashes.items())}
        )
    elif kind is Env:
        _add_parts(parts, f"{path}.params", value.params)
    elif hasattr(kind, "untyped_storage"):  # a torch tensor, known by its verbs: torch may not be there
        parts.append((path, (str(value.dtype), value.shape, value.detach().cpu().contiguous().numpy().tobytes())))
    elif hasattr(kind, "__attrs_attrs__") and kind not in (Plan, SamplingParams) and not hasattr(kind, "advance"):
        for each in kind.__attrs_attrs__:
            _add_parts(parts, f"{path}.{each.name}", getattr(value, each.name))
    elif issubclass(kind, Mapping):
        for key, each in value.items():
            _add_parts(parts, f"{path}[{key!r}]", each)
    elif not hasattr(kind, "advance"):
        parts.append((path, value))
