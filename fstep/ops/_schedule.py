"""Who runs in a step: first come, first served, under a token budget, with chunked prefill and preemption.

Running requests go first, in order of admission; then the preempted ones, then those that wait. A prompt is cut to
what the budget leaves. When the free blocks don't suffice, the request admitted last gives all of its own back and
starts again later, its output prefilled with its prompt; nobody is admitted in such a step. (vLLM's rules.)

Nothing here copies history: a step costs O(running + changes).
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from fstep.state import (
    I32,
    BatchState,
    BlockPool,
    Finished,
    NewRequest,
    Ragged,
    Resumed,
    RowPhase,
    Rows,
    SchedState,
    Schedule,
    frozen_array,
    i32,
)


@frozen(eq=False)
class _Grants:
    """What some requests get in this step: tokens, and new blocks in each KV group."""

    counts: I32  #: [n]
    blocks: tuple[I32, ...]  #: one a group, [n]

    def __getitem__(self, part: slice) -> _Grants:
        return _Grants(self.counts[part], tuple(each[part] for each in self.blocks))

    def __add__(self, other: _Grants) -> _Grants:
        if len(other.counts) == 0:
            return self
        pairs = zip(self.blocks, other.blocks, strict=True)
        return _Grants(np.concatenate((self.counts, other.counts)), tuple(np.concatenate(pair) for pair in pairs))


def schedule(sched: SchedState, state: BatchState) -> tuple[Schedule, SchedState]:
    """The next step's `Schedule`, and what the scheduler knows afterwards.

    Requests that met a stop rule or were aborted are named as finished, and their blocks are free for this very
    step. The schedule may be empty.
    """
    rows = state.rows
    finished = _ended(sched, rows)
    gone = frozenset(each.request_id for each in finished)
    pools = _give_back(sched.pools, rows, tuple(gone))
    running, preempted = _without(sched.running, gone), _without(sched.preempted, gone)

    grants, kept = _continue(sched, state, running, pools)
    victims, running = running[kept:], running[:kept]
    pools = _give_back(pools, rows, victims)
    resumed: tuple[str, ...] = ()
    new: tuple[NewRequest, ...] = ()
    if not victims:
        places = max(sched.limits.max_num_seqs - len(running), 0)
        resumed, new, more = _admit(sched, state, preempted, places, grants, pools)
        grants = grants + more
    admitted = resumed + tuple(each.request_id for each in new)
    new_blocks, pools = _take(pools, grants)
    made = Schedule(
        finished=finished,
        preempted=victims,
        resumed=tuple(Resumed(name) for name in resumed),
        new=new,
        request_ids=running[: len(grants.counts) - len(admitted)] + admitted,
        num_scheduled_tokens=frozen_array(grants.counts),
        new_blocks=new_blocks,
    )
    return made, SchedState(
        limits=sched.limits,
        pools=pools,
        waiting=sched.waiting[len(new) :],
        running=running + admitted,
        preempted=victims + preempted[len(resumed) :],
    )


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


def _give_back(pools: tuple[BlockPool, ...], rows: Rows, names: tuple[str, ...]) -> tuple[BlockPool, ...]:
    """The pools with all blocks of some requests free."""
    if not names:
        return pools
    held = rows.request_ids.rows(names).tolist()
    pairs = zip(pools, rows.blocks, strict=True)
    return tuple(pool.give(np.concatenate([blocks[row] for row in held])) for pool, blocks in pairs)


def _continue(
    sched: SchedState, state: BatchState, running: tuple[str, ...], pools: tuple[BlockPool, ...]
) -> tuple[_Grants, int]:
    """What the running requests get, those that get none left out; and how many of them may stay."""
    rows, at = state.rows, state.rows.request_ids.rows(running)
    computed = rows.num_computed_tokens[at]
    wanted = _chunk(rows.num_tokens[at] - computed, sched)
    before = np.cumsum(wanted) - wanted
    counts = np.clip(sched.limits.max_num_batched_tokens - before, 0, wanted).astype(np.int32)
    held = tuple(blocks.length[at] for blocks in rows.blocks)
    needed = tuple(
        np.maximum(-(-(computed + counts) // group.block_size) - have, 0)
        for group, have in zip(state.plan.groups, held, strict=True)
    )
    kept = min((_fitting(*each) for each in zip(pools, needed, held, strict=True)), default=len(running))
    grants = _Grants(counts, needed)[: min(kept, int(np.count_nonzero(counts)))]
    return grants, kept


def _fitting(pool: BlockPool, needed: I32, held: I32) -> int:
    """How many leading requests have room if all those behind them give their blocks back."""
    if int(needed.sum()) <= pool.num_free:
        return len(needed)
    room = pool.num_free + np.append(np.cumsum(held[::-1])[::-1], 0)  # with n kept, n = 0 …
    return int(np.nonzero(np.append(0, np.cumsum(needed)) <= room)[0][-1])


def _chunk(lengths: I32, sched: SchedState) -> I32:
    most = sched.limits.long_prefill_token_threshold
    return np.minimum(lengths, most) if most else lengths


def _admit(
    sched: SchedState,
    state: BatchState,
    preempted: tuple[str, ...],
    places: int,
    grants: _Grants,
    pools: tuple[BlockPool, ...],
) -> tuple[tuple[str, ...], tuple[NewRequest, ...], _Grants]:
    """The preempted and waiting requests that come in, in order, until one has no place, tokens or blocks."""
    lengths = [int(state.rows.num_tokens[row]) for row in state.rows.request_ids.rows(preempted)]
    lengths += [len(each.prompt_token_ids) for each in sched.waiting[:places]]
    budget = sched.limits.max_num_batched_tokens - int(grants.counts.sum())
    free = [pool.num_free - int(taken.sum()) for pool, taken in zip(pools, grants.blocks, strict=True)]
    counts: list[int] = []
    for length in lengths:
        whole = [group.blocks_for(length) for group in state.plan.groups]
        if places == len(counts) or budget == 0 or any(need > have for need, have in zip(whole, free, strict=True)):
            break
        counts.append(min(budget, int(_chunk(i32([length]), sched)[0])))
        budget -= counts[-1]
        free = [have - group.blocks_for(counts[-1]) for have, group in zip(free, state.plan.groups, strict=True)]
    blocks = tuple(i32(group.blocks_for(count) for count in counts) for group in state.plan.groups)
    resumed = min(len(counts), len(preempted))
    return preempted[:resumed], sched.waiting[: len(counts) - resumed], _Grants(i32(counts), blocks)


def _take(pools: tuple[BlockPool, ...], grants: _Grants) -> tuple[tuple[Ragged, ...], tuple[BlockPool, ...]]:
    """The blocks granted, out of the pools."""
    taken: list[Ragged] = []
    left: list[BlockPool] = []
    for pool, counts in zip(pools, grants.blocks, strict=True):
        offsets = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        values, pool = pool.take(int(offsets[-1]))
        taken.append(Ragged(values, frozen_array(offsets)))
        left.append(pool)
    return tuple(taken), tuple(left)
