"""vLLM's `SchedulerOutput` (0.32: `vllm/v1/core/sched/output.py`) as a `Schedule`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast

from attrs import evolve, frozen

from fstep.interop._errors import InteropError, refuse, refuse_unless, same_tokens, sampling_of, says_nothing
from fstep.state import (
    BatchState,
    Finished,
    FinishReason,
    NewRequest,
    Ragged,
    RequestError,
    Resumed,
    RowPhase,
    Rows,
    SamplingParams,
    Schedule,
    i32,
)

_OF_STEP: Final = MappingProxyType(
    {
        "scheduled_spec_decode_tokens": "drafts can't be verified yet",
        "scheduled_encoder_inputs": "multimodal inputs can't be taken",
        "free_encoder_mm_hashes": "multimodal inputs can't be taken",
        "pending_structured_output_tokens": "grammars can't be taken",
        "has_structured_output_requests": "grammars can't be taken",
        "kv_connector_metadata": "KV blocks can't come from or go to a connector",
        "ec_connector_metadata": "encoder outputs can't come from a connector",
        "new_block_ids_to_zero": "blocks can't be cleared by a schedule yet",
        "kv_cache_block_copies": "copies of blocks are not known in this form",
    }
)
_OF_NEW: Final = MappingProxyType(
    {
        "mm_features": "multimodal inputs can't be taken",
        "pooling_params": "pooling can't be asked for",
        "lora_request": "LoRA adapters can't be taken",
        "prompt_embeds": "a prompt must be given as token ids",
    }
)
_OF_CACHED: Final = MappingProxyType(
    {
        "new_token_ids": "tokens of another pipeline stage can't be taken",
        "rewound_req_ids": "a request can't be set back except by preemption",
    }
)
_OF_SAMPLING: Final = MappingProxyType(
    {
        "logprobs": "log-probabilities can't be asked for yet",
        "prompt_logprobs": "log-probabilities can't be asked for yet",
        "logprob_token_ids": "log-probabilities can't be asked for yet",
        "logit_bias": "is not built yet",
        "allowed_token_ids": "is not built yet",
        "bad_words": "is not built yet",
        "structured_outputs": "grammars can't be taken",
        "guided_decoding": "grammars can't be taken",
        "logits_processors": "is not built yet",
        "thinking_token_budget": "is not built yet",
        "repetition_detection": "is not built yet",
        "extra_args": "is not known here",
    }
)
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "n": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "min_tokens": (0,),
    }
)
_TAKEN: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"),
    *("stop", "stop_token_ids", "ignore_eos"),
)


@frozen(eq=False)
class _Scheduled:
    """What one request of the step comes with."""

    request_id: str
    blocks: tuple[Sequence[int], ...]  #: one a KV group
    new: NewRequest | None = None
    resumed: Resumed | None = None


def from_vllm(scheduler_output: Any, state: BatchState, seed: int = 0) -> Schedule:
    """The `Schedule` of a vLLM `SchedulerOutput`, or of anything that has its fields, for the state before the step.

    The batch goes in the order of `num_scheduled_tokens`. Block 0 is the null block there as here. Of the finished
    requests those that never had a row are left out, and one that had not ended by a rule of ours was aborted. A
    resumed request may come among the cached ones (`resumed_req_ids`) or, as for vLLM's second runner, among the new
    ones with `prefill_token_ids`. `num_computed_tokens` of a request that comes in are a prefix hit; their blocks are
    the first of its blocks. A request without a seed gets one made of `seed` and its id.

    `num_common_prefix_blocks` is not used: no token depends on it. Raises `InteropError`, with request, field and
    value, for what can't be taken (drafts, multimodal inputs, LoRA, pooling, grammars, prompt embeddings, KV
    connectors, sampling parameters that aren't built), and for an output that doesn't fit the state
    (other counts of computed or output tokens, as with asynchronous scheduling, or of KV groups).
    """
    cached = scheduler_output.scheduled_cached_reqs
    refuse(None, scheduler_output, _OF_STEP)
    rows, groups = state.rows, len(state.plan.groups)
    finished = _finished(scheduler_output.finished_req_ids, rows)
    gone = {each.request_id for each in finished}
    alive = {name: row for name, row in rows.request_ids.row_of.items() if name not in gone}
    found = [_from_new(each, rows, alive, groups, seed) for each in scheduler_output.scheduled_new_reqs]
    found += [_from_cached(cached, index, rows, alive, groups) for index in range(len(cached.req_ids))]
    by_name = {each.request_id: each for each in found}
    counts = _counts(scheduler_output, by_name)
    resumed = tuple(each.resumed for each in found if each.resumed is not None)
    preempted = getattr(scheduler_output, "preempted_req_ids", None) or ()
    return Schedule(
        finished=finished,
        preempted=_preempted(preempted, resumed, rows, alive),
        resumed=resumed,
        new=tuple(each.new for each in found if each.new is not None),
        request_ids=tuple(counts),
        num_scheduled_tokens=i32(counts.values()),
        new_blocks=tuple(Ragged.of([by_name[name].blocks[group] for name in counts]) for group in range(groups)),
    )


def _finished(names: Collection[str], rows: Rows) -> tuple[Finished, ...]:
    """In the order of their rows: vLLM gives a set."""
    at = sorted(rows.request_ids.row_of[name] for name in names if name in rows.request_ids.row_of)
    return tuple(
        Finished(str(rows.request_ids[row]), RowPhase(rows.phase[row]).finish_reason or FinishReason.ABORT)
        for row in at
    )


def _preempted(
    names: Collection[str], resumed: tuple[Resumed, ...], rows: Rows, alive: Mapping[str, int]
) -> tuple[str, ...]:
    """With the requests that are resumed though nobody said that they were preempted, as vLLM's older outputs do."""
    for name in names:
        _row(name, "preempted_req_ids", alive)
    running = {each.request_id for each in resumed if rows.phase[alive[each.request_id]] == RowPhase.RUNNING}
    return tuple(name for name in alive if name in names or name in running)


