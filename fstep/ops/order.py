"""The order of a batch and its parts: which requests decode, which prefill, and where the borders lie.

An attention backend may want its decodes first (one kernel for them, another for the rest). The order is an index
array over the scheduled requests; rows never move. The regions and the borders are those of vLLM, the states of a whole
step those of vLLM-Ascend.

`B` scheduled requests, `T` tokens.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np
from attrs import evolve, frozen
from numpy.typing import ArrayLike, NDArray

from fstep.state import I8, I32, Intp, Ragged, RowOrder, Rows, Schedule, frozen_array, ragged_arange


class Region(enum.IntEnum):
    """Where a request stands in a decode-first batch."""

    DECODE = 0  #: the prompt is computed, and there are few tokens
    SHORT_EXTEND = 1  #: a chunk behind others that is as short as a decode
    LONG_EXTEND = 2  #: a longer one
    FIRST_CHUNK = 3  #: nothing is computed yet


def regions(
    num_scheduled_tokens: ArrayLike, num_computed_tokens: ArrayLike, prefill_len: ArrayLike, decode_threshold: int = 1
) -> I8:
    """The `Region` of each request: `[B]` int8.

    `decode_threshold` is the most tokens of a decode: 1, or 1 + the most drafts.
    """
    computed = np.asarray(num_computed_tokens)
    short = np.asarray(num_scheduled_tokens) <= decode_threshold
    short_region = np.where(computed >= np.asarray(prefill_len), Region.DECODE, Region.SHORT_EXTEND)
    region = np.where(short, short_region, Region.LONG_EXTEND)
    return frozen_array(np.where(computed == 0, Region.FIRST_CHUNK, region).astype(np.int8))


def decode_first(region: ArrayLike) -> Intp:
    """The requests by region, in the given order within one: `[B]`, which request comes at each place."""
    return frozen_array(np.argsort(np.asarray(region), kind="stable"))


def in_order(order: RowOrder, schedule: Schedule, rows: Rows, at: Intp) -> tuple[Schedule, Intp]:
    """The schedule and its rows `at` `[B]` in the order of the batch; themselves if nothing moves."""
    if order.decode_threshold is None:
        return schedule, at
    counts, computed = schedule.num_scheduled_tokens, rows.num_computed_tokens[at]
    places = decode_first(regions(counts, computed, rows.prefill_len[at], order.decode_threshold))
    if (places[1:] > places[:-1]).all():
        return schedule, at
    return _permuted(schedule, places), frozen_array(at[places])


def _permuted(schedule: Schedule, places: Intp) -> Schedule:
    order: list[int] = places.tolist()
    return evolve(
        schedule,
        request_ids=tuple(schedule.request_ids[b] for b in order),
        num_scheduled_tokens=frozen_array(schedule.num_scheduled_tokens[places]),
        new_blocks=tuple(_dealt(each, places) for each in schedule.new_blocks),
    )


def _dealt(lists: Ragged, places: Intp) -> Ragged:
    """The same lists in another order."""
    counts = lists.counts[places]
    offsets = np.zeros(len(lists.offsets), np.int32)
    np.cumsum(counts, out=offsets[1:])
    return Ragged(frozen_array(lists.values[ragged_arange(lists.offsets[places], counts)]), frozen_array(offsets))


@frozen
class Split:
    """A decode-first batch cut into its decodes and the others; without `extends`, they count as prefills."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_extends: int = 0
    num_extend_tokens: int = 0


def split_decodes_prefills(
    query_lens: ArrayLike, decode_threshold: int, require_uniform: bool = False, num_tokens: int | None = None
) -> Split:
    """Where the decodes of a decode-first batch end: at the first request above `decode_threshold` tokens.

    With `require_uniform`, also at the first that is not as long as the first of all. Padding, if `num_tokens` counts
    some, belongs to the last kind that is there.
    """
    lens = np.asarray(query_lens, np.int64)
    first = int(lens[0]) if len(lens) else 0
    decodes = _leading((lens <= decode_threshold) & ((lens == first) | (not require_uniform)))
    total = int(lens.sum()) if num_tokens is None else num_tokens
    decode_tokens = int(lens[:decodes].sum()) if decodes < len(lens) else total
    return Split(decodes, len(lens) - decodes, decode_tokens, total - decode_tokens)


def split_decodes_extends_prefills(query_lens: ArrayLike, seq_lens: ArrayLike, decode_threshold: int) -> Split:
    """The same with those that have context, the extends, apart from the prefills, which have none."""
    lens = np.asarray(query_lens, np.int64)
    decodes = _leading(lens <= decode_threshold)
    extends = _leading(np.asarray(seq_lens)[decodes:] > lens[decodes:])
    border = decodes + extends
    tokens = [int(part.sum()) for part in np.split(lens, (decodes, border))]
    return Split(decodes, len(lens) - border, tokens[0], tokens[2], extends, tokens[1])


def _leading(condition: NDArray[Any]) -> int:
    """How many entries at the front are true."""
    return len(condition) if condition.all() else int(condition.argmin())


