"""Requests on their way in and out: what is checked once on arrival, the queue, and aborts."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from fstep.ops import prefix
from fstep.state import I32, BatchState, Finished, FinishReason, NewRequest, Plan, RequestError, RowPhase, SchedState


def check_request(plan: Plan, request: NewRequest) -> None:
    """Raises `RequestError` for a request that could never be served."""
    who, params = request.request_id, request.sampling
    length = len(request.prompt_token_ids)
    check_token_ids(plan, request.prompt_token_ids, who)
    if length >= plan.max_model_len:
        limit = f"must leave room for one token within max_model_len={plan.max_model_len}"
        raise RequestError("prompt length", length, limit, who)
    for token_id in params.stop_token_ids:
        if token_id >= plan.vocab_size:
            limit = f"must lie in the vocabulary, 0 to {plan.vocab_size - 1}"
            raise RequestError("stop_token_ids", token_id, limit, who)
    check_room(plan, longest_len(plan, request), who)


def check_free_id(sched: SchedState, state: BatchState, request_id: str) -> None:
    """No request of this id may wait or have a row."""
    if _admitted(sched, state, request_id) or any(each.request_id == request_id for each in sched.waiting):
        raise RequestError("request_id", request_id, "is in use by another request that has not ended", request_id)


def check_token_ids(plan: Plan, ids: I32, request_id: str) -> None:
    """There must be some, all in the vocabulary."""
    if len(ids) == 0:
        raise RequestError("prompt_token_ids", [], "must hold at least one token", request_id)
    bad = np.nonzero(ids >= plan.vocab_size)[0]
    if len(bad):
        limit = f"must lie in the vocabulary, 0 to {plan.vocab_size - 1}"
        raise RequestError(f"prompt_token_ids[{bad[0]}]", int(ids[bad[0]]), limit, request_id)


def check_room(plan: Plan, longest: int, request_id: str) -> None:
    """A request of at most `longest` tokens that has the whole pool to itself must be able to end."""
    for group in plan.groups:
        needed, there = group.blocks_for(longest - 1), group.num_blocks - 1
        if needed > there:
            limit = f"needs {needed} KV blocks of {group.block_size} tokens, and the cache has {there} to give"
            raise RequestError("prompt length + max_tokens", longest, limit, request_id)


def longest_len(plan: Plan, request: NewRequest) -> int:
    """The most tokens that a request can come to, prompt and output."""
    asked = request.sampling.max_tokens
    return plan.max_model_len if asked is None else min(plan.max_model_len, len(request.prompt_token_ids) + asked)


def add(sched: SchedState, state: BatchState, request: NewRequest) -> SchedState:
    """Puts a request at the end of the queue.

    Raises `RequestError` if it could never be served, if its seed is still None, or if its id is in use.
    """
    who = request.request_id
    check_free_id(sched, state, who)
    if request.sampling.seed is None and not request.sampling.greedy:
        raise RequestError("seed", None, "must be set before a request is admitted", who)
    check_request(state.plan, request)
    plan, ids = state.plan, request.prompt_token_ids
    hashes = prefix.all_hashes(plan, ids, request.cache_key, sched.weights_version)
    return evolve(sched, waiting=(*sched.waiting, evolve(request, block_hashes=hashes)))


def abort(
    sched: SchedState, state: BatchState, request_id: str, reason: FinishReason = FinishReason.ABORT
) -> SchedState:
    """Ends a request: one that waits leaves the queue, one that has a row is finished by the next schedule.

    An id that is not in use changes nothing.
    """
    if _admitted(sched, state, request_id):
        if any(each.request_id == request_id for each in sched.ending):
            return sched
        return evolve(sched, ending=(*sched.ending, Finished(request_id, reason)))
    return evolve(sched, waiting=tuple(each for each in sched.waiting if each.request_id != request_id))


def reweigh(sched: SchedState, weights_version: int) -> SchedState:
    """The scheduler after the weights were replaced: what was cached with others is not found any more.

    Running requests go on with the keys and values that they have. Raises `ValueError` for a version that is not newer.
    """
    if weights_version <= sched.weights_version:
        raise ValueError(f"weights_version={weights_version}: must be above {sched.weights_version}, which is in use")
    waiting = tuple(evolve(each, block_hashes=None) for each in sched.waiting)
    return evolve(sched, waiting=waiting, weights_version=weights_version, uncached=frozenset(sched.running))


def _admitted(sched: SchedState, state: BatchState, request_id: str) -> bool:
    """Whether a request has a row, or gets one as soon as the newest schedule is prepared."""
    return request_id in state.rows.request_ids.row_of or request_id in sched.running


def has_work(sched: SchedState, state: BatchState) -> bool:
    """Whether a request waits, runs, or has ended without having been given back yet."""
    return bool(sched.waiting) or bool(state.rows.phase.any())


def has_unended(sched: SchedState, state: BatchState) -> bool:
    """Whether a request is left that has tokens to come."""
    rows = state.rows
    alive = (rows.phase == RowPhase.RUNNING) | (rows.phase == RowPhase.PREEMPTED)
    if sched.waiting or int(np.count_nonzero(alive)) > len(sched.ending):
        return True
    ending = {each.request_id for each in sched.ending}
    return any(rows.request_ids[row] not in ending for row in np.nonzero(alive)[0])
