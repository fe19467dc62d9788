"""`pad`: the batch at the size at which it runs."""

from __future__ import annotations

import numpy as np

from fstep.state import I32, BatchDescriptor, BatchState, Inputs, Padding, Plan, Step, Tail, frozen_array


def pad(state: BatchState) -> BatchState:
    """The state with its `Padding`: the smallest captured shape that holds the batch, or the batch's own shape.

    Padded tokens have id 0, position 0 and slot -1; padded requests have length 0. The tail of `query_start_loc` is
    what the plan's `Tail` says. Raises `PhaseError` before `prepare`.
    """
    step = state.need_step("pad")
    return state.with_step(Step(step.schedule, step.inputs, _padding(step.inputs, state.plan)))


def descriptor_for(plan: Plan, num_tokens: int, num_reqs: int) -> BatchDescriptor:
    """The captured shape with the fewest tokens that holds a batch; its own shape if none does, or if it is empty."""
    if num_tokens:
        for each in plan.capture:
            if each.num_tokens >= num_tokens and each.num_reqs >= num_reqs:
                return each
    return BatchDescriptor(num_tokens, num_reqs)


def _padding(inputs: Inputs, plan: Plan) -> Padding:
    num_tokens, num_reqs = len(inputs.token_ids), len(inputs.rows)
    to = descriptor_for(plan, num_tokens, num_reqs)
    more_tokens, more_reqs = to.num_tokens - num_tokens, to.num_reqs - num_reqs
    return Padding(
        descriptor=to,
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        query_start_loc=tail_of(inputs.query_start_loc, more_reqs, to.num_tokens, plan.tail),
        seq_lens=_filled(inputs.seq_lens, more_reqs, 0),
        token_ids=_filled(inputs.token_ids, more_tokens, 0),
        positions=_filled(inputs.positions, more_tokens, 0),
        slot_mapping=tuple(_filled(slots, more_tokens, -1) for slots in inputs.slot_mapping),
    )


def _filled(array: I32, more: int, value: int) -> I32:
    return frozen_array(np.append(array, np.full(more, value, np.int32))) if more else array


def tail_of(query_start_loc: I32, more: int, num_tokens: int, tail: Tail) -> I32:
    """`query_start_loc` `[B + 1]` with its tail for `more` padded requests, in a batch padded to `num_tokens`."""
    end = query_start_loc[-1]
    if tail is Tail.REPEAT or more == 0:
        return _filled(query_start_loc, more, int(end))
    ends = np.minimum(end + np.arange(1, more + 1, dtype=np.int32), num_tokens)
    ends[-1] = num_tokens
    return frozen_array(np.append(query_start_loc, ends))
