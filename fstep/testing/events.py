"""Named events: what an example contained, so that a strategy that has become tame is noticed.

An event is one line in `EVENTS`: a name, what a runner must report for it to be seen, and a predicate over `Seen`.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from fstep.state import FinishReason
from fstep.testing.lives import Life, LifePhase, Lives, Turn
from fstep.testing.runner import StepReport


@frozen(eq=False)
class Seen:
    """One action upon a runner: an arrival, an abort or a step, with the lives before and after it."""

    before: Lives
    after: Lives
    added: str | None = None
    aborted: str | None = None
    report: StepReport | None = None  #: of a step
    turns: tuple[Turn, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(turn.count for turn in self.turns)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        batch = self.report and self.report.batch
        return batch.block_sizes if batch else ()

    @property
    def preempted(self) -> list[Life]:
        """Those that the step preempted, as they were before it."""
        todo = self.report and self.report.schedule
        return [self.before[name] for name in todo.preempted] if todo else []

    @property
    def resumed(self) -> list[Life]:
        todo = self.report and self.report.schedule
        return [self.before[each.request_id] for each in todo.resumed] if todo else []

    @property
    def new(self) -> set[str]:
        todo = self.report and self.report.schedule
        return {each.request_id for each in todo.new} if todo else set()

    @property
    def ended(self) -> dict[str, str | None]:
        """The requests whose end came out of this step, and why."""
        outputs = self.report.outputs if self.report else ()
        return {each.request_id: each.finish_reason for each in outputs if each.finish_reason is not None}

    @property
    def passed_over(self) -> bool:
        """Whether a request runs, and got nothing in the step."""
        given = {turn.request_id for turn in self.turns}
        running = [name for name, life in self.before.items() if life.phase is LifePhase.RUNNING]
        return any(self.after[name].phase is LifePhase.RUNNING and name not in given for name in running)

    def aborted_in(self, phase: LifePhase, in_decode: bool = False) -> bool:
        life = self.before.get(self.aborted or "")
        return life is not None and life.phase is phase and life.in_decode == in_decode


@frozen(eq=False)
class Event:
    """`needs` names the part of a `StepReport` without which it can't be seen; "" is none."""

    name: str
    needs: str
    happened: Callable[[Seen], bool]


def _decode(turn: Turn) -> bool:
    return turn.count == 1 and turn.num_computed > 0 and not turn.partial


def _chunk_fills_block(seen: Seen) -> bool:
    return any(turn.partial and turn.end % size == 0 for turn in seen.turns for size in seen.block_sizes)


def _full_prompt_hit(seen: Seen) -> bool:
    """All whole blocks of a prompt are found but for the last token, which is computed."""
    entering = [turn for turn in seen.turns if turn.request_id in seen.new]
    return any(
        0 < turn.num_computed == (turn.num_known - 1) // size * size for turn in entering for size in seen.block_sizes
    )


def _block_runs_out(seen: Seen) -> bool:
    """A last block is full, so the next token needs another."""
    return any(not turn.partial and turn.end % size == 0 for turn in seen.turns for size in seen.block_sizes)


def _has_prompts_and_decodes(seen: Seen) -> bool:
    return len({_decode(turn) for turn in seen.turns}) == 2


def _one_leaves_another_enters(seen: Seen) -> bool:
    todo = seen.report and seen.report.schedule
    return todo is not None and bool(todo.finished) and bool(todo.new)


def _no_block_left(seen: Seen) -> bool:
    pools = seen.report and seen.report.pools
    return any(len(pool.free) == 0 for pool in pools) if pools else False


def _padded(seen: Seen) -> bool:
    batch = seen.report and seen.report.batch
    return batch is not None and len(batch.positions) > batch.num_tokens


def _budget_of_one(seen: Seen) -> bool:
    others = sum(life.open for life in seen.before.values()) > 1
    return seen.tokens == 1 and (others or seen.turns[0].partial)


EVENTS: tuple[Event, ...] = (
    Event("id used again", "", lambda s: s.added is not None and s.after[s.added].again),
    Event("aborted while waiting", "schedule", lambda s: s.aborted_in(LifePhase.WAITING)),
    Event("aborted in prefill", "schedule", lambda s: s.aborted_in(LifePhase.RUNNING)),
    Event("aborted in decode", "schedule", lambda s: s.aborted_in(LifePhase.RUNNING, in_decode=True)),
    Event("aborted while preempted", "schedule", lambda s: s.aborted_in(LifePhase.PREEMPTED)),
    Event("preempted in prefill", "schedule", lambda s: any(not each.in_decode for each in s.preempted)),
    Event("preempted in decode", "schedule", lambda s: any(each.in_decode for each in s.preempted)),
    Event("preempted again", "schedule", lambda s: any(each.preemptions for each in s.preempted)),
    Event("resumed with output", "schedule", lambda s: any(each.token_ids for each in s.resumed)),
    Event("prompt in chunks", "schedule", lambda s: any(turn.partial for turn in s.turns)),
    Event("chunk ends at a block boundary", "batch", _chunk_fills_block),
    Event("block runs out at a boundary", "batch", _block_runs_out),
    Event("step with 0 tokens", "schedule", lambda s: s.report is not None and not s.turns),
    Event("budget of 1", "schedule", _budget_of_one),
    Event("prompts and decodes in one step", "schedule", _has_prompts_and_decodes),
    Event("passed over in a step", "schedule", lambda s: s.report is not None and s.passed_over),
    Event("enters and leaves in one step", "schedule", lambda s: bool(s.new & s.ended.keys())),
    Event("one leaves, another enters", "schedule", _one_leaves_another_enters),
    Event("several end in one step", "", lambda s: len(s.ended) > 1),
    Event("ended by a stop token", "", lambda s: FinishReason.STOP in s.ended.values()),
    Event("ended by its length", "", lambda s: FinishReason.LENGTH in s.ended.values()),
    Event("no block left", "pools", _no_block_left),
    Event("padded step", "batch", _padded),
    Event("prefix hit", "schedule", lambda s: any(turn.num_computed for turn in s.turns if turn.request_id in s.new)),
    Event("full-prompt hit", "schedule", _full_prompt_hit),
)


def events_in(seen: Seen) -> set[str]:
    """The names of the events that an action contained."""
    return {event.name for event in EVENTS if event.happened(seen)}
