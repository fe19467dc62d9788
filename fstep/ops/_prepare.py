"""`prepare`: a `Schedule` applied to the rows, and the batch that it asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from fstep.ops.order import in_order
from fstep.state import (
    I32,
    I64,
    BatchState,
    CacheKey,
    Finished,
    Inputs,
    Intp,
    KVGroup,
    Log,
    NewRequest,
    Plan,
    Ragged,
    RequestIds,
    Resumed,
    RowPhase,
    Rows,
    SamplingRows,
    Schedule,
    ScheduleError,
    Step,
    frozen_array,
    ragged_arange,
)
from fstep.state.sampling import grown


def prepare(state: BatchState, schedule: Schedule) -> BatchState:
    """The state with the schedule's changes made, and with the step's `Inputs`.

    Allocates nothing: every block that the scheduled tokens need must be held or come with the schedule. Raises
    `ScheduleError` naming the request and the rule that it breaks; `state` is unchanged then. The step's own schedule
    is in the order of the batch, which the plan's `RowOrder` decides.
    """
    rows = _changed(state.rows, schedule, state.plan)
    at = _scheduled_rows(rows, schedule)
    rows = _with_blocks(rows, schedule, at, state.plan)
    schedule, at = in_order(state.plan.order, schedule, rows, at)
    inputs = _inputs(rows, at, schedule, state.plan)
    return BatchState(state.plan, rows, state.line, state.kv_epoch, Step(schedule, inputs))


def _changed(rows: Rows, schedule: Schedule, plan: Plan) -> Rows:
    """The rows after everything but the scheduled tokens, in the order that `Schedule` states."""
    if schedule.finished:
        rows = _finish(rows, schedule.finished)
    if schedule.preempted:
        rows = _preempt(rows, schedule.preempted)
    if schedule.resumed:
        rows = _resume(rows, schedule.resumed)
    if schedule.new:
        rows = _admit(rows, schedule.new, plan)
    return rows


def _find(rows: Rows, names: tuple[str, ...]) -> Intp:
    """The rows of some requests, each named once."""
    try:
        at = rows.request_ids.rows(names)
    except KeyError:
        unknown = next(name for name in names if name not in rows.request_ids.row_of)
        rule = "is named by the schedule but has no row: it was never new, or has ended"
        raise ScheduleError(unknown, rule) from None
    if len(names) > 1 and int(np.bincount(at).max()) > 1:
        twice = next(name for name in names if names.count(name) > 1)
        raise ScheduleError(twice, "stands twice in one list of the schedule")
    return at


def _in_phase(rows: Rows, names: tuple[str, ...], phase: RowPhase, verb: str) -> Intp:
    at = _find(rows, names)
    wrong = np.nonzero(rows.phase[at] != phase)[0]
    if len(wrong):
        b = int(wrong[0])
        is_now = RowPhase(rows.phase[at[b]]).name.lower()
        raise ScheduleError(names[b], f"can't be {verb}: it is {is_now}, not {phase.name.lower()}")
    return at


def put(column: NDArray[Any], at: NDArray[Any], values: Any) -> NDArray[Any]:
    """A copy of a column with other values in some rows."""
    copy = column.copy()
    copy[at] = values
    return frozen_array(copy)


def _finish(rows: Rows, finished: tuple[Finished, ...]) -> Rows:
    at = _find(rows, tuple(each.request_id for each in finished))
    gone = set(at.tolist())
    return evolve(
        rows,
        request_ids=RequestIds(None if row in gone else name for row, name in enumerate(rows.request_ids)),
        phase=put(rows.phase, at, RowPhase.FREE),
        tokens=rows.tokens.cleared(at),
        blocks=tuple(blocks.cleared(at) for blocks in rows.blocks),
        prompt_len=put(rows.prompt_len, at, 0),
        prefill_len=put(rows.prefill_len, at, 0),
        num_tokens=put(rows.num_tokens, at, 0),
        num_computed_tokens=put(rows.num_computed_tokens, at, 0),
        weights=rows.weights.cleared(at),
    )


def _preempt(rows: Rows, names: tuple[str, ...]) -> Rows:
    at = _in_phase(rows, names, RowPhase.RUNNING, "preempted")
    return evolve(
        rows,
        phase=put(rows.phase, at, RowPhase.PREEMPTED),
        blocks=tuple(blocks.cleared(at) for blocks in rows.blocks),
        prefill_len=put(rows.prefill_len, at, rows.num_tokens[at]),
        num_computed_tokens=put(rows.num_computed_tokens, at, 0),
    )


def _resume(rows: Rows, resumed: tuple[Resumed, ...]) -> Rows:
    names = tuple(each.request_id for each in resumed)
    at = _in_phase(rows, names, RowPhase.PREEMPTED, "resumed")
    computed = [each.num_computed_tokens for each in resumed]
    _check_cached(names, computed, rows.num_tokens[at])
    return evolve(
        rows,
        phase=put(rows.phase, at, RowPhase.RUNNING),
        num_computed_tokens=put(rows.num_computed_tokens, at, computed),
    )


def _check_cached(names: tuple[str, ...], computed: list[int], known: I32) -> None:
    """A prefix-cache hit leaves at least the last token to compute."""
    for name, hit, length in zip(names, computed, known.tolist(), strict=True):
        if not 0 <= hit < length:
            raise ScheduleError(name, f"num_computed_tokens={hit} must leave one of its {length} tokens to compute")


def _admit(rows: Rows, new: tuple[NewRequest, ...], plan: Plan) -> Rows:
    for request in new:
        if request.request_id in rows.request_ids.row_of:
            raise ScheduleError(request.request_id, "can't be new: a request of this id has a row")
    rows = with_free_rows(rows, len(new))
    at = np.nonzero(rows.phase == RowPhase.FREE)[0][: len(new)]
    names = list(rows.request_ids)
    for row, request in zip(at.tolist(), new, strict=True):
        names[row] = request.request_id
    length = np.array([len(request.prompt_token_ids) for request in new], np.int32)
    computed = [request.num_computed_tokens for request in new]
    _check_cached(tuple(request.request_id for request in new), computed, length)
    generation = rows.generation[at] + 1
    prompts = np.concatenate([request.prompt_token_ids for request in new])
    return evolve(
        rows,
        request_ids=RequestIds(names),
        generation=put(rows.generation, at, generation),
        phase=put(rows.phase, at, RowPhase.RUNNING),
        tokens=rows.tokens.append(at, prompts, length),
        prompt_len=put(rows.prompt_len, at, length),
        prefill_len=put(rows.prefill_len, at, length),
        num_tokens=put(rows.num_tokens, at, length),
        num_computed_tokens=put(rows.num_computed_tokens, at, computed),
        sampling=_with_sampling(rows.sampling, at, new, plan),
        cache_keys=_replaced(rows.cache_keys, at, [request.cache_key for request in new]),
        family=put(rows.family, at, family_of(at, generation)),
        num_samples=put(rows.num_samples, at, [request.sample_index + 1 for request in new]),
        priority=put(rows.priority, at, [request.priority for request in new]),
    )


def family_of(at: Intp, generation: I32) -> I64:
    """A number that no other request of an engine has: `[n]`."""
    return at.astype(np.int64) << 32 | generation


def _replaced(column: tuple[CacheKey, ...], at: Intp, values: list[CacheKey]) -> tuple[CacheKey, ...]:
    rows: list[int] = at.tolist()
    wanted = dict(zip(rows, values, strict=True))
    if all(column[row] == value for row, value in wanted.items()):
        return column
    return tuple(wanted.get(row, value) for row, value in enumerate(column))


def with_free_rows(rows: Rows, count: int) -> Rows:
    """At least `count` free rows; a table that is too small at least doubles."""
    missing = count - int(np.count_nonzero(rows.phase == RowPhase.FREE))
    if missing <= 0:
        return rows
    size = len(rows) + max(missing, len(rows))
    return Rows(
        request_ids=RequestIds((*rows.request_ids, *(None,) * (size - len(rows)))),
        generation=frozen_array(grown(rows.generation, size)),
        phase=frozen_array(grown(rows.phase, size)),
        tokens=rows.tokens.grown(size),
        blocks=tuple(blocks.grown(size) for blocks in rows.blocks),
        prompt_len=frozen_array(grown(rows.prompt_len, size)),
        prefill_len=frozen_array(grown(rows.prefill_len, size)),
        num_tokens=frozen_array(grown(rows.num_tokens, size)),
        num_computed_tokens=frozen_array(grown(rows.num_computed_tokens, size)),
        sampling=rows.sampling.grown(size),
        cache_keys=rows.cache_keys + (CacheKey(),) * (size - len(rows)),
        family=frozen_array(grown(rows.family, size)),
        num_samples=frozen_array(grown(rows.num_samples, size)),
        priority=frozen_array(grown(rows.priority, size)),
        weights=rows.weights.grown(size),
    )


def _with_sampling(sampling: SamplingRows, at: Intp, new: tuple[NewRequest, ...], plan: Plan) -> SamplingRows:
    params = [request.sampling for request in new]
    stop = [each.stop_token_ids + (() if each.ignore_eos else plan.eos_token_ids) for each in params]
    return SamplingRows(
        temperature=put(sampling.temperature, at, [0.0 if each.greedy else each.temperature for each in params]),
        top_k=put(sampling.top_k, at, [min(each.top_k, plan.vocab_size) for each in params]),
        top_p=put(sampling.top_p, at, [each.top_p for each in params]),
        min_p=put(sampling.min_p, at, [each.min_p for each in params]),
        seed=put(sampling.seed, at, np.array([each.seed or 0 for each in params], np.uint64)),
        sample_index=put(sampling.sample_index, at, [request.sample_index for request in new]),
        max_tokens=put(sampling.max_tokens, at, [min(each.max_tokens or 2**31 - 1, 2**31 - 1) for each in params]),
        stop_token_ids=_with_stop_ids(sampling.stop_token_ids, at, stop),
    )


def _with_stop_ids(column: NDArray[Any], at: Intp, stop: list[tuple[int, ...]]) -> NDArray[Any]:
    width = max(column.shape[1], *(len(ids) for ids in stop))
    wide = np.full((len(column), width), -1, np.int32)
    wide[:, : column.shape[1]] = column
    for row, ids in zip(at, stop, strict=True):
        wide[row] = (*ids, *(-1,) * (width - len(ids)))
    return frozen_array(wide)


def _scheduled_rows(rows: Rows, schedule: Schedule) -> Intp:
    """The rows of the scheduled requests, checked against what is known of them."""
    names, counts = schedule.request_ids, schedule.num_scheduled_tokens
    if len(counts) != len(names):
        raise ScheduleError(None, f"num_scheduled_tokens has {len(counts)} entries for {len(names)} request_ids")
    at = _in_phase(rows, names, RowPhase.RUNNING, "scheduled")
    too_few = counts < 1
    if too_few.any():
        raise ScheduleError(names[int(too_few.argmax())], "must be scheduled at least one token")
    computed, known = rows.num_computed_tokens[at], rows.num_tokens[at]
    too_many = computed + counts > known
    if too_many.any():
        b = int(too_many.argmax())
        rule = f"{computed[b]} computed + {counts[b]} scheduled tokens are more than the {known[b]} that it has"
        raise ScheduleError(names[b], rule)
    return at


def _with_blocks(rows: Rows, schedule: Schedule, at: Intp, plan: Plan) -> Rows:
    """The rows with the schedule's new blocks, enough of them for the scheduled tokens."""
    if schedule.new_blocks and len(schedule.new_blocks) != len(plan.groups):
        raise ScheduleError(None, f"new_blocks has {len(schedule.new_blocks)} entries for {len(plan.groups)} KV groups")
    seq_lens = rows.num_computed_tokens[at] + schedule.num_scheduled_tokens
    logs = tuple(
        _appended(log, schedule, group_index, at, plan.groups[group_index])
        for group_index, log in enumerate(rows.blocks)
    )
    for group, log in zip(plan.groups, logs, strict=True):
        short = log.length[at] * group.block_size < seq_lens
        if short.any():
            b = int(short.argmax())
            held = f"{log.length[at[b]]} blocks of {group.block_size}"
            raise ScheduleError(schedule.request_ids[b], f"{held} don't hold its {seq_lens[b]} tokens")
    return rows if logs == rows.blocks else evolve(rows, blocks=logs)