def _from_new(new: Any, rows: Rows, alive: Mapping[str, int], groups: int, seed: int) -> _Scheduled:
    name = new.req_id
    refuse(name, new, _OF_NEW)
    blocks = _one_a_group(name, "block_ids", new.block_ids, groups)
    whole = getattr(new, "prefill_token_ids", None)
    if name in alive:
        known = rows.tokens[alive[name]]
        if whole is None or not same_tokens(known, whole):
            raise InteropError(
                name, "prefill_token_ids", whole, f"must be the request's {len(known)} tokens: it has a row"
            )
        return _Scheduled(name, blocks, resumed=Resumed(name, new.num_computed_tokens))
    if whole is not None and not same_tokens(new.prompt_token_ids, whole):
        raise InteropError(name, "prefill_token_ids", whole, "holds more than the prompt, but the request has no row")
    request = _request(name, new.prompt_token_ids, _sampling(name, new.sampling_params, seed))
    return _Scheduled(name, blocks, evolve(request, num_computed_tokens=new.num_computed_tokens))


def _from_cached(cached: Any, index: int, rows: Rows, alive: Mapping[str, int], groups: int) -> _Scheduled:
    name = cached.req_ids[index]
    row = _row(name, "req_ids", alive)
    resumed = name in getattr(cached, "resumed_req_ids", ())
    for field in ("new_token_ids", "rewound_req_ids"):
        _refuse_cached(name, cached, index, field)
    computed, output = cached.num_computed_tokens[index], rows.num_tokens[row] - rows.prompt_len[row]
    if not resumed:
        _check(name, "num_computed_tokens", computed, int(rows.num_computed_tokens[row]), "differs from the state's")
    if not says_nothing(getattr(cached, "num_output_tokens", None)):
        _check(name, "num_output_tokens", cached.num_output_tokens[index], int(output), "differs from the state's")
    given = cached.new_block_ids[index]
    blocks = ((),) * groups if given is None else _one_a_group(name, "new_block_ids", given, groups)
    return _Scheduled(name, blocks, resumed=Resumed(name, computed) if resumed else None)


def _refuse_cached(name: str, cached: Any, index: int, field: str) -> None:
    value = getattr(cached, field, None)
    if isinstance(value, Sequence) and len(cast(Sequence[object], value)) > index:  # one a request
        value = cast(Sequence[object], value)[index]
    elif isinstance(value, Collection):
        value = name in value
    if not says_nothing(value):
        raise InteropError(name, field, value, _OF_CACHED[field])


def _sampling(name: str, params: Any, seed: int) -> SamplingParams:
    if params is None:
        raise InteropError(name, "sampling_params", None, "must be given: a request must generate")
    refuse(name, params, _OF_SAMPLING)
    for field, neutral in _NEUTRAL.items():
        refuse_unless(name, getattr(params, field, None), field, neutral, "is not built yet")
    values = {field: getattr(params, field, None) for field in _TAKEN}
    max_tokens = getattr(params, "max_tokens", None)
    taken = sampling_of(name, seed, values)
    return taken if max_tokens is not None else evolve(taken, max_tokens=None)  # None has a meaning of its own here


def _request(name: str, prompt_token_ids: Any, params: SamplingParams) -> NewRequest:
    try:
        return NewRequest(name, prompt_token_ids, params)
    except RequestError as error:
        raise InteropError(name, error.field, error.value, error.limit) from None


def _counts(output: Any, by_name: Mapping[str, _Scheduled]) -> Mapping[str, int]:
    """The scheduled tokens of each request, which must be those of the requests that are described."""
    counts: Mapping[str, int] = output.num_scheduled_tokens
    for name in counts.keys() ^ by_name.keys():
        limit = "must name the scheduled requests, new and cached, and no others"
        raise InteropError(name, "num_scheduled_tokens", counts.get(name), limit)
    total = getattr(output, "total_num_scheduled_tokens", sum(counts.values()))
    if total != sum(counts.values()):
        raise InteropError(None, "total_num_scheduled_tokens", total, f"must be the sum, {sum(counts.values())}")
    return counts


def _row(name: str, field: str, alive: Mapping[str, int]) -> int:
    if name not in alive:
        raise InteropError(name, field, name, "has no row: it was never new, or has ended")
    return alive[name]


def _one_a_group(name: str, field: str, blocks: Any, groups: int) -> tuple[Sequence[int], ...]:
    if len(blocks) != groups:
        raise InteropError(name, field, blocks, f"must hold one list of blocks for each of the {groups} KV groups")
    return tuple(blocks)


def _check(name: str, field: str, value: int, expected: int, limit: str) -> None:
    if value != expected:
        raise InteropError(name, field, value, f"{limit}: must be {expected}")
