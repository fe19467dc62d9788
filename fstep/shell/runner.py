"""`Runner`: the step driven over requests of token ids. It holds the newest values; every decision is made in `ops`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from attrs import evolve, frozen

from fstep import ops
from fstep.ops import checks
from fstep.state import (
    KV,
    BatchState,
    Env,
    FinishReason,
    NewRequest,
    Plan,
    RowEvent,
    SchedLimits,
    SchedState,
    Schedule,
    Tree,
)


@frozen(eq=False)
class StepReport:
    """What one step did."""

    schedule: Schedule
    events: tuple[RowEvent, ...]
    made: BatchState  #: with all that its phases made, some of it on the device
    state: BatchState  #: after the step


class Runner:
    """A model over a KV cache, and the requests that share it.

    `state`, `sched` and `kv` are values, and may be read, kept or replaced between steps (all three together). If a
    step raises, `state` and `sched` are what they were before it, and the step can be tried again. When the model had
    run already, so that the cache is ahead of the state, the next step prefills the requests' tokens anew.

    Before each forward the step is checked (`ops.checks.LEVELS`: "full", "cheap" or "off"); a `CheckError` is a fault
    of whoever scheduled it.
    """

    def __init__(self, env: Env, plan: Plan, limits: SchedLimits, kv: KV, check: str = "cheap") -> None:
        self._check = checks.level(check)
        self.env = env
        self.kv = kv
        self.state = BatchState.empty(plan, kv.line, kv.epoch)
        self.sched = SchedState.empty(plan, limits)

    def add(self, request: NewRequest) -> NewRequest:
        """Queues a request, with a seed if it has none, and returns it as queued.

        Raises `RequestError` naming the request, the field, the value and the limit.
        """
        if request.sampling.seed is None:
            request = evolve(request, sampling=evolve(request.sampling, seed=secrets.randbits(63)))
        self.sched = ops.add(self.sched, self.state, request)
        return request

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request, wherever it is; an id that is not in use changes nothing."""
        self.sched = ops.abort(self.sched, self.state, request_id, reason)
        self._retire()

    def fork(self, request_id: str, n: int = 1, request_ids: Sequence[str] | None = None) -> None:
        """`n` copies of a request, which share its blocks and go on with other noise (see `ops.fork`)."""
        self.state, self.sched = ops.fork(self.state, self.sched, request_id, n, request_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """More tokens for a request, as if they had been in its prompt (see `ops.extend`)."""
        self.state, self.sched = ops.extend(self.state, self.sched, request_id, token_ids)

    def update_weights(self, params: Tree) -> int:
        """Other parameters of the same model, in the form that `Env` wants; returns their version, one above.

        Running requests go on with the keys and values that they have; nothing that was cached before is found again.
        """
        version = self.sched.weights_version + 1
        self.env = evolve(self.env, params=params, weights_version=version)
        self.sched = ops.reweigh(self.sched, version)
        return version

    def has_unfinished(self) -> bool:
        return ops.has_work(self.sched, self.state)

    def step(self) -> StepReport:
        """One step of all requests."""
        if self.state.kv_epoch != self.kv.epoch:  # a step raised after its forward
            self.state, self.sched = ops.revive(self.state, self.sched, self.kv)
        launched, sched, self.kv = ops.launch(self.state, self.sched, self.env, self.kv, self._check)
        sampled = ops.sample(launched, self.env)
        self.state, events = ops.commit(sampled, ops.fetch(sampled, self.env))
        self.sched = sched
        report = StepReport(launched.need_step("step").schedule, events, sampled, self.state)
        self._retire()
        return report

    def _retire(self) -> None:
        """When nothing is left to compute, no further step would give back what the ended requests hold."""
        if ops.has_work(self.sched, self.state) and not ops.has_unended(self.sched, self.state):
            schedule, sched = ops.schedule(self.sched, self.state)
            self.state, self.sched = ops.prepare(self.state, schedule).detach(), sched
