"""What is known of each request from outside, step by step, and what no runner may do to one.

Made of nothing but the requests that were added and the reports of the steps, so it holds for an engine of which
nothing else can be seen. `Life` is a value; `after_step` and its kin give the next ones.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from attrs import evolve, frozen

from fstep.state import BatchArrays, CheckError, NewRequest, Schedule
from fstep.testing.runner import Output, StepReport


class LifePhase(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"
    ABORTED = "aborted"


@frozen(eq=False)
class Life:
    """One request as it is between two steps."""

    request: NewRequest
    again: bool = False  #: its id was another's before
    phase: LifePhase = LifePhase.WAITING
    token_ids: tuple[int, ...] = ()
    num_computed: int = 0  #: tokens, as the schedules have it
    preemptions: int = 0
    finish_reason: str | None = None
    gone: bool = False  #: a schedule named it as finished
    behind: bool = False  #: the former request of its id isn't gone yet: its end and this one may come in one schedule

    @property
    def open(self) -> bool:
        """Whether it has tokens to come."""
        return self.phase not in (LifePhase.ENDED, LifePhase.ABORTED)

    @property
    def num_known(self) -> int:
        """Tokens, prompt and output."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    @property
    def in_decode(self) -> bool:
        return bool(self.token_ids) and self.num_computed == self.num_known - 1


Lives: TypeAlias = Mapping[str, Life]  #: the newest of each id


@frozen
class Turn:
    """What one request was given in a step: `count` tokens after the `num_computed` that it had."""

    request_id: str
    num_computed: int
    count: int
    num_known: int

    @property
    def end(self) -> int:
        return self.num_computed + self.count

    @property
    def partial(self) -> bool:
        """Whether tokens that are known are left, so that none may be drawn."""
        return self.end < self.num_known


def after_add(lives: Lives, request: NewRequest) -> Lives:
    former = lives.get(request.request_id)
    behind = former is not None and not former.gone
    return {**lives, request.request_id: Life(request, again=former is not None, behind=behind)}


def after_abort(lives: Lives, request_id: str) -> Lives:
    life = lives.get(request_id)
    if life is None or not life.open:
        return lives
    return {**lives, request_id: evolve(life, phase=LifePhase.ABORTED)}


def scheduled(lives: Lives, report: StepReport) -> Lives:
    """The lives after a step's schedule, before its tokens; checked. Without one, who is in the batch runs."""
    todo = report.schedule
    if todo is None:
        return _in_batch(lives, report.batch)
    after = dict(lives)
    for each in todo.finished:
        after[each.request_id] = _finished(after, each.request_id)
    for name in todo.preempted:
        life = _need(after, name, "preempted", (LifePhase.RUNNING, LifePhase.ABORTED))
        phase = LifePhase.PREEMPTED if life.open else life.phase
        after[name] = evolve(life, phase=phase, num_computed=0, preemptions=life.preemptions + 1)
    hits = {each.request_id: each.num_computed_tokens for each in (*todo.resumed, *todo.new)}
    for name, verb, phase in _entering(todo):
        life = _need(after, name, verb, (phase,))
        after[name] = evolve(life, phase=LifePhase.RUNNING, num_computed=hits[name])
    return after


def _finished(lives: Lives, name: str) -> Life:
    """The life of an id once a schedule named it as finished: its newest request is gone, or the one before it."""
    life = lives.get(name)
    if life is not None and life.behind and life.phase is LifePhase.WAITING:
        return evolve(life, behind=False)
    return evolve(_need(lives, name, "finished", (LifePhase.ENDED, LifePhase.ABORTED)), gone=True)


def _in_batch(lives: Lives, batch: BatchArrays | None) -> Lives:
    after = dict(lives)
    if batch is not None:
        for name, computed in zip(batch.request_ids, batch.num_computed_tokens.tolist(), strict=False):
            life = _need(after, name, "in the batch", (LifePhase.WAITING, LifePhase.RUNNING, LifePhase.PREEMPTED))
            after[name] = evolve(life, phase=LifePhase.RUNNING, num_computed=computed)
    return after


def _entering(todo: Schedule) -> list[tuple[str, str, LifePhase]]:
    back = [(each.request_id, "resumed", LifePhase.PREEMPTED) for each in todo.resumed]
    return back + [(each.request_id, "new", LifePhase.WAITING) for each in todo.new]


def _need(lives: Lives, name: str, verb: str, phases: tuple[LifePhase, ...]) -> Life:
    """A request of a schedule, in a phase in which that may happen to it."""
    life = lives.get(name)
    if life is None or life.phase not in phases:
        is_now = "unknown" if life is None else life.phase.value
        expected = " or ".join(each.value for each in phases)
        raise CheckError("schedule", f"request {name!r}", f"phase of what is {verb}", expected, is_now)
    return life


