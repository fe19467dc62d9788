"""Lines of states: which state may go on with which KV cache.

A cache is linear: each `forward` gives the next epoch of its line, and the state that comes out carries both. So a
state that is not the newest of its line is known, and refused: its blocks may hold other tokens by now.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve

from fstep.state import KV, BatchState, Inputs, RowPhase, SchedState, StaleStateError, frozen_array

_WAYS_ON = (
    "Two ways on: clone the cache before you fork, `kv2 = kv.clone(); state2 = adopt(state, kv2)`, "
    "or prefill this state's tokens again, `state, sched = revive(state, sched, kv)`."
)


def next_epoch(state: BatchState, kv: KV) -> int:
    """The epoch of the cache after a `forward` of this state.

    The newest forward may be repeated (a notebook cell run twice, a retry): it writes the same slots again, and the
    epoch stays. Raises `StaleStateError` for any other state that is not the newest of the cache's line.
    """
    inputs = state.need_step("forward").inputs
    if state.line == kv.line:
        if _repeats(state, kv, inputs):
            return kv.epoch
        if state.kv_epoch == kv.epoch:
            return kv.epoch + 1
    raise StaleStateError(
        f"the state is at epoch {state.kv_epoch} of line {state.line}, the KV cache at epoch {kv.epoch} of line "
        f"{kv.line}: its blocks may hold other tokens by now. {_WAYS_ON}"
    )


def _repeats(state: BatchState, kv: KV, inputs: Inputs) -> bool:
    """Whether the newest forward of the cache was of this very batch, seen from before it or from after it."""
    after = state.step is not None and state.step.output is not None
    if kv.written is None or state.kv_epoch != kv.epoch - (0 if after else 1):
        return False
    return kv.written is inputs or _same(kv.written, inputs)


def _same(a: Inputs, b: Inputs) -> bool:
    pairs = ((a.token_ids, b.token_ids), (a.positions, b.positions), *zip(a.slot_mapping, b.slot_mapping, strict=True))
    return all(np.array_equal(x, y) for x, y in pairs)


def adopt(state: BatchState, kv: KV) -> BatchState:
    """The same state on the line of a clone of its cache, so that both go on.

    Raises `StaleStateError` if the clone was made from another line, or of another epoch than the state's.
    """
    if kv.origin != (state.line, state.kv_epoch):
        raise StaleStateError(
            f"the cache is a clone of (line, epoch) {kv.origin}, the state is at {(state.line, state.kv_epoch)}. "
            f"{_WAYS_ON}"
        )
    return BatchState(state.plan, state.rows, kv.line, kv.epoch, state.step)


def revive(state: BatchState, sched: SchedState, kv: KV) -> tuple[BatchState, SchedState]:
    """Any state, however old, on the newest epoch of any cache of its plan: all its requests are preempted.

    They hold no blocks, and the scheduler will prefill their tokens again. All of the cache's blocks are free for
    them, so other states of its line are stale from the next `forward` on.
    """
    rows = state.rows
    running = rows.phase == RowPhase.RUNNING
    everywhere = np.arange(len(rows))
    rows = evolve(
        rows,
        phase=frozen_array(np.where(running, np.int8(RowPhase.PREEMPTED), rows.phase)),
        blocks=tuple(blocks.cleared(everywhere) for blocks in rows.blocks),
        prefill_len=frozen_array(np.where(running, rows.num_tokens, rows.prefill_len)),
        num_computed_tokens=frozen_array(np.zeros_like(rows.num_computed_tokens)),
    )
    empty = SchedState.empty(state.plan, sched.limits)
    known = rows.request_ids.row_of
    order = [name for name in (*sched.running, *sched.preempted) if name in known]
    order += [name for name in known if name not in order]
    preempted = tuple(name for name in order if rows.phase[known[name]] == RowPhase.PREEMPTED)
    waiting = tuple(each for each in sched.waiting if each.request_id not in known)
    revived = evolve(
        empty, waiting=waiting, preempted=preempted, ending=sched.ending, weights_version=sched.weights_version
    )
    return BatchState(state.plan, rows, kv.line, kv.epoch), revived