def _appended(log: Log, schedule: Schedule, group_index: int, at: Intp, group: KVGroup) -> Log:
    """One group's log with the schedule's new blocks."""
    new = schedule.new_blocks[group_index] if schedule.new_blocks else Ragged.of([()] * len(at))
    if len(new) != len(at):
        raise ScheduleError(None, f"new_blocks[{group_index}] has {len(new)} lists for {len(at)} requests")
    if len(new.values) == 0:
        return log
    if int(new.values.min()) < 1 or int(new.values.max()) >= group.num_blocks:
        b = next(b for b in range(len(new)) if ((new[b] < 1) | (new[b] >= group.num_blocks)).any())
        rule = f"new blocks {new[b].tolist()} must lie in 1 to {group.num_blocks - 1} (0 is the null block)"
        raise ScheduleError(schedule.request_ids[b], rule)
    some = np.nonzero(new.counts)[0]
    return log.append(at[some], new.values, new.counts[some])


def _inputs(rows: Rows, at: Intp, schedule: Schedule, plan: Plan) -> Inputs:
    counts = schedule.num_scheduled_tokens
    computed = rows.num_computed_tokens[at]
    seq_lens = computed + counts
    query_start_loc = np.zeros(len(at) + 1, np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    if query_start_loc[-1] == len(at):  # one token each
        token_rows, positions = at, computed
    else:
        token_rows, positions = np.repeat(at, counts), ragged_arange(computed, counts).astype(np.int32)
    return Inputs(
        rows=frozen_array(at),
        num_scheduled_tokens=counts,
        query_start_loc=frozen_array(query_start_loc),
        seq_lens=frozen_array(seq_lens),
        token_ids=frozen_array(rows.tokens.gather(token_rows, positions)),
        positions=frozen_array(positions),
        slot_mapping=tuple(
            _slots(blocks, token_rows, positions, group.block_size)
            for blocks, group in zip(rows.blocks, plan.groups, strict=True)
        ),
        logits_indices=frozen_array(query_start_loc[1:] - 1),
        sample_positions=frozen_array(seq_lens),
        discard=frozen_array(seq_lens < rows.num_tokens[at]),
    )


def _slots(blocks: Log, token_rows: Intp, positions: NDArray[Any], block_size: int) -> NDArray[Any]:
    """Where each token's KV goes: block * block_size + offset."""
    index, offset = np.divmod(positions, block_size)
    return frozen_array(blocks.gather(token_rows, index) * np.int32(block_size) + offset)