def turns(lives: Lives, report: StepReport) -> tuple[Turn, ...]:
    """What each request of a step is given, `lives` being what `scheduled` made; checked. () if nothing tells."""
    made: list[Turn] = []
    for b, (name, count) in enumerate(_given(report)):
        life = _need(lives, name, "scheduled", (LifePhase.RUNNING,))
        computed = life.num_computed
        if report.batch is not None:
            computed = int(report.batch.num_computed_tokens[b])
            if computed != life.num_computed:
                raise CheckError("I6", f"request {name!r}", "num_computed_tokens", life.num_computed, computed)
        made.append(Turn(name, computed, count, life.num_known))
    _check_turns(made)
    return tuple(made)


def _given(report: StepReport) -> list[tuple[str, int]]:
    """The requests of a step and their tokens, in the order of the batch."""
    if report.schedule is not None:
        counts: list[int] = report.schedule.num_scheduled_tokens.tolist()
        return list(zip(report.schedule.request_ids, counts, strict=True))
    if report.batch is None:
        return []
    of_batch: list[int] = np.bincount(report.batch.row_of_token, minlength=report.batch.num_reqs).tolist()
    return list(zip(report.batch.request_ids, of_batch, strict=False))


def _check_turns(made: list[Turn]) -> None:
    seen: set[str] = set()
    for turn in made:
        where = f"request {turn.request_id!r}"
        if turn.request_id in seen:
            raise CheckError("schedule", where, "request_ids", "named once", "named twice")
        if not 1 <= turn.count <= turn.num_known - turn.num_computed:
            most = turn.num_known - turn.num_computed
            raise CheckError("schedule", where, "num_scheduled_tokens", f"1 to {most}", turn.count)
        seen.add(turn.request_id)


def after_step(lives: Lives, report: StepReport, given: Sequence[Turn]) -> Lives:
    """The lives after a step: tokens computed and drawn. `lives` is what `scheduled` made, `given` what `turns` did."""
    _check_outputs(lives, report, given)
    after = dict(lives)
    for turn in given:
        after[turn.request_id] = evolve(after[turn.request_id], num_computed=turn.end)
    for output in report.outputs:
        life = after[output.request_id]
        ended = output.finish_reason is not None
        phase = LifePhase.RUNNING if life.phase is LifePhase.WAITING else life.phase
        after[output.request_id] = evolve(
            life,
            phase=LifePhase.ENDED if ended else phase,
            token_ids=life.token_ids + tuple(int(each) for each in output.token_ids),
            finish_reason=None if output.finish_reason is None else str(output.finish_reason),
        )
    return after


def _check_outputs(lives: Lives, report: StepReport, given: Sequence[Turn]) -> None:
    """An output is of a request that is open, and of one whose tokens are all computed; and those all have one."""
    got: dict[str, Output] = {}
    for output in report.outputs:
        name, life = output.request_id, lives.get(output.request_id)
        if life is None or not life.open:
            is_now = "nobody's" if life is None else life.phase.value
            raise CheckError("output", f"request {name!r}", "phase", "open", f"{is_now}, and gets {_short(output)}")
        if name in got:
            raise CheckError("output", f"request {name!r}", "outputs of the step", 1, 2)
        got[name] = output
    if report.schedule is not None or report.batch is not None:
        _check_who_draws(got, given)


def _check_who_draws(got: Mapping[str, Output], given: Sequence[Turn]) -> None:
    """I7: who has known tokens left draws nothing, everybody else does."""
    drawing = {turn.request_id for turn in given if not turn.partial}
    for name, output in got.items():
        if name not in drawing and len(output.token_ids):
            raise CheckError(
                "I7", f"request {name!r}", "token_ids", "none: not all of its tokens are computed", _short(output)
            )
    for name in sorted(drawing - got.keys()):
        raise CheckError("I7", f"request {name!r}", "token_ids", "a token: all that it has is computed", "none")


def check_answer(life: Life, tokens: Sequence[int], reason: str | None) -> None:
    """I1: a request has the first of the tokens that it gets alone; all of them, and that reason, if it has ended."""
    where = f"request {life.request.request_id!r}"
    wanted = tuple(tokens)
    if life.phase is LifePhase.ENDED:
        if life.token_ids != wanted:
            raise CheckError("I1", where, "token_ids", wanted, life.token_ids)
        if reason is not None and life.finish_reason != reason:
            raise CheckError("I1", where, "finish_reason", reason, life.finish_reason)
    elif life.token_ids != wanted[: len(life.token_ids)]:
        raise CheckError("I1", where, "token_ids", f"the first of {wanted}", life.token_ids)
    elif life.open and len(life.token_ids) == len(wanted):
        raise CheckError("I1", where, "finish_reason", reason or "an end", "None")


def _short(output: Output) -> str:
    return f"{tuple(output.token_ids)}, {output.finish_reason or 'no end'}"
