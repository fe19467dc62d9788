"""`Checked`: any runner with every check on, so that each call of it is a test.

What a runner's steps report is checked (I4 to I7 on its batches, I18 on its pools, the rules of a schedule), its
outputs are held against what each request must get, if the runner knows that (I1), and its requests must come to an
end. `Checked` itself is what a failing example is printed with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fstep.ops.checks import (
    check_conservation,
    check_held,
    check_logits_indices,
    check_query_start_loc,
    check_seq_lens,
    check_slots,
)
from fstep.state import BatchArrays, CheckError, NewRequest
from fstep.testing.events import Seen, events_in
from fstep.testing.lives import Life, Lives, after_abort, after_add, after_step, check_answer, scheduled, turns
from fstep.testing.runner import KnowsAnswers, Runner, StepReport

OPTIONAL = ("schedule", "batch", "pools", "reference")  #: what a runner may leave out
SLACK = 20  #: steps that a run may take beside one for each token


class Checked:
    """`runner` with every check on. Each method raises `CheckError` for what no runner may do.

    `patience` is how many steps a token may take: a run that needs more, counted over all requests that are open, has
    come to a stop. `max_model_len` bounds the tokens of a request without `max_tokens` whose answer is not
    known.
    """

    def __init__(self, runner: Runner, patience: int = 4, max_model_len: int = 256) -> None:
        self.runner = runner
        self.lives: Lives = {}
        self.events: set[str] = set()  #: names, see `events`
        self.counts: Counter[str] = Counter()  #: of steps, requests, tokens, and steps without each optional part
        self._patience, self._longest = patience, max_model_len
        self._answers: dict[str, tuple[Sequence[int], str | None]] = {}
        self._last: StepReport | None = None
        self._leaving: set[str] = set()  #: those aborted since the last step

    def add(self, request: NewRequest) -> bool:
        """Queues a request; False if the runner refuses it by a `ValueError`."""
        try:
            self.runner.add(request)
        except ValueError:
            self.counts["refused"] += 1
            return False
        name = request.request_id
        if isinstance(self.runner, KnowsAnswers):
            self._answers[name] = self.runner.reference(request)
        self.counts["requests"] += 1
        self._see(Seen(self.lives, after_add(self.lives, request), added=name))
        return True

    def abort(self, request_id: str) -> None:
        """Ends a request: no output of it may come any more."""
        self.runner.abort(request_id)
        self._leaving.add(request_id)
        self._see(Seen(self.lives, after_abort(self.lives, request_id), aborted=request_id))

    def has_unfinished(self) -> bool:
        return self.runner.has_unfinished()

    def step(self) -> StepReport:
        """One step, checked."""
        report = self._last = self.runner.step()
        self._leaving = set()
        begun = scheduled(self.lives, report)
        given = turns(begun, report)
        if report.batch is not None:
            _check_batch(report.batch)
        for pool in report.pools or ():
            check_conservation(pool)
        if report.batch is not None and report.pools is not None:
            check_held(report.batch, report.pools)
        after = after_step(begun, report, given)
        self._count(report)
        self._see(Seen(self.lives, after, report=report, turns=given))
        for output in report.outputs:
            if output.request_id in self._answers:
                check_answer(after[output.request_id], *self._answers[output.request_id])
        return report

    def run(self) -> None:
        """Steps until nothing is left to do; then every request has ended, and holds no block."""
        most = self._bound()
        for _ in range(most):
            if not self.has_unfinished():
                break
            self.step()
        left = sorted(name for name, life in self.lives.items() if life.open)
        where = f"request {left[0]!r}" if left else "run"
        if self.has_unfinished():
            raise CheckError("progress", where, "has_unfinished()", f"false within {most} steps", "true")
        if left:
            raise CheckError("progress", where, "finish_reason", "an end", "none, and has_unfinished() is false")
        self._check_nothing_held()

    def _bound(self) -> int:
        """Steps that what is open may take."""
        return SLACK + self._patience * sum(self._longest_of(life) for life in self.lives.values() if life.open)

    def _longest_of(self, life: Life) -> int:
        """Tokens that a request can come to, prompt and output."""
        request = life.request
        if request.request_id in self._answers:
            most = len(self._answers[request.request_id][0])
        else:
            most = min(request.sampling.max_tokens or self._longest, self._longest)
        return len(request.prompt_token_ids) + most

    def _check_nothing_held(self) -> None:
        """I18: at the end a pool holds at most the blocks of those that ended in the last step of all, or after it."""
        last = self._last
        just = {output.request_id for output in last.outputs} | self._leaving if last else set[str]()
        for number, pool in enumerate((last and last.pools) or ()):
            for name, blocks in pool.held.items():
                if name not in just and len(blocks):
                    raise CheckError("I18", f"request {name!r}", f"blocks of KV group {number}", [], blocks.tolist())

    def _see(self, seen: Seen) -> None:
        self.lives = seen.after
        self.events |= events_in(seen)

    def _count(self, report: StepReport) -> None:
        self.counts["steps"] += 1
        self.counts["tokens"] += sum(len(output.token_ids) for output in report.outputs)
        self.counts.update(f"without {name}" for name in absent(self.runner, report))


def absent(runner: Runner, report: StepReport) -> tuple[str, ...]:
    """The optional parts that a runner doesn't show."""
    shown = {"schedule": report.schedule, "batch": report.batch, "pools": report.pools}
    found = tuple(name for name, part in shown.items() if part is None)
    return found if isinstance(runner, KnowsAnswers) else (*found, "reference")


def _check_batch(batch: BatchArrays) -> None:
    check_query_start_loc(batch)
    check_seq_lens(batch)
    check_logits_indices(batch)
    check_slots(batch)
