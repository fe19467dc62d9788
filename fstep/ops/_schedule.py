"""Who runs in a step, under a token budget, with chunked prefill and preemption.

First come, first served: running requests go first, in order of admission; then the preempted ones, then those that
wait. Other policies put another order in its place. A prompt is cut to what the budget leaves. When the free blocks
don't suffice, the last request in that order gives all of its own back and starts again later, its output prefilled
with its prompt; nobody is admitted in such a step. A request that comes in
shares the cached blocks of its longest known prefix; a block is known as soon as the step that fills it is scheduled,
since attention writes before it reads. (vLLM's rules.)

Nothing here copies history: a step costs O(running + changes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from attrs import evolve, frozen

from fstep.ops import prefix
from fstep.state import (
    I32,
    BatchState,
    BlockPool,
    Bool,
    Finished,
    FinishReason,
    Intp,
    KVGroup,
    NewRequest,
    Ragged,
    Resumed,
    RowPhase,
    Rows,
    SchedState,
    Schedule,
    SchedulingPolicy,
    frozen_array,
    i32,
)

Pools: TypeAlias = tuple[BlockPool, ...]  #: one a KV group


@frozen(eq=False)
class _Grants:
    """What some requests get in this step: tokens, and new blocks in each KV group."""

    counts: I32  #: [n]
    blocks: tuple[Ragged, ...]  #: one a group, over the `n` requests

    def __add__(self, other: _Grants) -> _Grants:
        if len(other.counts) == 0:
            return self
        pairs = zip(self.blocks, other.blocks, strict=True)
        return _Grants(np.concatenate((self.counts, other.counts)), tuple(a + b for a, b in pairs))


@frozen(eq=False)
class _Candidate:
    """A request that may come in."""

    num_tokens: int
    hashes: tuple[tuple[bytes, ...], ...]  #: of its whole blocks, one tuple a KV group


@frozen(eq=False)
class _Admission:
    """What a request that comes in gets."""

    num_computed_tokens: int
    left: int  #: tokens that aren't computed yet
    count: int
    blocks: tuple[I32, ...]  #: one a KV group, those of the hit first


def schedule(sched: SchedState, state: BatchState) -> tuple[Schedule, SchedState]:
    """The next step's `Schedule`, and what the scheduler knows afterwards.

    Requests that met a stop rule or were aborted are named as finished, and their blocks are free for this very
    step. The schedule may be empty.
    """
    rows = state.rows
    finished = _ended(sched, rows)
    gone = frozenset(each.request_id for each in finished)
    pools = _retire(tuple(pool.settled() for pool in sched.pools), rows, finished)
    running, preempted = _without(sched.running, gone), _without(sched.preempted, gone)

    ordered = _in_order(sched.limits.scheduling_policy, rows, running)
    kept, counts, pools = _stay(sched, state, ordered, pools)
    victims, served = ordered[kept:], ordered[:kept]
    served, grants, pools = _continue(sched, state, served, counts, pools)
    candidates = _candidates(sched, rows, preempted)
    admitted: tuple[_Admission, ...] = ()
    if not victims:
        admitted, pools = _admit(sched, state, candidates, served, len(running), grants, pools)
    pairs = tuple(zip(candidates, admitted, strict=False))
    resumed = tuple(Resumed(name, each.num_computed_tokens) for name, each in pairs if isinstance(name, str))
    new = tuple(_with_hit(request, each) for request, each in pairs if isinstance(request, NewRequest))
    names = tuple(each if isinstance(each, str) else each.request_id for each, _ in pairs)
    grants = grants + _as_grants(admitted, state)
    made = Schedule(
        finished=finished,
        preempted=victims,
        resumed=resumed,
        new=new,
        request_ids=served + names,
        num_scheduled_tokens=frozen_array(grants.counts),
        new_blocks=grants.blocks,
        copies=sched.copies,
    )
    entered, stay = frozenset(names), _without(running, frozenset(victims))
    return made, SchedState(
        limits=sched.limits,
        pools=pools,
        waiting=tuple(each for each in sched.waiting if each.request_id not in entered) if new else sched.waiting,
        running=stay + names,
        preempted=victims + _without(preempted, entered),
        weights_version=sched.weights_version,
        uncached=sched.uncached.intersection(stay),
    )


# Who goes first ------------------------------------------------------------------------------------------------------


def _in_order(policy: SchedulingPolicy, rows: Rows, running: tuple[str, ...]) -> tuple[str, ...]:
    """The running requests as they are served; when blocks run out, the last of them gives way."""
    if policy is SchedulingPolicy.FCFS:
        return running
    at = rows.request_ids.rows(running)
    prefills = rows.num_tokens[at] - rows.num_computed_tokens[at] > 1
    key = rows.priority[at] if policy is SchedulingPolicy.PRIORITY else prefills
    order: list[int] = np.argsort(key, kind="stable").tolist()
    return tuple(running[index] for index in order)


def _candidates(sched: SchedState, rows: Rows, preempted: tuple[str, ...]) -> tuple[str | NewRequest, ...]:
    """Who may come in, the first first: preempted requests and those that wait."""
    candidates = (*preempted, *sched.waiting)
    if sched.limits.scheduling_policy is not SchedulingPolicy.PRIORITY or len(candidates) < 2:
        return candidates
    ranks = [*rows.priority[rows.request_ids.rows(preempted)], *(each.priority for each in sched.waiting)]
    return tuple(candidates[index] for index in sorted(range(len(ranks)), key=ranks.__getitem__))


# Those that leave ----------------------------------------------------------------------------------------------------


def _ended(sched: SchedState, rows: Rows) -> tuple[Finished, ...]:
    """The requests that met a stop rule, and those that are to end."""
    by_rule = np.nonzero(rows.phase >= RowPhase.STOPPED)[0].tolist()
    if not by_rule and not sched.ending:
        return ()
    ended: dict[str, Finished] = {each.request_id: each for each in sched.ending if each.request_id in rows.request_ids}
    for row in by_rule:
        name, reason = rows.request_ids[row], RowPhase(rows.phase[row]).finish_reason
        if name is not None and reason is not None:
            ended[name] = Finished(name, reason)
    return tuple(ended.values())


def _without(names: tuple[str, ...], gone: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in gone) if gone else names


def _retire(pools: Pools, rows: Rows, finished: tuple[Finished, ...]) -> Pools:
    """The pools with the blocks of the ended requests free; what a failed one computed is not to be found again."""
    failed = tuple(each.request_id for each in finished if each.reason is FinishReason.ERROR)
    pools = _give_back(pools, rows, failed, forget=True)
    return _give_back(pools, rows, tuple(each.request_id for each in finished if each.request_id not in failed))


def _give_back(pools: Pools, rows: Rows, names: tuple[str, ...], forget: bool = False) -> Pools:
    """The pools with all blocks of some requests given back."""
    if not names:
        return pools
    held = rows.request_ids.rows(names).tolist()
    pairs = zip(pools, rows.blocks, strict=True)
    return tuple(pool.give(*(blocks[row] for row in held), forget=forget) for pool, blocks in pairs)


# Those that go on ----------------------------------------------------------------------------------------------------


def _stay(sched: SchedState, state: BatchState, running: tuple[str, ...], pools: Pools) -> tuple[int, I32, Pools]:
    """How many of the running requests may stay, what they get, and the pools without the blocks of the others.

    Who gets no token for want of budget stays too.
    """
    rows, at = state.rows, state.rows.request_ids.rows(running)
    wanted = _wanted(rows.num_tokens[at] - rows.num_computed_tokens[at], sched)
    before = np.cumsum(wanted) - wanted
    counts = np.clip(sched.limits.max_num_batched_tokens - before, 0, wanted).astype(np.int32)
    needed = [np.cumsum(each) for each in _missing(state, at, counts)]
    kept = len(running)
    while any(kept and int(need[kept - 1]) > pool.num_free for need, pool in zip(needed, pools, strict=True)):
        kept -= 1
        pools = _give_back(pools, rows, running[kept : kept + 1])
    return kept, counts[:kept], pools


def _missing(state: BatchState, at: Intp, counts: I32) -> tuple[I32, ...]:
    """The blocks that some rows lack for their next `counts` tokens: one a KV group, `[n]`."""
    seq_lens = state.rows.num_computed_tokens[at] + counts
    pairs = zip(state.plan.groups, state.rows.blocks, strict=True)
    return tuple(np.maximum(-(-seq_lens // group.block_size) - blocks.length[at], 0) for group, blocks in pairs)


def _wanted(left: I32, sched: SchedState) -> I32:
    """What running requests with so many tokens left ask for, in the order in which they are served."""
    wanted = _chunk(left, sched)
    if sched.limits.max_long_partial_prefills:
        long = _long(left, sched)
        wanted = np.where(long & (np.cumsum(long) > sched.limits.max_long_partial_prefills), 0, wanted)
    return wanted


def _num_long(sched: SchedState, rows: Rows, served: tuple[str, ...]) -> int:
    at = rows.request_ids.rows(served)
    return int(np.count_nonzero(_long(rows.num_tokens[at] - rows.num_computed_tokens[at], sched)))


def _long(left: I32, sched: SchedState) -> Bool:
    return np.greater(left, sched.limits.long_prefill_token_threshold or sched.limits.max_num_batched_tokens)


def _chunk(left: I32, sched: SchedState) -> I32:
    most = sched.limits.long_prefill_token_threshold
    return np.minimum(left, most) if most else left


def _continue(
    sched: SchedState, state: BatchState, served: tuple[str, ...], counts: I32, pools: Pools
) -> tuple[tuple[str, ...], _Grants, Pools]:
    """The running requests that get tokens, and what they get; the blocks that they fill are known from now on."""
    at = state.rows.request_ids.rows(served)
    some = np.nonzero(counts)[0]
    if len(some) < len(counts):
        indices: list[int] = some.tolist()
        counts, at, served = counts[some], at[some], tuple(served[index] for index in indices)
    taken: list[Ragged] = []
    left: list[BlockPool] = []
    for number, (pool, missing) in enumerate(zip(pools, _missing(state, at, counts), strict=True)):
        values, pool = pool.take(int(missing.sum()))
        taken.append(Ragged(values, _offsets(missing)))
        left.append(_known(pool, sched, state, number, served, counts, taken[-1]) if pool.caching else pool)
    return served, _Grants(counts, tuple(taken)), tuple(left)


def _offsets(counts: I32) -> I32:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return frozen_array(offsets)


def _known(
    pool: BlockPool,
    sched: SchedState,
    state: BatchState,
    number: int,
    served: tuple[str, ...],
    counts: I32,
    new: Ragged,
) -> BlockPool:
    """The pool with the blocks cached that some requests fill in this step."""
    rows, size = state.rows, state.plan.groups[number].block_size
    at = rows.request_ids.rows(served)
    computed = rows.num_computed_tokens[at]
    filled, before = (computed + counts) // size, computed // size
    blocks: list[int] = []
    hashes: list[bytes] = []
    for b in np.nonzero(filled > before)[0].tolist():
        row, first = int(at[b]), int(before[b])
        held = np.concatenate((rows.blocks[number][row], new[b]))[: filled[b]]
        parent = pool.hash_of(int(held[first - 1])) if first else prefix.ROOT
        if parent is None or served[b] in sched.uncached:  # nothing can follow what isn't known
            continue
        ids = rows.tokens[row][: filled[b] * size]
        blocks += held[first:].tolist()
        hashes += prefix.hashes_of(ids, size, rows.cache_keys[row], sched.weights_version, first, parent)
    return pool.cache(blocks, hashes) if blocks else pool


# Those that come in --------------------------------------------------------------------------------------------------


def _admit(
    sched: SchedState,
    state: BatchState,
    candidates: tuple[str | NewRequest, ...],
    served: tuple[str, ...],
    num_running: int,
    grants: _Grants,
    pools: Pools,
) -> tuple[tuple[_Admission, ...], Pools]:
    """What the first candidates get, until one has no place, tokens or blocks."""
    budget = sched.limits.max_num_batched_tokens - int(grants.counts.sum())
    long = _num_long(sched, state.rows, served)
    admitted: list[_Admission] = []
    for each in candidates[: max(sched.limits.max_num_seqs - num_running, 0)]:
        if budget == 0 or any(pool.num_free == 0 for pool in pools):
            break
        entered = _enter(_candidate(sched, state, each), budget, sched, state.plan.groups, pools)
        if entered is None:
            break
        admission, after = entered
        long += bool(_long(i32([admission.left]), sched)[0])
        if 0 < sched.limits.max_long_partial_prefills < long:
            break
        pools = after
        admitted.append(admission)
        budget -= admission.count
    return tuple(admitted), pools


def _candidate(sched: SchedState, state: BatchState, each: str | NewRequest) -> _Candidate:
    plan, rows, version = state.plan, state.rows, sched.weights_version
    if isinstance(each, NewRequest):
        return _Candidate(len(each.prompt_token_ids), prefix.hashed(each, plan, version))
    row = rows.request_ids.row_of[each]
    hashes = prefix.all_hashes(plan, rows.tokens[row], rows.cache_keys[row], version)
    return _Candidate(int(rows.num_tokens[row]), hashes)


def _enter(
    candidate: _Candidate, budget: int, sched: SchedState, groups: tuple[KVGroup, ...], pools: Pools
) -> tuple[_Admission, Pools] | None:
    """What a request gets that comes in; None if there is no room for all of its tokens."""
    hit = prefix.hit_length(pools, groups, candidate.hashes, candidate.num_tokens)
    count = min(budget, int(_chunk(i32([candidate.num_tokens - hit]), sched)[0]))
    blocks: list[I32] = []
    left: list[BlockPool] = []
    for pool, group, hashes in zip(pools, groups, candidate.hashes, strict=True):
        found = _found(pool, hashes[: hit // group.block_size])
        idle = int(np.count_nonzero(pool.ref_counts_of(found) == 0))
        if group.blocks_for(candidate.num_tokens) - len(found) + idle > pool.num_free:
            return None
        fresh, pool = pool.share(found).take(group.blocks_for(hit + count) - len(found))
        held = np.append(i32(found), fresh)
        filled = hashes[: (hit + count) // group.block_size]
        left.append(pool.cache(held[len(found) : len(filled)].tolist(), filled[len(found) :]) if filled else pool)
        blocks.append(held)
    return _Admission(hit, candidate.num_tokens - hit, count, tuple(blocks)), tuple(left)


def _found(pool: BlockPool, hashes: Sequence[bytes]) -> list[int]:
    return [block for block in map(pool.find, hashes) if block is not None]


def _with_hit(request: NewRequest, admission: _Admission) -> NewRequest:
    hit = admission.num_computed_tokens
    return evolve(request, num_computed_tokens=hit) if hit else request


def _as_grants(admitted: tuple[_Admission, ...], state: BatchState) -> _Grants:
    blocks = (Ragged.of(each.blocks[number] for each in admitted) for number in range(len(state.plan.groups)))
    return _Grants(i32(each.count for each in admitted), tuple(blocks))
