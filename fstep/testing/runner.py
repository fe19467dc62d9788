"""What the kit drives: any object that takes requests, makes steps, and says what came out of each.

`Runner` is the protocol. All that a step reports beside its outputs is optional; what is there is checked, what isn't
is counted as not seen. `StepRunner` makes fstep's own step one of them. `HashCache` is a model for an engine that has
none: it turns a batch, as the engine laid it out, into the logits of a `HashModel`, so that a wrong slot, block or
length becomes a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from fstep import ops
from fstep.ops.checks import arrays_of, pools_of
from fstep.state import (
    F32,
    I32,
    KV,
    BatchArrays,
    BatchState,
    CheckError,
    Env,
    FinishReason,
    KVGroup,
    NewRequest,
    Plan,
    PoolView,
    RowEvent,
    SchedLimits,
    SchedState,
    Schedule,
)
from fstep.testing.adversary import Scheduler
from fstep.testing.drive import GUARD_EVERY, Moment, checked_step
from fstep.testing.hash_models import HashModel, cell_of, hashes_of, logits_of
from fstep.testing.reference import reference_tokens


class Output(Protocol):
    """What one request got in a step; `RowEvent` and `StepOutput` are such."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None:
        """Why it ended in this step ("stop", "length", …); None if it goes on."""
        ...


class StepOutput(NamedTuple):
    """An `Output` for engines that have no type of their own for it."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@frozen(eq=False)
class StepReport:
    """What one step did. All but the outputs may be None, and is then counted as not seen."""

    outputs: Sequence[Output]
    schedule: Schedule | None = None
    batch: BatchArrays | None = None
    pools: tuple[PoolView, ...] | None = None  #: one a KV group, as they are once the schedule was applied


class Runner(Protocol):
    """An engine, a scheduler with a model behind it, or whatever else turns requests into tokens step by step."""

    def add(self, request: NewRequest) -> object:
        """Queues a request. One that can't be taken, because its id is in use, say, is refused by a `ValueError`."""
        ...

    def abort(self, request_id: str) -> object:
        """Ends a request, wherever it is: no output of it may come out of a later step."""
        ...

    def step(self) -> StepReport: ...

    def has_unfinished(self) -> bool:
        """Whether a further step has anything to do."""
        ...


@runtime_checkable
class KnowsAnswers(Protocol):
    """A runner that can say what a request must get, however it is scheduled; `StepRunner` does."""

    def reference(self, request: NewRequest) -> tuple[Sequence[int], str | None]:
        """The tokens, and the finish reason; None if any reason will do."""
        ...


class StepRunner:
    """fstep's own step, `schedule` to `commit`, over a hash model on the CPU, with all of `checked_step`'s checks.

    `scheduler` may be any function of the form `(sched, state) -> (Schedule, sched)`. `moment` is the newest step with
    the values between its phases; None before the first one.
    """

    def __init__(
        self,
        plan: Plan,
        limits: SchedLimits | None = None,
        scheduler: Scheduler = ops.schedule,
        model: HashModel | None = None,
    ) -> None:
        from fstep.shell.cpu import CpuDevice
        from fstep.shell.kv import new_kv

        self.model = model or HashModel(plan.vocab_size, plan.max_model_len, _layer_groups(plan))
        device = CpuDevice()
        self.env = Env(self.model, {}, device)
        self.kv: KV = new_kv(plan, self.model.kv_specs(), device)
        self.state: BatchState = BatchState.empty(plan, self.kv.line, self.kv.epoch, rows=2)
        self.sched: SchedState = SchedState.empty(plan, limits or SchedLimits())
        self.moment: Moment | None = None
        self._scheduler = scheduler
        self._steps = 0

    def add(self, request: NewRequest) -> None:
        """Queues a request with a seed. Raises `RequestError`, a `ValueError`, if it can't be served."""
        self.sched = ops.add(self.sched, self.state, request)

    def abort(self, request_id: str) -> None:
        self.sched = ops.abort(self.sched, self.state, request_id)

    def has_unfinished(self) -> bool:
        """Also while an ended request holds a row: a step without tokens gives it back."""
        return ops.has_work(self.sched, self.state)

    def step(self) -> StepReport:
        guard = self._steps % GUARD_EVERY == 0
        made = checked_step(self.state, self.sched, self.env, self.kv, self._scheduler, guard)
        self.state, self.sched, self.kv, self.moment = made.after, made.sched, made.kv, made
        self._steps += 1
        return report_of(made)

    def reference(self, request: NewRequest) -> tuple[tuple[int, ...], FinishReason]:
        """What the request gets alone, without batch or cache."""
        return reference_tokens(
            self.model.reference_logits,
            request.prompt_token_ids.tolist(),
            request.sampling,
            self.state.plan.eos_token_ids,
            self.state.plan.max_model_len,
        )


