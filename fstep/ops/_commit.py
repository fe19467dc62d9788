"""`commit`: the drawn tokens, on the host by now, move the rows on."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import cast

import numpy as np
from attrs import evolve, frozen

from fstep.ops._prepare import put
from fstep.state import (
    I8,
    I32,
    BatchState,
    FinishReason,
    Inputs,
    Intp,
    Log,
    RowEvent,
    RowPhase,
    Rows,
    Sampled,
    SampleError,
    ScheduleError,
)


def commit(state: BatchState, got: Sampled) -> tuple[BatchState, tuple[RowEvent, ...]]:
    """The state after the step, without its products, and what happened to each request that got something.

    `got` holds NumPy arrays. Tokens are taken one at a time: a stop token or a full length drops those behind it. A
    request that ended keeps its row and blocks until a schedule names it as finished. Raises `PhaseError` before
    `prepare`, and `ScheduleError` if `got` isn't of this step's size.
    """
    step = state.need_step("commit")
    inputs = step.inputs
    if len(got.token_ids) != len(inputs.rows):
        raise ScheduleError(None, f"got tokens of {len(got.token_ids)} requests for {len(inputs.rows)} scheduled ones")
    rows, at = state.rows, inputs.rows
    kept = _kept(rows, inputs, got, state.plan.max_model_len)
    num_tokens = rows.num_tokens[at] + kept.counts
    some = np.nonzero(kept.counts)[0]
    after = evolve(
        rows,
        tokens=rows.tokens.append(at[some], kept.token_ids, kept.counts[some]) if len(some) else rows.tokens,
        phase=put(rows.phase, at, kept.phase) if (kept.phase != RowPhase.RUNNING).any() else rows.phase,
        num_tokens=put(rows.num_tokens, at, num_tokens),
        num_computed_tokens=put(rows.num_computed_tokens, at, inputs.seq_lens),
        weights=_with_version(rows, at[some], step.output.weights_version) if step.output else rows.weights,
    )
    events = _events(step.schedule.request_ids, inputs, kept, step.output.weights_version if step.output else 0)
    return BatchState(state.plan, after, state.line, state.kv_epoch), events


def _with_version(rows: Rows, at: Intp, weights_version: int) -> Log:
    """Notes the weights version for the rows whose last one, 0 at first, was another."""
    length = rows.weights.length[at]
    if weights_version == 0 and not length.any():
        return rows.weights
    last = np.where(length > 0, rows.weights.gather(at, np.maximum(length - 1, 0)), 0)
    other = at[last != weights_version]
    pairs = np.stack((rows.num_tokens[other], np.full(len(other), weights_version)), axis=1, dtype=np.int32)
    return rows.weights.append(other, pairs.ravel(), np.full(len(other), 2)) if len(other) else rows.weights


@frozen(eq=False)
class _Kept:
    """Which of the drawn tokens stay: `B` requests, `N` tokens in all."""

    token_ids: I32  #: [N]
    counts: I32  #: [B]
    phase: I8  #: [B], `RowPhase` afterwards


def _kept(rows: Rows, inputs: Inputs, got: Sampled, max_model_len: int) -> _Kept:
    at = inputs.rows
    known = rows.num_tokens[at]
    room = np.minimum(rows.sampling.max_tokens[at] - (known - rows.prompt_len[at]), max_model_len - known)
    drawn = np.where(inputs.discard, 0, got.num_sampled)
    stops = _first_stop(got.token_ids, rows.sampling.stop_token_ids[at])
    counts = np.minimum(np.minimum(drawn, stops + 1), room)
    full = (counts == room) & (drawn > 0)
    stopped = stops < counts
    phase = np.where(stopped, RowPhase.STOPPED, np.where(full, RowPhase.FULL, RowPhase.RUNNING))
    phase[np.asarray(got.error) != SampleError.NONE] = RowPhase.FAILED
    width: int = got.token_ids.shape[1]
    stays = np.less(np.arange(width), counts[:, None])
    return _Kept(got.token_ids[stays], counts.astype(np.int32), phase.astype(np.int8))


def _first_stop(token_ids: I32, stop_token_ids: I32) -> I32:
    """The column of each row's first stop token; past the last column if there is none: `[B]`."""
    same = np.equal(token_ids[:, :, None], stop_token_ids[:, None, :]) & np.greater_equal(token_ids, 0)[:, :, None]
    is_stop = np.any(same, axis=2)
    return cast(I32, np.where(np.any(is_stop, axis=1), np.argmax(is_stop, axis=1), token_ids.shape[1]))


def _events(names: tuple[str, ...], inputs: Inputs, kept: _Kept, weights_version: int) -> tuple[RowEvent, ...]:
    """One event for each request that got a token or an end, in the order of the batch."""
    tokens = _tuples(kept.token_ids, kept.counts)
    parts = zip(names, inputs.rows.tolist(), tokens, repeat(None), repeat(None), repeat(weights_version))
    events = list(map(RowEvent._make, parts))
    for b in np.nonzero(kept.phase != RowPhase.RUNNING)[0].tolist():
        reason = RowPhase(kept.phase[b]).finish_reason
        error = _no_distribution(names[b], inputs.sample_positions[b]) if reason is FinishReason.ERROR else None
        events[b] = events[b]._replace(finish_reason=reason, error=error)
    if int(kept.counts.min(initial=1)):
        return tuple(events)
    return tuple(event for event in events if event.token_ids or event.finish_reason)


def _tuples(values: I32, counts: I32) -> Iterable[tuple[int, ...]]:
    """The values dealt out by counts: `B` tuples."""
    flat: list[int] = values.tolist()
    if int(counts.min(initial=1)) == 1 == int(counts.max(initial=1)):
        return zip(flat)
    ends: list[int] = np.cumsum(counts).tolist()
    return [tuple(flat[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True)]


def _no_distribution(request_id: str, position: int) -> str:
    return f"request {request_id!r}: the logits of position {position} hold NaN or +inf, or allow no token"
