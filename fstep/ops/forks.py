"""Requests that branch and grow between two steps: `fork` makes copies of one, `extend` gives one more tokens."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import attrs
import numpy as np
from attrs import evolve, frozen

from fstep.ops import prefix
from fstep.ops._prepare import put, with_free_rows
from fstep.ops.requests import check_free_id, check_room, check_token_ids
from fstep.state import (
    I32,
    BatchState,
    BlockPool,
    Intp,
    Log,
    NewRequest,
    PhaseError,
    RequestError,
    RequestIds,
    RowPhase,
    Rows,
    SamplingRows,
    SchedState,
    frozen_array,
    i32,
)

_GROWING = (RowPhase.RUNNING, RowPhase.PREEMPTED, RowPhase.STOPPED, RowPhase.FULL)


def fork(
    state: BatchState, sched: SchedState, request_id: str, n: int, request_ids: Sequence[str] | None = None
) -> tuple[BatchState, SchedState]:
    """`n` copies of a request that has a row: n more samples of one prompt, or the branches of a tree search.

    A copy has the tokens that the request has by now, and a sample index of its own, which no relative of it had: it
    goes on with other noise, and the request itself as if nothing had happened. Full KV blocks are shared; the partly
    filled one is copied at the beginning of the next step. Where there is no block or no place among `max_num_seqs` for
    that, a copy is preempted, and its tokens are computed again later. The copies are named `request_ids`, or by the
    request and their sample index, `"a#3"`.

    Raises `PhaseError` inside a step, `RequestError` for a request that has no row or has ended, or an id in use.
    """
    row = _row_between_steps(state, sched, request_id, "fork", (RowPhase.RUNNING, RowPhase.PREEMPTED))
    if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
        raise RequestError("n", n, "must be an integer of at least 1", request_id)
    first = int(state.rows.num_samples[row])
    names = tuple(request_ids) if request_ids else tuple(f"{request_id}#{first + k}" for k in range(n))
    _check_names(state, sched, names, n, request_id)
    places = sched.limits.max_num_seqs - len(sched.running)
    shares = _share(state, sched, row, min(n, max(places, 0)))
    running = names[: len(shares.blocks)]
    rows = _copied(with_free_rows(state.rows, n), row, names, shares)
    return BatchState(state.plan, rows, state.line, state.kv_epoch), evolve(
        sched,
        pools=shares.pools,
        running=sched.running + running,
        preempted=sched.preempted + names[len(running) :],
        copies=shares.copies,
        uncached=sched.uncached.union(running) if request_id in sched.uncached else sched.uncached,
    )


def extend(
    state: BatchState, sched: SchedState, request_id: str, token_ids: Sequence[int] | I32
) -> tuple[BatchState, SchedState]:
    """A request with more tokens, as if they had been in its prompt: a tool's result, the next turn.

    All that it had so far, output too, is its prompt from now on, so `max_tokens` counts anew; its noise goes on by
    position. A request that met a stop rule runs again, as long as no schedule has named it as finished.

    Raises `PhaseError` inside a step, and `RequestError` for tokens out of the vocabulary or past `max_model_len`, or
    for a request that isn't there.
    """
    ids = NewRequest(request_id, token_ids).prompt_token_ids  # pyright: ignore[reportArgumentType]
    for index, waiting in enumerate(sched.waiting):
        if waiting.request_id == request_id:
            longer = _longer(state, sched, waiting, ids)
            return state, evolve(sched, waiting=(*sched.waiting[:index], longer, *sched.waiting[index + 1 :]))
    row = _row_between_steps(state, sched, request_id, "extend", _GROWING)
    rows, at = state.rows, np.array([row])
    length = int(rows.num_tokens[row]) + len(ids)
    _check_growth(state, request_id, ids, length, int(rows.sampling.max_tokens[row]))
    preempted = rows.phase[row] == RowPhase.PREEMPTED
    after = evolve(
        rows,
        phase=put(rows.phase, at, RowPhase.PREEMPTED if preempted else RowPhase.RUNNING),
        tokens=rows.tokens.append(at, ids, np.array([len(ids)])),
        prompt_len=put(rows.prompt_len, at, length),
        prefill_len=put(rows.prefill_len, at, length),
        num_tokens=put(rows.num_tokens, at, length),
    )
    return BatchState(state.plan, after, state.line, state.kv_epoch), sched


def _row_between_steps(
    state: BatchState, sched: SchedState, request_id: str, verb: str, phases: tuple[RowPhase, ...]
) -> int:
    """The row of a request that is in one of these phases, and isn't to end."""
    if state.step is not None:
        raise PhaseError(verb, "commit")
    row = state.rows.request_ids.row_of.get(request_id)
    if row is None:
        raise RequestError("request_id", request_id, f"can't {verb}: no request of this name has a row", request_id)
    phase = RowPhase(state.rows.phase[row])
    if phase not in phases or any(each.request_id == request_id for each in sched.ending):
        raise RequestError("request_id", request_id, f"can't {verb}: it has ended, or is to end", request_id)
    return row


def _check_names(state: BatchState, sched: SchedState, names: tuple[str, ...], n: int, request_id: str) -> None:
    if len(names) != n:
        raise RequestError("request_ids", list(names), f"must be {n} names, one for each copy", request_id)
    for number, name in enumerate(names):
        check_free_id(sched, state, name)
        if name in names[:number]:
            raise RequestError("request_ids", list(names), f"{name!r} stands there twice", request_id)


# Forks ---------------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class _Shares:
    """What the copies that can run hold, and what has to be copied for it."""

    pools: tuple[BlockPool, ...]
    blocks: tuple[tuple[I32, ...], ...]  #: for each of them, one list a KV group
    copies: tuple[I32, ...]


