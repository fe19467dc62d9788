"""The promises of the step as checks, each callable alone: on plain arrays, or on a state.

The names I4, I5, … are those of the invariants; every failure is a `CheckError` that names the row, the field, what was
expected and what was found. `BatchArrays` and `PoolView` are plain NumPy, so that the batch or the block pool of any
engine can be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fstep.state import (
    I32,
    BatchArrays,
    BatchState,
    CheckError,
    ConfigError,
    PoolView,
    RowPhase,
    SchedState,
    Schedule,
    Tail,
    i32,
)

#: Raises `CheckError` for what `schedule` and `build_meta` made of a step.
Check: TypeAlias = Callable[[SchedState, BatchState], None]


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
        tail=state.plan.tail,
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
    check_query_start_loc(batch)
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


def check_query_start_loc(batch: BatchArrays) -> None:
    """I5: it starts at 0, steps by each request's tokens, and its tail is what the backend asks for."""
    counts = np.bincount(batch.row_of_token, minlength=batch.num_reqs)
    ends = np.append(0, np.cumsum(counts))
    padded = len(batch.seq_lens) - batch.num_reqs
    total = len(batch.positions)
    if batch.tail is Tail.CONTINUE and padded:
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


def check_held(batch: BatchArrays, pools: Sequence[PoolView]) -> None:
    """I4, I17: each real token's slot lies in a block that its request holds. The batch must name its requests."""
    for number, (slots, size, pool) in enumerate(zip(batch.slot_mapping, batch.block_sizes, pools, strict=True)):
        for b, name in enumerate(batch.request_ids):
            blocks = np.unique(slots[: batch.num_tokens][batch.row_of_token == b] // size)
            held = pool.held.get(name, i32(()))
            if not np.isin(blocks, held).all():
                found = sorted(set(blocks.tolist()) - set(held.tolist()))
                expected = f"blocks of {held.tolist()}"
                raise CheckError("I4", batch.where(b), f"slot_mapping[{number}]", expected, f"in blocks {found}")


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


def check_cheaply(sched: SchedState, state: BatchState) -> None:
    """The parts of I4 to I7 and I18 that a wrong token is most likely to come from, in O(rows + scheduled tokens).

    No two tokens share a slot, none lies in the null block, the counts add up, and no block that the step was given is
    still free. `state` is what `build_meta` made with the schedule that came with `sched`. What looks wrong here is
    looked at by `check_fully`, which says where.
    """
    if not (_slots_look_right(state) and _counts_add_up(state) and _new_blocks_are_held(sched, state)):
        check_fully(sched, state)


def check_fully(sched: SchedState, state: BatchState) -> None:
    """I4 to I7 and I18, the limits, and each row's columns; in O(blocks of the pool + history)."""
    check_limits(state.need_step("check_fully").schedule, sched)
    check_batch(state)
    check_state(sched, state)


def check_nothing(_sched: SchedState, _state: BatchState) -> None:
    """No check."""


#: What an engine may check between `build_meta` and `forward` of each step, by name.
LEVELS: Mapping[str, Check] = MappingProxyType({"full": check_fully, "cheap": check_cheaply, "off": check_nothing})


def level(name: str) -> Check:
    """The check of that name. Raises `ConfigError` for another."""
    if name not in LEVELS:
        raise ConfigError("check", name, f"must be one of {', '.join(LEVELS)}")
    return LEVELS[name]


def _slots_look_right(state: BatchState) -> bool:
    step = state.need_step("check_cheaply")
    real = len(step.inputs.token_ids)
    return all(
        _are_distinct(meta.slot_mapping[:real], group.block_size, group.num_blocks * group.block_size)
        for meta, group in zip(step.need_meta("check_cheaply").groups, state.plan.groups, strict=True)
    )


def _are_distinct(slots: I32, start: int, stop: int) -> bool:
    """Whether no number stands twice, and all lie within `start` and `stop`."""
    ordered = np.sort(slots)
    if len(ordered) == 0:
        return True
    return bool(ordered[0] >= start and ordered[-1] < stop and (ordered[1:] != ordered[:-1]).all())


def _counts_add_up(state: BatchState) -> bool:
    step = state.need_step("check_cheaply")
    inputs, padding = step.inputs, step.need_padding("check_cheaply")
    size, ends = len(inputs.rows), padding.query_start_loc
    lengths = state.rows.num_computed_tokens[inputs.rows] + inputs.num_scheduled_tokens
    return bool(
        ends[0] == 0
        and ends[size] == len(inputs.token_ids)
        and (padding.seq_lens[:size] == lengths).all()
        and (lengths <= state.rows.num_tokens[inputs.rows]).all()
        and (inputs.logits_indices == ends[1 : size + 1] - 1).all()
    )


def _new_blocks_are_held(sched: SchedState, state: BatchState) -> bool:
    given = state.need_step("check_cheaply").schedule.new_blocks
    return all(
        bool((pool.ref_counts_of(each.values) > 0).all()) for pool, each in zip(sched.pools, given, strict=False)
    )


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
