"""`step`: all phases, one under the other."""

from __future__ import annotations

from typing import Any

from fstep.ops._build_meta import build_meta
from fstep.ops._commit import commit
from fstep.ops._forward import forward
from fstep.ops._pad import pad
from fstep.ops._prepare import prepare
from fstep.ops._sample import sample
from fstep.ops._schedule import schedule
from fstep.ops.checks import Check, check_nothing
from fstep.state import KV, BatchState, Env, RowEvent, Sampled, SchedState, Schedule


def step(
    state: BatchState, sched: SchedState, env: Env, kv: KV
) -> tuple[BatchState, SchedState, KV, Schedule, tuple[RowEvent, ...]]:
    """One step of all requests: what comes after it, and what was scheduled and what happened in it.

    Should the model raise, the arguments are still good, the KV handle too. Whoever wants to go on after an exception
    that came later calls the two halves, and keeps the handle that `launch` returned.
    """
    state, sched, kv = launch(state, sched, env, kv)
    todo = state.need_step("step").schedule
    state, events = collect(state, env)
    return state, sched, kv, todo, events


def launch(
    state: BatchState, sched: SchedState, env: Env, kv: KV, check: Check = check_nothing
) -> tuple[BatchState, SchedState, KV]:
    """The first half of a step, from `schedule` to `forward`; what `check` refuses never reaches the cache."""
    todo, sched = schedule(sched, state)
    state = prepare(state, todo)
    state = pad(state)
    state = build_meta(state)
    check(sched, state)
    state, kv = forward(state, env, kv)
    return state, sched, kv


def collect(state: BatchState, env: Env) -> tuple[BatchState, tuple[RowEvent, ...]]:
    """The second half: tokens drawn, brought to the host and committed."""
    state = sample(state, env)
    return commit(state, fetch(state, env))


def fetch(state: BatchState, env: Env) -> Sampled:
    """The sampled ids on the host, in one transfer."""
    sampled: Any = state.need_step("fetch").need_sampled("fetch")
    return Sampled(*env.device.get((sampled.token_ids, sampled.num_sampled, sampled.error)).wait())
