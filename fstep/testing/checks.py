"""The promises of the step as checks, each callable alone: on plain arrays, on a state, or around a function.

The names I4, I5, … are those of the invariants; every failure is a `CheckError` that names the row, the field, what was
expected and what was found. Arrays in `BatchArrays` and `PoolView` are plain NumPy, so that the batch or the block
pool of any engine can be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from fstep.state import (
    I32,
    KV,
    BatchState,
    BlockPool,
    Bool,
    Env,
    Log,
    Plan,
    RowPhase,
    SamplingParams,
    SchedState,
    Schedule,
    Tail,
    i32,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")

Snapshot: TypeAlias = list[tuple[str, object]]


class CheckError(AssertionError):
    """An invariant that doesn't hold."""

    def __init__(self, invariant: str, where: str, field_name: str, expected: object, actual: object) -> None:
        self.invariant, self.where, self.field = invariant, where, field_name
        self.expected, self.actual = expected, actual
        super().__init__(f"{invariant}: {where}: {field_name} is {actual}, expected {expected}")


@frozen(eq=False)
class BatchArrays:
    """A batch as plain arrays: `T` real tokens of `B` real requests, padded to `Tp` and `Bp`, in `G` KV groups."""

    row_of_token: I32  #: [T], the request of each real token, counted in the batch
    positions: I32  #: [Tp]
    query_start_loc: I32  #: [Bp + 1]
    seq_lens: I32  #: [Bp]
    logits_indices: I32  #: [L]
    slot_mapping: tuple[I32, ...]  #: G of [Tp]
    block_tables: tuple[I32, ...]  #: G of [Bp, W]
    block_sizes: tuple[int, ...]  #: G, tokens
    num_computed_tokens: I32  #: [B], before the step
    discard: Bool  #: [B]
    num_known_tokens: I32  #: [B], prompt and output before the step
    request_ids: tuple[str, ...] = ()  #: [B], for messages

    @property
    def num_reqs(self) -> int:
        return len(self.num_computed_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.row_of_token)

    def where(self, b: int) -> str:
        if b >= self.num_reqs:
            return f"padded row {b}"
        return f"row {b} (request {self.request_ids[b]!r})" if self.request_ids else f"row {b}"


@frozen(eq=False)
class PoolView:
    """The blocks of one KV group: which are free, and which each request holds."""

    num_blocks: int  #: with the null block 0
    free: I32
    held: Mapping[str, I32]  #: by request
    cached: I32 = field(factory=lambda: i32(()))  #: held by nobody, not in `free`, and kept for their content
    ref_counts: I32 | None = None  #: [num_blocks], how many requests hold each; None: blocks are not shared


def arrays_of(state: BatchState) -> BatchArrays:
    """The batch of a state on which `build_meta` was called. Raises `PhaseError` for another."""
    step = state.need_step("arrays_of")
    padding, meta, inputs = step.need_padding("arrays_of"), step.need_meta("arrays_of"), step.inputs
    return BatchArrays(
        row_of_token=i32(np.repeat(np.arange(len(inputs.rows)), inputs.num_scheduled_tokens)),
        positions=padding.positions,
        query_start_loc=padding.query_start_loc,
        seq_lens=padding.seq_lens,
        logits_indices=inputs.logits_indices,
        slot_mapping=tuple(group.slot_mapping for group in meta.groups),
        block_tables=tuple(group.block_table for group in meta.groups),
        block_sizes=tuple(group.block_size for group in state.plan.groups),
        num_computed_tokens=state.rows.num_computed_tokens[inputs.rows],
        discard=inputs.discard,
        num_known_tokens=state.rows.num_tokens[inputs.rows],
        request_ids=step.schedule.request_ids,
    )


def pools_of(sched: SchedState, state: BatchState) -> tuple[PoolView, ...]:
    """The blocks of each KV group as a scheduler and the rows see them."""
    rows = state.rows
    names = {int(row): rows.request_ids[row] or f"row {row}, which is free" for row in range(len(rows))}
    return tuple(
        PoolView(
            num_blocks=group.num_blocks,
            free=pool.free,
            held={name: blocks[row] for row, name in names.items() if blocks.length[row]},
            ref_counts=pool.ref_counts,
        )
        for group, pool, blocks in zip(state.plan.groups, sched.pools, rows.blocks, strict=True)
    )


def check_batch(state: BatchState) -> None:
    """I4 to I7 on a state on which `build_meta` was called."""
    batch = arrays_of(state)
    check_slots(batch)
    check_query_start_loc(batch, state.plan.tail)
    check_seq_lens(batch)
    check_logits_indices(batch)
    check_tables(batch, state)