def report_of(moment: Moment) -> StepReport:
    """A step of fstep's own as a report."""
    outputs: tuple[RowEvent, ...] = moment.events
    pools = pools_of(moment.sched, moment.prepared)
    return StepReport(outputs, moment.schedule, arrays_of(moment.prepared), pools)


def _layer_groups(plan: Plan) -> tuple[int, ...]:
    """The KV group of each layer, as the plan's groups name them; one layer a group if they name none."""
    named = {layer: number for number, group in enumerate(plan.groups) for layer in group.layers}
    return tuple(named[layer] for layer in sorted(named)) if named else tuple(range(len(plan.groups)))


@frozen(eq=False)
class HashCache:
    """The pages of a `HashModel` in NumPy, for an engine that schedules and allocates but has no model.

    Written at `slot_mapping`, read back through the block tables up to `seq_lens`, as attention does. Its pages are
    changed in place.
    """

    model: HashModel
    groups: tuple[KVGroup, ...]
    pages: tuple[NDArray[np.int64], ...] = field(init=False)  #: one a layer, [slots, 2]: cell, position; -1 unwritten

    def __attrs_post_init__(self) -> None:
        sizes = (self.groups[group].num_blocks * self.groups[group].block_size for group in self.model.layer_groups)
        object.__setattr__(self, "pages", tuple(np.full((size, 2), -1, np.int64) for size in sizes))

    def forward(self, batch: BatchArrays, token_ids: I32) -> F32:
        """The logits after the last token of each request: `[B, V]`, for `token_ids [T]`.

        Raises `CheckError` (I17) for a request that reads a cell that was never written, or was forgotten.
        """
        real, cells = batch.num_tokens, np.asarray(token_ids, np.int64)
        positions = batch.positions[:real]
        for layer, group in enumerate(self.model.layer_groups):
            slots = batch.slot_mapping[group][:real]
            self.pages[layer][slots] = np.stack((cell_of(cells), positions), axis=1)
            found = [self._hashes(layer, group, batch, b) for b in range(batch.num_reqs)]
            cells = np.array([found[b][at] for b, at in zip(batch.row_of_token, positions, strict=True)], np.int64)
        ends = np.cumsum(np.bincount(batch.row_of_token, minlength=batch.num_reqs)) - 1
        last = [logits_of(int(cells[end]), self.model.vocab_size) for end in ends]
        return np.stack(last) if last else np.zeros((0, self.model.vocab_size), np.float32)

    def forget(self, group: int, blocks: I32) -> None:
        """Marks blocks of a KV group as never written: those that hold nothing that anybody may read."""
        size = self.groups[group].block_size
        for layer, each in enumerate(self.model.layer_groups):
            if each == group:
                self.pages[layer][(blocks[:, None] * size + np.arange(size)).ravel()] = -1

    def copy(self, group: int, source: int, target: int) -> None:
        """Copies one block of a KV group to another, for an engine that copies on write."""
        size = self.groups[group].block_size
        for layer, each in enumerate(self.model.layer_groups):
            if each == group:
                pages = self.pages[layer]
                pages[target * size : (target + 1) * size] = pages[source * size : (source + 1) * size]

    def _hashes(self, layer: int, group: int, batch: BatchArrays, b: int) -> NDArray[np.int64]:
        """The hashes of all tokens of a request up to each of its positions: `[seq_len]`."""
        at, size = np.arange(int(batch.seq_lens[b])), self.groups[group].block_size
        cells = self.pages[layer][batch.block_tables[group][b, at // size] * size + at % size]
        unwritten = np.flatnonzero(cells[:, 0] < 0)
        if len(unwritten):
            where = f"cell of position {unwritten[0]} in KV group {group}"
            raise CheckError("I17", batch.where(b), where, "written", "not written, or freed since")
        return hashes_of(cells[:, 0], cells[:, 1])
