"""The invariants I1 to I20, and the check of each: on a state, on a step (`Moment`), or on a step beside another way.

Checks on arrays and states are in `fstep.ops.checks`. Those here run a part of the step again, on a clone of the KV
cache that they use up, and compare: exact for the hash models and for float32 models on fstep's own kernels. So each
can be called alone, from a notebook, on whatever step looks wrong:

    before = kv.clone()
    moment = checked_step(state, sched, env, kv)
    check_split(moment, env, before, b=0, cut=3)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import evolve, frozen

from fstep import ops
from fstep.state import (
    I32,
    KV,
    BatchState,
    CheckError,
    DonatedError,
    Env,
    NewRequest,
    Ragged,
    RowEvent,
    SchedState,
    Schedule,
    StaleStateError,
    i32,
)
from fstep.testing.checks import check_same, poison
from fstep.testing.drive import Moment

MAX_STEPS = 3000  #: that a state may take to its end


@frozen
class Invariant:
    """A promise, and the names in `fstep.testing` that hold a state, a step or a run to it."""

    promise: str
    checks: tuple[str, ...] = ()
    open: str = ""  #: why it isn't checked yet


#: By their numbers. Those that are open wait for the feature that they are about.
INVARIANTS: Mapping[str, Invariant] = MappingProxyType(
    {
        "I1": Invariant("tokens depend on nothing but the request and the weights", ("check_against_reference",)),
        "I2": Invariant("a phase changes nothing that it was given", ("guarded", "check_repeated")),
        "I3": Invariant("an old state gives what it gave", ("check_persistent",)),
        "I4": Invariant("each token has a slot of its own", ("check_slots", "check_tables", "check_held")),
        "I5": Invariant("query_start_loc adds up", ("check_query_start_loc",)),
        "I6": Invariant("seq_lens is computed and scheduled", ("check_seq_lens",)),
        "I7": Invariant("logits_indices name last tokens", ("check_logits_indices",)),
        "I8": Invariant("padding is inert", ("check_padding", "poison")),
        "I9": Invariant("permuted requests give permuted outputs", ("check_permuted",)),
        "I10": Invariant("any split of a prompt gives the same", ("check_split",)),
        "I11": Invariant("preempted and resumed gives the same", ("check_preempted",)),
        "I12": Invariant("a prefix hit gives what a miss gives", ("check_hit",)),
        "I13": Invariant("speculation is invisible", open="there is no speculation yet"),
        "I14": Invariant("overlap gives the same tokens", open="there is no overlap yet"),
        "I15": Invariant("parallel ranks give the same tokens", open="a step runs on one rank so far"),
        "I16": Invariant("a graph replays what it captured", open="there are no graphs yet"),
        "I17": Invariant("a request reads no block but its own", ("check_isolated", "poison")),
        "I18": Invariant("each block is free, cached or held", ("check_conservation", "check_state")),
        "I19": Invariant("forks are isolated", ("check_forks",)),
        "I20": Invariant("a trace replays", ("check_replays",)),
    }
)


def replay(
    env: Env,
    moment: Moment,
    kv: KV,
    todo: Schedule | None = None,
    change: Callable[[KV, BatchState], None] | None = None,
    **plan: Any,
) -> tuple[BatchState, KV]:
    """A step once more up to `forward`, on a clone of the cache from before it, which is used up.

    `todo` replaces its schedule, `plan` fields of its plan; `change(kv, prepared)` may alter the cache before.
    """
    state = ops.adopt(moment.before, kv)
    state = evolve(state, plan=evolve(state.plan, **plan))
    prepared = _prepared(state, todo or moment.schedule)
    if change:
        change(kv, prepared)
    return ops.forward(prepared, env, kv)


def check_repeated(moment: Moment, env: Env, donated: KV | None = None) -> KV:
    """I2: each phase gives its bits again, and `forward` may be repeated with the handle that it returned.

    It is refused with `donated`, the one that it was given. Returns the handle to go on with.
    """
    check_same("I2", "schedule()", ops.schedule(moment.sched_before, moment.before), (moment.schedule, moment.sched))
    _check_host_phases("I2", moment)
    if donated is not None:
        _refused("I2", DonatedError, moment, env, donated)
    repeated, kv = ops.forward(moment.prepared, env, moment.kv)
    check_same("I2", "forward()", repeated, moment.forwarded)
    check_same("I2", "sample()", ops.sample(moment.forwarded, env), moment.sampled)
    return kv


def check_persistent(moment: Moment, env: Env, then: KV, now: KV) -> None:
    """I3: of an old step each phase gives its bits, `forward` on `then`, a clone of the cache from before it.

    On `now`, the cache of a later step, it is refused.
    """
    _check_host_phases("I3", moment)
    check_same("I3", "sample()", ops.sample(moment.forwarded, env), moment.sampled)
    forwarded, _ = replay(env, moment, then)
    check_same("I3", "forward() on a clone", _output(forwarded), _output(moment.forwarded))
    _refused("I3", StaleStateError, moment, env, now)


def check_padding(moment: Moment, env: Env, kv: KV, **plan: Any) -> BatchState:
    """I8: the same step at another size, with NaN in all that is nobody's, gives the same bits.

    `plan` says how it is padded (`capture=(…)`); `kv` is a clone of the cache from before the step. Returns the state
    after `forward`.
    """
    forwarded, _ = replay(env, moment, kv, change=poison, **plan)
    check_same("I8", "logits", _output(forwarded), _output(moment.forwarded))
    return forwarded


def check_permuted(moment: Moment, env: Env, kv: KV, order: I32) -> None:
    """I9: with its requests in another order (`[B]`, a permutation) a step gives the same bits in that order.

    `kv` is a clone of the cache from before the step.
    """
    forwarded, _ = replay(env, moment, kv, permuted(moment.schedule, order))
    check_same("I9", "logits", _logits(forwarded), _logits(moment.forwarded)[order.tolist()])
    sampled = ops.sample(forwarded, env)
    after, events = ops.commit(sampled, ops.fetch(sampled, env))
    check_same("I9", "rows", after.rows, moment.after.rows)
    check_same("I9", "events", sorted(events), sorted(moment.events))


def permuted(schedule: Schedule, order: I32) -> Schedule:
    """The same schedule with its requests in another order."""
    places: list[int] = order.tolist()
    return evolve(
        schedule,
        request_ids=tuple(schedule.request_ids[b] for b in places),
        num_scheduled_tokens=i32(schedule.num_scheduled_tokens[order]),
        new_blocks=tuple(Ragged.of([each[b] for b in places]) for each in schedule.new_blocks),
    )


def check_split(moment: Moment, env: Env, kv: KV, b: int, cut: int) -> None:
    """I10: request `b` of a step, its first `cut` tokens beside the others and the rest alone, gives the same bits.

    `kv` is a clone of the cache from before the step; `cut` lies between 1 and the request's tokens less one.
    """
    todo, counts = moment.schedule, moment.schedule.num_scheduled_tokens.copy()
    rest = int(counts[b]) - cut
    if not 0 < cut < counts[b]:
        raise ValueError(f"cut={cut}: {todo.request_ids[b]!r} has {counts[b]} tokens in this step")
    counts[b] = cut
    forwarded, kv = replay(env, moment, kv, evolve(todo, num_scheduled_tokens=i32(counts)))
    sampled = ops.sample(forwarded, env)
    state, _ = ops.commit(sampled, ops.fetch(sampled, env))
    second = Schedule(request_ids=(todo.request_ids[b],), num_scheduled_tokens=i32([rest]))
    forwarded, _ = ops.forward(_prepared(state, second), env, kv)
    check_same("I10", f"logits of {todo.request_ids[b]!r}", _logits(forwarded)[0], _logits(moment.forwarded)[b])


def check_isolated(moment: Moment, env: Env, kv: KV, b: int) -> None:
    """I17: with NaN in the blocks of all others, request `b` of a step gets the same bits.

    `kv` is a clone of the cache from before the step.
    """
    name = moment.schedule.request_ids[b]
    forwarded, _ = replay(env, moment, kv, change=partial(poison, keep=(name,)))
    check_same("I17", f"logits of {name!r}", _logits(forwarded)[b], _logits(moment.forwarded)[b])


def check_preempted(state: BatchState, sched: SchedState, env: Env, kv: KV) -> None:
    """I11: all requests preempted now, and resumed, get the tokens that they get otherwise.

    `state` is at rest, between two steps, and `kv` its cache, which is cloned.
    """
    wanted = tokens_to_the_end(*_line(state, sched, kv), env)
    clone = kv.clone()
    state, sched = ops.revive(state, sched, clone)
    check_same("I11", "token_ids", tokens_to_the_end(state, sched, clone, env), wanted)


def check_hit(state: BatchState, sched: SchedState, env: Env, kv: KV, request: NewRequest) -> None:
    """I12: a new request gets beside the others, and with what is cached, the tokens that it gets on an empty cache.

    `state` is at rest, and `kv` its cache, which is cloned. The request has a seed, or no need of one.
    """
    state, sched, clone = _line(state, sched, kv)
    found = tokens_to_the_end(state, ops.add(sched, state, request), clone, env)
    clone = kv.clone()
    alone = BatchState.empty(state.plan, clone.line, clone.epoch)
    empty = evolve(SchedState.empty(state.plan, sched.limits), weights_version=sched.weights_version)
    wanted = tokens_to_the_end(alone, ops.add(empty, alone, request), clone, env)
    check_same("I12", f"token_ids of {request.request_id!r}", found[request.request_id], wanted[request.request_id])


def check_forks(state: BatchState, sched: SchedState, env: Env, kv: KV, request_id: str, n: int = 1) -> None:
    """I19: beside `n` copies of a request all others, and itself, get the tokens that they get without them.

    So does a line of states on a clone of the cache. `state` is at rest, and `kv` its cache, which is cloned.
    """
    lines = [_line(state, sched, kv) for _ in range(3)]
    wanted = tokens_to_the_end(*lines[0], env)
    forked, more, clone = lines[1]
    forked, more = ops.fork(forked, more, request_id, n)
    found = tokens_to_the_end(forked, more, clone, env)
    check_same("I19", "token_ids beside copies", {name: found.get(name, ()) for name in wanted}, wanted)
    check_same("I19", "token_ids on a clone", tokens_to_the_end(*lines[2], env), wanted)


def check_replays(path: str | Path, runner: Any) -> None:
    """I20: what a trace recorded comes out again on `runner`, a fresh `fstep.shell.Runner` on the same model and plan.

    Needs torch. Raises `TraceError` for a file that is no trace, or not of such a runner.
    """
    from fstep.shell import Trace, replay

    if found := replay(Trace.read(path), runner).difference:
        raise CheckError("I20", f"step {found.step}, {found.phase}", found.field, found.left, found.right)


def tokens_to_the_end(state: BatchState, sched: SchedState, kv: KV, env: Env) -> dict[str, tuple[int, ...]]:
    """What each request still gets, step after step; by request, in no order that a schedule could change."""
    found: dict[str, tuple[int, ...]] = {}
    for _ in range(MAX_STEPS):
        if not ops.has_work(sched, state):
            return dict(sorted(found.items()))
        state, sched, kv, _, events = ops.step(state, sched, env, kv)
        found |= {event.request_id: found.get(event.request_id, ()) + event.token_ids for event in events}
    raise CheckError("progress", "run", "steps", f"under {MAX_STEPS}", f"not done: {sched!r}, {state!r}")


def _line(state: BatchState, sched: SchedState, kv: KV) -> tuple[BatchState, SchedState, KV]:
    """A line of its own that begins here."""
    clone = kv.clone()
    return ops.adopt(state, clone), sched, clone


def _prepared(state: BatchState, todo: Schedule) -> BatchState:
    return ops.build_meta(ops.pad(ops.prepare(state, todo)))


def _check_host_phases(invariant: str, moment: Moment) -> None:
    prepared = _prepared(moment.before, moment.schedule)
    check_same(invariant, "prepare(), pad(), build_meta()", prepared, moment.prepared)
    again: tuple[BatchState, tuple[RowEvent, ...]] = ops.commit(moment.sampled, moment.got)
    check_same(invariant, "commit()", again, (moment.after, moment.events))


def _refused(invariant: str, error: type[Exception], moment: Moment, env: Env, kv: KV) -> None:
    try:
        ops.forward(moment.prepared, env, kv)
    except error:
        return
    raise CheckError(invariant, "forward()", "an old handle or state", error.__name__, "accepted")


def _output(state: BatchState) -> Any:
    return state.need_step("check").need_output("check")


def _logits(state: BatchState) -> Any:
    return _output(state).logits