def decode_tokens_first(query_start_loc: ArrayLike, num_prefill_tokens: ArrayLike) -> tuple[Intp, int]:
    """The tokens past each request's prompt, then those of the prompts: `[T]` token indices, and how many the former.

    The first `num_prefill_tokens` `[B]` tokens of a request belong to its prompt. Both parts keep their order.
    """
    starts = np.asarray(query_start_loc)
    counts = np.diff(starts)
    offsets = ragged_arange(np.zeros_like(counts), counts)
    of_prompt = offsets < np.repeat(np.asarray(num_prefill_tokens), counts)
    return frozen_array(np.argsort(of_prompt, kind="stable")), int(np.count_nonzero(~of_prompt))


def query_start_loc_of(query_start_loc: ArrayLike, request_start: int, request_stop: int) -> I32:
    """`query_start_loc` of the requests in `[request_start, request_stop)` alone: `[request_stop - request_start + 1]`.

    Raises `IndexError` if they are not all there.
    """
    starts = np.asarray(query_start_loc, np.int32)
    if not 0 <= request_start <= request_stop < len(starts):
        raise IndexError(f"requests [{request_start}, {request_stop}) of a batch of {len(starts) - 1}")
    return frozen_array(starts[request_start : request_stop + 1] - starts[request_start])


class Ubatch(NamedTuple):
    """A micro-batch: half-open ranges. A request that a border cuts is in both."""

    requests: tuple[int, int]
    tokens: tuple[int, int]


def ubatch_slices(
    num_scheduled_tokens: ArrayLike, num_tokens_padded: int, num_ubatches: int, split_point: int | None = None
) -> tuple[Ubatch, ...]:
    """The batch in micro-batches of `split_point` tokens each, the last takes what is left.

    By default all are as long, padding included. Raises `ValueError` if one would hold no token (`ubatch_last_empty`).
    """
    ends = np.cumsum(np.asarray(num_scheduled_tokens, np.int64))
    total = int(ends[-1]) if len(ends) else 0
    size = num_tokens_padded // num_ubatches if split_point is None else split_point
    borders = (*(size * index for index in range(num_ubatches)), total)
    if size < 1 or borders[-2] >= total:
        raise ValueError(f"{total} tokens in {num_ubatches} micro-batches of {size}: one would be empty")
    firsts = np.searchsorted(ends, borders[:-1], side="right")
    lasts = np.searchsorted(ends, np.array(borders[1:]) - 1, side="right")
    return tuple(
        Ubatch((first, last + 1), (start, stop))
        for first, last, start, stop in zip(firsts.tolist(), lasts.tolist(), borders, borders[1:], strict=False)
    )


def padded_ubatches(slices: tuple[Ubatch, ...], num_tokens_padded: int, num_reqs_padded: int) -> tuple[Ubatch, ...]:
    """The same micro-batches, the last of which takes all padding."""
    requests, tokens = slices[-1]
    return (*slices[:-1], Ubatch((requests[0], num_reqs_padded), (tokens[0], num_tokens_padded)))


def ubatch_last_empty(num_tokens: int, num_tokens_padded: int, num_ubatches: int) -> bool:
    """Whether the last of equal micro-batches would hold nothing but padding, so that a split gains nothing."""
    return num_tokens_padded // num_ubatches * (num_ubatches - 1) >= num_tokens


def expand_to_tokens(per_request: ArrayLike, cu_num_tokens: ArrayLike) -> NDArray[Any]:
    """A value a request, once for each of its tokens: `[T]`. `cu_num_tokens` `[B]` has no leading 0."""
    return frozen_array(np.repeat(np.asarray(per_request), np.diff(np.asarray(cu_num_tokens), prepend=0)))


class AttentionState(enum.StrEnum):
    """What a whole step is to the attention kernels of vLLM-Ascend."""

    PREFILL_NO_CACHE = "prefill_no_cache"  #: nothing is computed of any request
    PREFILL_CACHE_HIT = "prefill_cache_hit"  #: prompts behind what was in the cache
    DECODE_ONLY = "decode_only"  #: one token each
    SPECULATIVE = "speculative"  #: one token and its drafts each, for a drafter of the model's own (MTP)
    CHUNKED_PREFILL = "chunked_prefill"  #: anything


def attention_state(
    num_computed_tokens: ArrayLike,
    num_scheduled_tokens: ArrayLike,
    num_draft_tokens: ArrayLike,
    chunked_prefill: bool = True,
    drafter_is_mtp: bool = False,
) -> AttentionState:
    """The state of a step, from what each request has computed, scheduled and drafted: `[B]` each.

    Other drafters than MTP need the kernels of chunked prefill as soon as a request has a draft.
    """
    scheduled = np.asarray(num_scheduled_tokens)
    if not np.any(num_computed_tokens):
        return AttentionState.PREFILL_NO_CACHE
    if (scheduled - np.asarray(num_draft_tokens) == 1).all():
        if drafter_is_mtp:
            return AttentionState.SPECULATIVE
        return AttentionState.DECODE_ONLY if (scheduled == 1).all() else AttentionState.CHUNKED_PREFILL
    return AttentionState.CHUNKED_PREFILL if chunked_prefill else AttentionState.PREFILL_CACHE_HIT