def _share(state: BatchState, sched: SchedState, row: int, most: int) -> _Shares:
    """Blocks for as many copies of a row as there is room for, `most` at most."""
    computed = int(state.rows.num_computed_tokens[row])
    most = most if state.rows.phase[row] == RowPhase.RUNNING else 0
    partial = [int(computed % group.block_size > 0) for group in state.plan.groups]
    if any(partial):
        most = min(most, *(pool.num_free for pool, each in zip(sched.pools, partial, strict=True) if each))
    parts = [
        _share_group(sched, number, blocks[row][: group.blocks_for(computed)], part, most)
        for number, (group, blocks, part) in enumerate(zip(state.plan.groups, state.rows.blocks, partial, strict=True))
    ]
    pools, held, copies = zip(*parts, strict=True)
    return _Shares(pools, tuple(zip(*held, strict=True)), copies if any(map(len, copies)) else ())


def _share_group(
    sched: SchedState, number: int, held: I32, partial: int, most: int
) -> tuple[BlockPool, list[I32], I32]:
    """The blocks of `most` copies in one KV group; the last of `held` is copied if it is a `partial` one."""
    pool, copies = sched.pools[number], sched.copies[number] if sched.copies else _NO_COPIES
    whole = held[: len(held) - partial]
    for _ in range(most):
        pool = pool.share(whole.tolist())
    fresh, pool = pool.take(most * partial)
    if partial:
        source = np.full(most, sched.filled_from(number, int(held[-1])), np.int32)
        copies = np.concatenate((copies, np.stack((source, fresh), axis=1)))
    return pool, [np.append(whole, fresh[k : k + partial]) for k in range(most)], frozen_array(copies)


_NO_COPIES = frozen_array(np.zeros((0, 2), np.int32))


def _copied(rows: Rows, row: int, names: tuple[str, ...], shares: _Shares) -> Rows:
    """The rows with the copies of one in free rows: those of `shares` run, the others are preempted."""
    at = np.nonzero(rows.phase == RowPhase.FREE)[0][: len(names)]
    holds = np.arange(len(names)) < len(shares.blocks)
    ids: list[str | None] = list(rows.request_ids)
    keys = list(rows.cache_keys)
    for target, name in zip(at.tolist(), names, strict=True):
        ids[target], keys[target] = name, rows.cache_keys[row]
    indices = np.arange(len(names), dtype=np.int32) + rows.num_samples[row]
    family = np.append(np.nonzero((rows.family == rows.family[row]) & (rows.phase != RowPhase.FREE))[0], at)
    known = rows.num_tokens[row]
    return Rows(
        request_ids=RequestIds(ids),
        generation=put(rows.generation, at, rows.generation[at] + 1),
        phase=put(rows.phase, at, np.where(holds, np.int8(RowPhase.RUNNING), np.int8(RowPhase.PREEMPTED))),
        tokens=_log_copied(rows.tokens, row, at),
        blocks=tuple(
            _appended(log, at, tuple(each[number] for each in shares.blocks)) for number, log in enumerate(rows.blocks)
        ),
        prompt_len=put(rows.prompt_len, at, rows.prompt_len[row]),
        prefill_len=put(rows.prefill_len, at, np.where(holds, rows.prefill_len[row], known)),
        num_tokens=put(rows.num_tokens, at, known),
        num_computed_tokens=put(rows.num_computed_tokens, at, np.where(holds, rows.num_computed_tokens[row], 0)),
        sampling=_sampling_copied(rows.sampling, row, at, indices),
        cache_keys=tuple(keys),
        family=put(rows.family, at, rows.family[row]),
        num_samples=put(rows.num_samples, family, rows.num_samples[row] + len(names)),
        priority=put(rows.priority, at, rows.priority[row]),
        weights=_log_copied(rows.weights, row, at),
    )


def _log_copied(log: Log, row: int, at: Intp) -> Log:
    items = log[row]
    return log.append(at, np.tile(items, len(at)), np.full(len(at), len(items))) if len(items) else log


def _appended(log: Log, at: Intp, lists: tuple[I32, ...]) -> Log:
    counts = np.array([len(each) for each in lists], np.intp)
    return log.append(at[: len(lists)], np.concatenate(lists), counts) if counts.any() else log


def _sampling_copied(sampling: SamplingRows, row: int, at: Intp, sample_indices: I32) -> SamplingRows:
    columns = {each.name: getattr(sampling, each.name) for each in attrs.fields(SamplingRows)}
    copied = {name: put(column, at, column[row]) for name, column in columns.items()}
    return SamplingRows(**{**copied, "sample_index": put(sampling.sample_index, at, sample_indices)})


# More tokens ---------------------------------------------------------------------------------------------------------


def _longer(state: BatchState, sched: SchedState, request: NewRequest, ids: I32) -> NewRequest:
    """A waiting request with more tokens."""
    longer = i32(np.concatenate((request.prompt_token_ids, ids)))
    asked = request.sampling.max_tokens
    most = state.plan.max_model_len if asked is None else asked
    _check_growth(state, request.request_id, ids, len(longer), most)
    hashes = prefix.all_hashes(state.plan, longer, request.cache_key, sched.weights_version)
    return evolve(request, prompt_token_ids=longer, block_hashes=hashes)


def _check_growth(state: BatchState, request_id: str, ids: I32, length: int, max_tokens: int) -> None:
    plan = state.plan
    check_token_ids(plan, ids, request_id)
    if length >= plan.max_model_len:
        limit = f"must leave room for one token within max_model_len={plan.max_model_len}"
        raise RequestError("length", length, limit, request_id)
    check_room(plan, min(plan.max_model_len, length + max_tokens), request_id)
