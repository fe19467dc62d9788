"""A scheduler without sense, whose schedules are valid all the same: whatever it does, the tokens must not change.

It preempts whom it likes, admits out of turn, cuts prompts anywhere, passes requests over, gives blocks before they
are needed, keeps ended requests for a while, and puts the batch in any order. The budget of tokens it ignores, the
number of sequences and the blocks it can't.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from attrs import frozen

from fstep import ops
from fstep.state import (
    I32,
    BatchState,
    BlockPool,
    Finished,
    KVGroup,
    NewRequest,
    Ragged,
    Resumed,
    RowPhase,
    SchedState,
    Schedule,
    i32,
)

Scheduler: TypeAlias = Callable[[SchedState, BatchState], tuple[Schedule, SchedState]]
Choose: TypeAlias = Callable[[int], int]  #: a number below the one given; 0 is the ordinary choice


def adversary(choices: bytes) -> Scheduler:
    """`adversarial_schedule` for as long as the choices last, then first come, first served.

    Each call takes the next choices, so it is made anew for each run.
    """
    left = list(reversed(choices))

    def decide(sched: SchedState, state: BatchState) -> tuple[Schedule, SchedState]:
        if not left:
            return ops.schedule(sched, state)
        return adversarial_schedule(sched, state, lambda n: left.pop() % n if left and n > 1 else 0)

    return decide


def adversarial_schedule(sched: SchedState, state: BatchState, choose: Choose) -> tuple[Schedule, SchedState]:
    """A valid schedule, of which `choose` makes every decision; all zeros is a plain step of everybody."""
    wishes = _wishes(sched, state, choose)
    pools = _given_back(
        tuple(pool.settled() for pool in sched.pools),
        state,
        (*(each.request_id for each in wishes.finished), *wishes.victims),
    )
    grants = _grants(sched, state, pools, wishes, choose)
    new_blocks, pools = _taken(pools, grants)
    names = tuple(each.request_id for each in grants)
    resumed = tuple(name for name in wishes.back if name in names)
    new = tuple(each for each in wishes.enter if each.request_id in names)
    todo = Schedule(
        finished=wishes.finished,
        preempted=wishes.victims,
        resumed=tuple(map(Resumed, resumed)),
        new=new,
        request_ids=names,
        num_scheduled_tokens=i32(each.num_tokens for each in grants),
        new_blocks=new_blocks,
        copies=sched.copies,
    )
    gone = {each.request_id for each in wishes.finished}
    return todo, SchedState(
        limits=sched.limits,
        pools=pools,
        waiting=tuple(each for each in sched.waiting if each not in new),
        running=(*wishes.stay, *resumed, *(each.request_id for each in new)),
        preempted=tuple(name for name in (*wishes.victims, *sched.preempted) if name not in (*gone, *resumed)),
        ending=tuple(each for each in sched.ending if each.request_id not in gone),
        weights_version=sched.weights_version,
        uncached=sched.uncached.intersection(wishes.stay),
    )


@frozen(eq=False)
class _Wishes:
    finished: tuple[Finished, ...]
    victims: tuple[str, ...]
    stay: tuple[str, ...]  #: running, and not to be preempted; those that have ended but are kept, too
    able: tuple[str, ...]  #: of these, those that may be scheduled
    back: tuple[str, ...]
    enter: tuple[NewRequest, ...]


@frozen
class _Grant:
    request_id: str
    num_tokens: int
    blocks: tuple[int, ...]  #: new ones, one number a KV group


@frozen
class _Need:
    """A request that may be scheduled: what it has, and what it could be given."""

    request_id: str
    known: int
    computed: int
    held: tuple[int, ...]  #: blocks, one number a KV group


def _wishes(sched: SchedState, state: BatchState, choose: Choose) -> _Wishes:
    pending = _pending(sched, state)
    finished = tuple(each for each in pending.values() if choose(4) != 3)
    gone = {each.request_id for each in finished}
    able = [name for name in sched.running if name not in pending]
    victims = tuple(name for name in able if choose(6) == 5)
    back = [name for name in (*victims, *sched.preempted) if name not in pending]
    return _Wishes(
        finished=finished,
        victims=victims,
        stay=tuple(name for name in sched.running if name not in gone and name not in victims),
        able=tuple(name for name in able if name not in victims),
        back=tuple(name for name in back if choose(3) != 2),
        enter=tuple(each for each in sched.waiting if choose(3) != 2),
    )


def _pending(sched: SchedState, state: BatchState) -> dict[str, Finished]:
    """The requests that have ended; a stop rule goes before an abort."""
    pending = {each.request_id: each for each in sched.ending}
    for row in state.rows.live().tolist():
        reason = RowPhase(state.rows.phase[row]).finish_reason
        name = state.rows.request_ids[int(row)]
        if name is not None and reason is not None:
            pending[name] = Finished(name, reason)
    return pending


def _given_back(pools: tuple[BlockPool, ...], state: BatchState, names: Sequence[str]) -> tuple[BlockPool, ...]:
    rows = [state.rows.request_ids.row_of[name] for name in names]
    pairs = zip(pools, state.rows.blocks, strict=True)
    return tuple(pool.give(*(blocks[row] for row in rows)) for pool, blocks in pairs)


def _grants(
    sched: SchedState, state: BatchState, pools: tuple[BlockPool, ...], wishes: _Wishes, choose: Choose
) -> tuple[_Grant, ...]:
    """What each request gets, in the order of the batch."""
    able = [_need_of(state, name) for name in wishes.able]
    groups = state.plan.groups
    none = (0,) * len(groups)
    back = [_Need(name, int(state.rows.num_tokens[row]), 0, none) for name, row in _rows(state, wishes.back)]
    enter = [_Need(each.request_id, len(each.prompt_token_ids), 0, none) for each in wishes.enter]
    places = sched.limits.max_num_seqs - len(wishes.stay)
    free = [pool.num_free for pool in pools]
    grants: list[_Grant] = []
    for need in _shuffled((*able, *back, *enter), choose):
        comes = need not in able
        if (comes and places == 0) or (not comes and choose(5) == 4):
            continue
        grant = _grant(need, groups, free, state.plan.max_model_len, choose)
        if grant is not None:
            grants.append(grant)
            free = [have - taken for have, taken in zip(free, grant.blocks, strict=True)]
            places -= comes
    return tuple(grants)


def _rows(state: BatchState, names: tuple[str, ...]) -> zip[tuple[str, int]]:
    return zip(names, [state.rows.request_ids.row_of[name] for name in names], strict=True)


def _need_of(state: BatchState, name: str) -> _Need:
    rows = state.rows
    row = rows.request_ids.row_of[name]
    held = tuple(int(blocks.length[row]) for blocks in rows.blocks)
    return _Need(name, int(rows.num_tokens[row]), int(rows.num_computed_tokens[row]), held)


def _shuffled(needs: Sequence[_Need], choose: Choose) -> list[_Need]:
    left = list(needs)
    return [left.pop(choose(len(left))) for _ in needs]


def _grant(
    need: _Need, groups: tuple[KVGroup, ...], free: list[int], max_model_len: int, choose: Choose
) -> _Grant | None:
    """As many tokens as chosen or as there is room for, and perhaps a block too early; None if there is no room."""
    early = int(choose(8) == 7)
    missing = need.known - need.computed
    for count in range(missing - choose(missing), 0, -1):
        blocks: list[int] = []
        for group, held, have in zip(groups, need.held, free, strict=True):
            wanted = max(group.blocks_for(need.computed + count) - held, 0)
            spare = early if held + wanted + early <= group.blocks_for(max_model_len) else 0
            blocks.append(min(wanted + spare, have) if wanted <= have else -1)
        if min(blocks) >= 0:
            return _Grant(need.request_id, count, tuple(blocks))
    return None


def _taken(
    pools: tuple[BlockPool, ...], grants: tuple[_Grant, ...]
) -> tuple[tuple[Ragged, ...], tuple[BlockPool, ...]]:
    new: list[Ragged] = []
    left: list[BlockPool] = []
    for number, pool in enumerate(pools):
        lists: list[I32] = []
        for grant in grants:
            ids, pool = pool.take(grant.blocks[number])
            lists.append(ids)
        new.append(Ragged.of(lists))
        left.append(pool)
    return tuple(new), tuple(left)
