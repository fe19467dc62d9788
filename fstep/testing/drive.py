"""Runs of whole scripts, phase by phase, with every check on.

A `Script` (see `strategies`) is played against any scheduler of the form `(sched, state) -> (Schedule, sched)`; what
comes out is compared with `reference`, request by request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np
from attrs import field, frozen

from fstep import ops
from fstep.ops.checks import check_batch, check_rows_stay, check_state
from fstep.state import (
    F32,
    KV,
    BatchState,
    CheckError,
    Env,
    Finished,
    FinishReason,
    NewRequest,
    Plan,
    RequestError,
    RowEvent,
    RowPhase,
    Sampled,
    SchedState,
    Schedule,
)
from fstep.testing.adversary import Scheduler, adversary
from fstep.testing.checks import guarded, poison, still_cached
from fstep.testing.reference import reference_tokens

if TYPE_CHECKING:
    from fstep.testing.strategies import Script

GUARD_EVERY = 4  #: steps

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Oracle(Protocol):
    """A model that can be asked without a cache, as the hash models can."""

    def reference_logits(self, token_ids: list[int]) -> F32: ...


@frozen(eq=False)
class Moment:
    """One step of a run: the values between its phases."""

    before: BatchState
    sched_before: SchedState
    schedule: Schedule
    sched: SchedState
    prepared: BatchState  #: after `build_meta`
    forwarded: BatchState
    kv: KV  #: after `forward`
    sampled: BatchState
    got: Sampled  #: on the host
    after: BatchState  #: after `commit`
    events: tuple[RowEvent, ...]


Watch: TypeAlias = Callable[[Moment], KV | None]


@frozen(eq=False)
class Answer:
    """What became of one request of a script."""

    request: NewRequest
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  #: None if it was aborted before it had a row


@frozen(eq=False)
class Played:
    """A whole run: an answer for each arrival, and how often things happened."""

    answers: tuple[Answer, ...]
    counts: Counter[str] = field(factory=Counter[str])


def checked_step(
    state: BatchState, sched: SchedState, env: Env, kv: KV, scheduler: Scheduler = ops.schedule, guard: bool = True
) -> Moment:
    """`step` with I4 to I7 and I18 checked, I8 and I17 provoked by NaN, and I2 guarded if asked (half the price)."""
    pure = guarded if guard else _bare
    todo, sched_after = pure(scheduler)(sched, state)
    prepared = pure(ops.prepare)(state, todo)
    check_state(sched_after, prepared)
    check_rows_stay(state, prepared)
    prepared = pure(ops.build_meta)(pure(ops.pad)(prepared))
    check_batch(prepared)
    poison(kv, prepared, cached=still_cached(sched, sched_after))
    forwarded, kv = pure(ops.forward)(prepared, env, kv)
    sampled = pure(ops.sample)(forwarded, env)
    got = ops.fetch(sampled, env)
    after, events = pure(ops.commit)(sampled, got)
    return Moment(state, sched, todo, sched_after, prepared, forwarded, kv, sampled, got, after, events)


def _bare(function: Callable[_P, _T]) -> Callable[_P, _T]:
    return function


def play(
    script: Script,
    env: Env,
    kv: KV,
    scheduler: Scheduler | None = None,
    watch: Watch | None = None,
    max_steps: int = 3000,
) -> Played:
    """A script from its first arrival until nothing is left to do. Raises `CheckError` for a run that doesn't end.

    Without a scheduler: the adversarial one while the script's choices last, then first come, first served. An arrival
    whose id is still in use waits until it is free. Purity is guarded in every fourth step. `watch` sees each step;
    should it use up the cache's handle, it returns the one to go on with.
    """
    decide = scheduler or adversary(script.choices)
    state = BatchState.empty(script.plan, kv.line, kv.epoch, rows=2)
    sched = SchedState.empty(script.plan, script.limits)
    book = _Book(script.requests)
    for number in range(max_steps):
        sched = _arrive(script, book, number, sched, state)
        for step, name in script.aborts:
            if step == number:
                sched = book.abort(name, sched, state)
        if len(book.arrived) == len(script.arrivals) and not ops.has_work(sched, state):
            book.close(state, sched)
            return Played(tuple(book.answers()), book.counts)
        moment = checked_step(state, sched, env, kv, decide, guard=number % GUARD_EVERY == 0)
        book.write(moment)
        state, sched, kv = moment.after, moment.sched, (watch and watch(moment)) or moment.kv
    raise CheckError("progress", "run", "steps", f"under {max_steps}", f"not done: {sched!r}, {state!r}")


def check_against_reference(model: Oracle, plan: Plan, answers: tuple[Answer, ...]) -> None:
    """I1: each request got the tokens that it gets alone; one that was aborted, as many of them as it got."""
    for answer in answers:
        request = answer.request
        tokens, reason = reference_tokens(
            lambda ids: model.reference_logits(list(ids)),
            request.prompt_token_ids.tolist(),
            request.sampling,
            plan.eos_token_ids,
            plan.max_model_len,
        )
        if answer.finish_reason in (None, FinishReason.ABORT) and len(answer.token_ids) < len(tokens):
            tokens, reason = tokens[: len(answer.token_ids)], answer.finish_reason
        if (answer.token_ids, answer.finish_reason) != (tokens, reason):
            expected, actual = (tokens, reason), (answer.token_ids, answer.finish_reason)
            raise CheckError("I1", f"request {request.request_id!r}", "token_ids, finish_reason", expected, actual)


def _arrive(script: Script, book: _Book, number: int, sched: SchedState, state: BatchState) -> SchedState:
    for index, (step, request) in enumerate(script.arrivals):
        if index not in book.arrived and step <= number:
            try:
                sched = ops.add(sched, state, request)
            except RequestError as error:
                if error.field != "request_id":
                    raise
                book.counts["id_in_use"] += 1
                continue
            book.arrive(index)
    return sched


class _Book:
    """Who has arrived and what they got, for one run."""

    def __init__(self, requests: tuple[NewRequest, ...]) -> None:
        self.requests = requests
        self.arrived: dict[int, str] = {}
        self.counts: Counter[str] = Counter(runs=1)
        self._current: dict[str, int] = {}
        self._tokens: dict[int, list[int]] = {}
        self._reasons: dict[int, FinishReason] = {}

    def arrive(self, index: int) -> None:
        name = self.requests[index].request_id
        self.counts["id_again"] += name in self._current
        self.arrived[index] = name
        self._current[name] = index
        self._tokens[index] = []

    def abort(self, name: str, sched: SchedState, state: BatchState) -> SchedState:
        phase = "waiting"
        if name in state.rows.request_ids.row_of:
            phase = RowPhase(state.rows.phase[state.rows.request_ids.row_of[name]]).name.lower()
        elif not any(each.request_id == name for each in sched.waiting):
            phase = "absent"
        self.counts[f"abort_{phase}"] += 1
        return ops.abort(sched, state, name)

    def write(self, moment: Moment) -> None:
        """The events of a step, and what was special about it."""
        for finished in moment.schedule.finished:
            self._end(finished)
        for event in moment.events:
            index = self._current[event.request_id]
            if index in self._reasons:
                raise CheckError("I1", f"request {event.request_id!r}", "event", "none after its end", event)
            self._tokens[index] += event.token_ids
            if event.finish_reason is not None:
                self._reasons[index] = event.finish_reason
        self.counts.update(what_happened(moment))

    def _end(self, finished: Finished) -> None:
        index = self._current[finished.request_id]
        known = self._reasons.setdefault(index, finished.reason)
        if finished.reason not in (known, FinishReason.ABORT):
            raise CheckError("I1", f"request {finished.request_id!r}", "finish_reason", known, finished.reason)

    def close(self, state: BatchState, sched: SchedState) -> None:
        """I18: when all is done nothing is in use."""
        for number, (pool, group) in enumerate(zip(sched.pools, state.plan.groups, strict=True)):
            if pool.num_free != group.num_blocks - 1:
                raise CheckError("I18", f"KV group {number}", "free blocks", group.num_blocks - 1, pool.num_free)

    def answers(self) -> Iterator[Answer]:
        for index, request in enumerate(self.requests):
            yield Answer(request, tuple(self._tokens[index]), self._reasons.get(index))


def what_happened(moment: Moment) -> Counter[str]:
    """The named events that one step contained."""
    todo, step = moment.schedule, moment.prepared.need_step("what_happened")
    padding, inputs = step.need_padding("what_happened"), step.inputs
    decodes = int(np.count_nonzero(inputs.num_scheduled_tokens == 1))
    computed = moment.prepared.rows.num_computed_tokens[inputs.rows]
    return Counter(
        steps=1,
        requests=len(todo.new),
        tokens=sum(len(event.token_ids) for event in moment.events),
        preemptions=len(todo.preempted),
        resumptions=len(todo.resumed),
        prefix_hits=sum(each.num_computed_tokens > 0 for each in (*todo.new, *todo.resumed)),
        partial_prompts=int(inputs.discard.sum()),
        continued_prompts=int(((computed > 0) & (inputs.num_scheduled_tokens > 1)).sum()),
        mixed_steps=int(0 < decodes < len(inputs.rows)),
        empty_steps=int(len(inputs.rows) == 0),
        padded_steps=int(padding.descriptor.num_tokens > padding.num_tokens),
        finished_stop=sum(event.finish_reason is FinishReason.STOP for event in moment.events),
        finished_length=sum(event.finish_reason is FinishReason.LENGTH for event in moment.events),
        one_step_lives=sum(
            event.finish_reason is not None and event.request_id in {n.request_id for n in todo.new}
            for event in moment.events
        ),
    )