def check_slots(batch: BatchArrays) -> None:
    """I4: each real token has a slot of its own, where its request's block table says; padding has -1."""
    real = batch.num_tokens
    for number, (slots, table, size) in enumerate(
        zip(batch.slot_mapping, batch.block_tables, batch.block_sizes, strict=True)
    ):
        name = f"slot_mapping[{number}]"
        blocks = table[batch.row_of_token, batch.positions[:real] // size]
        null = np.zeros(real, np.bool_)
        _equal("I4", f"null block in block_table[{number}]", blocks == 0, null, batch, batch.row_of_token)
        _equal("I4", name, slots[:real], blocks * size + batch.positions[:real] % size, batch, batch.row_of_token)
        _equal("I4", f"padding of {name}", slots[real:], np.full(len(slots) - real, -1), None, None)
        values, counts = np.unique(slots[:real], return_counts=True)
        if len(values) < real:
            twice = int(values[counts > 1][0])
            both = [batch.where(int(batch.row_of_token[t])) for t in np.nonzero(slots[:real] == twice)[0]]
            raise CheckError("I4", " and ".join(both), name, "a slot a token", f"{twice} for both")


def check_tables(batch: BatchArrays, state: BatchState) -> None:
    """I4, I17: a request's table names its own blocks, in order, and the null block from there on."""
    rows = state.need_step("check_tables").inputs.rows
    for number, (table, blocks) in enumerate(zip(batch.block_tables, state.rows.blocks, strict=True)):
        for b, line in enumerate(table):
            own = blocks[int(rows[b])][: len(line)] if b < len(rows) else i32(())
            wanted = np.append(own, np.zeros(len(line) - len(own), np.int32))
            if not np.array_equal(line, wanted):
                raise CheckError("I4", batch.where(b), f"block_table[{number}]", wanted.tolist(), line.tolist())


def check_query_start_loc(batch: BatchArrays, tail: Tail = Tail.REPEAT) -> None:
    """I5: it starts at 0, steps by each request's tokens, and its tail is what the backend asks for."""
    counts = np.bincount(batch.row_of_token, minlength=batch.num_reqs)
    ends = np.append(0, np.cumsum(counts))
    padded = len(batch.seq_lens) - batch.num_reqs
    total = len(batch.positions)
    if tail is Tail.CONTINUE and padded:
        more = [min(batch.num_tokens + number, total) for number in range(1, padded)] + [total]
    else:
        more = [batch.num_tokens] * padded
    _equal("I5", "query_start_loc", batch.query_start_loc, np.append(ends, more), batch, None)


def check_seq_lens(batch: BatchArrays) -> None:
    """I6: computed and scheduled tokens, 0 for padding; and the positions count up to there."""
    counts = np.bincount(batch.row_of_token, minlength=batch.num_reqs)
    wanted = np.append(batch.num_computed_tokens + counts, np.zeros(len(batch.seq_lens) - batch.num_reqs, np.int64))
    _equal("I6", "seq_lens", batch.seq_lens, wanted, batch, np.arange(len(wanted)))
    within = np.arange(batch.num_tokens) - (np.cumsum(counts) - counts)[batch.row_of_token]
    positions = batch.num_computed_tokens[batch.row_of_token] + within
    _equal("I6", "positions", batch.positions[: batch.num_tokens], positions, batch, batch.row_of_token)


def check_logits_indices(batch: BatchArrays) -> None:
    """I7: one for each request, its last token; dropped while tokens that it has already are still to come."""
    rows = np.arange(batch.num_reqs)
    ends = np.cumsum(np.bincount(batch.row_of_token, minlength=batch.num_reqs))
    _equal("I7", "logits_indices", batch.logits_indices, ends - 1, batch, rows)
    incomplete = batch.seq_lens[: batch.num_reqs] < batch.num_known_tokens
    _equal("I7", "discard", batch.discard, incomplete, batch, rows)


def check_conservation(pool: PoolView) -> None:
    """I18, I17: each block but the null block is free, cached or held, once.

    It is held by one request, or, if there are reference counts, by as many as its count says, in the same place.
    """
    holders = {f"request {name!r}": blocks for name, blocks in pool.held.items()}
    places: dict[int, list[str]] = {0: ["the null block"]}
    indices: dict[int, set[int]] = {}
    for name, blocks in (*holders.items(), ("cached", pool.cached), ("free", pool.free)):
        for index, block in enumerate(blocks.tolist()):
            places.setdefault(block, []).append(name)
            indices.setdefault(block, set()).add(index)
    for block, names in sorted(places.items()):
        shared = pool.ref_counts is not None and holders.keys() >= set(names) and len(set(names)) == len(names)
        if len(names) > 1 and not (shared and len(indices[block]) == 1):
            raise CheckError("I18", names[1], f"block {block}", "in one place", f"also in: {names[0]}")
    lost = sorted(set(range(pool.num_blocks)) - places.keys())
    strange = sorted(places.keys() - set(range(pool.num_blocks)))
    if lost or strange:
        raise CheckError("I18", "pool", "blocks", f"0 to {pool.num_blocks - 1}", f"lost {lost}, unknown {strange}")
    for block, count in enumerate(() if pool.ref_counts is None else pool.ref_counts.tolist()):
        held = sum(name in holders for name in places[block])
        if block and count != held:
            raise CheckError("I18", "pool", f"reference count of block {block}", held, count)


def check_state(sched: SchedState, state: BatchState) -> None:
    """I18 on what `schedule` returned and the state that `prepare` made of it; and what a row must agree on."""
    for pool in pools_of(sched, state):
        check_conservation(pool)
    check_rows(state)


def check_rows(state: BatchState) -> None:
    """The columns of each row agree with each other and with the plan."""
    for row in range(len(state.rows)):
        for field_name, (actual, expected) in _facts(state, row).items():
            if actual != expected:
                raise CheckError("rows", f"row {row} ({state.rows.request_ids[row]})", field_name, expected, actual)


def _facts(state: BatchState, row: int) -> dict[str, tuple[object, object]]:
    """What a row says, with what it should say, by the name of the field."""
    rows, phase = state.rows, RowPhase(state.rows.phase[row])
    lengths = (rows.prompt_len, rows.prefill_len, rows.num_tokens)
    prompt, prefill, known = (int(column[row]) for column in lengths)
    computed = int(rows.num_computed_tokens[row])
    facts: dict[str, tuple[object, object]] = {
        "phase": (phase is RowPhase.FREE, rows.request_ids[row] is None),
        "num_tokens": (known, int(rows.tokens.length[row])),
        "num_tokens against max_model_len": (known, min(known, state.plan.max_model_len)),
        "num_computed_tokens": (computed, min(computed, known)),
        "prompt_len, prefill_len, num_tokens": ([prompt, prefill, known], sorted((prompt, prefill, known))),
    }
    if phase is RowPhase.PREEMPTED:
        facts["prefill_len"] = (prefill, known)
    for number, (blocks, group) in enumerate(zip(rows.blocks, state.plan.groups, strict=True)):
        held = int(blocks.length[row])
        holds_none = phase in (RowPhase.FREE, RowPhase.PREEMPTED)
        facts[f"blocks[{number}].length"] = (held, 0 if holds_none else max(held, group.blocks_for(computed)))
    return facts


def check_limits(todo: Schedule, after: SchedState) -> None:
    """A schedule keeps within the limits of the scheduler that made it, `after` being what it returned beside it."""
    limits, counts = after.limits, todo.num_scheduled_tokens
    longest = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
    for field_name, limit, actual in (
        ("max_num_batched_tokens", limits.max_num_batched_tokens, int(counts.sum())),
        ("max_num_seqs", limits.max_num_seqs, len(after.running)),
        ("long_prefill_token_threshold", longest, int(counts.max(initial=0))),
    ):
        if actual > limit:
            raise CheckError("limits", "schedule", field_name, f"at most {limit}", actual)


def check_rows_stay(before: BatchState, after: BatchState) -> None:
    """A request keeps its row from one state to a later one, and a row's `generation` counts its requests.

    `after` is what `prepare` made of `before`.
    """
    old, new = before.rows, after.rows
    begun = {each.request_id for each in after.need_step("check_rows_stay").schedule.new}
    for row, name in enumerate(new.request_ids):
        known = row < len(old)
        if known and name is not None and name not in begun and old.request_ids[row] != name:
            raise CheckError("rows", f"row {row}", "request_ids", old.request_ids[row], name)
        generation = (int(old.generation[row]) if known else 0) + (name in begun)
        if new.generation[row] != generation:
            raise CheckError("rows", f"row {row} ({name})", "generation", generation, int(new.generation[row]))


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


def _equal(
    invariant: str,
    name: str,
    actual: NDArray[Any],
    expected: NDArray[Any],
    batch: BatchArrays | None,
    rows: NDArray[Any] | None,
) -> None:
    """Raises for the first place where two arrays differ; `rows` says which request each place belongs to."""
    if len(actual) != len(expected):
        raise CheckError(invariant, "batch", f"length of {name}", len(expected), len(actual))
    wrong = np.nonzero(actual != expected)[0]
    if len(wrong):
        at = int(wrong[0])
        where = batch.where(int(rows[at])) if batch is not None and rows is not None else "batch"
        raise CheckError(invariant, where, f"{name}[{at}]", expected[at], actual[at])
