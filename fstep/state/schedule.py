"""What a step is asked to do, and the scheduler's own state."""

from __future__ import annotations

import enum
from numbers import Integral
from typing import Any, Final, cast

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from fstep.state.arrays import EMPTY, I32, Ragged, i32
from fstep.state.errors import ConfigError, RequestError
from fstep.state.keys import CacheKey
from fstep.state.plan import Plan, about
from fstep.state.pool import BlockPool
from fstep.state.rows import FinishReason
from fstep.state.sampling import SamplingParams

MAX_TOKEN_ID: Final = 2**31 - 1


def _token_ids(value: object) -> I32:
    limit = "must be a flat list of token ids, integers of at least 0"
    array = _integers(value)
    if array is None:
        raise RequestError("prompt_token_ids", value, limit)
    bad = np.nonzero((array < 0) | (array > MAX_TOKEN_ID))[0]
    if len(bad):
        at = int(bad[0])
        raise RequestError(f"prompt_token_ids[{at}]", int(array[at]), "must lie in the vocabulary")
    return i32(array)


def _integers(value: object) -> NDArray[Any] | None:
    """A flat array of the integers in a list, tuple or array; None if it holds anything else."""
    if isinstance(value, list | tuple):
        items = cast(list[object], value)
        if any(isinstance(each, bool) or not isinstance(each, Integral) for each in items):
            return None
        array = np.array(items or (), dtype=object if items else np.int32)
    elif isinstance(value, np.ndarray):
        array = cast(NDArray[Any], value)
    else:
        return None
    return array if array.ndim == 1 and array.dtype.kind in "iuO" else None


@frozen(eq=False)
class NewRequest:
    """A request as the scheduler admits it.

    Raises `RequestError` for token ids that are no flat list of integers.
    """

    request_id: str
    prompt_token_ids: I32 = field(converter=_token_ids)  #: [prompt_len]
    sampling: SamplingParams = field(factory=SamplingParams)
    cache_key: CacheKey = field(factory=CacheKey)
    num_computed_tokens: int = 0  #: found in the prefix cache; their blocks come first in the step's `new_blocks`
    sample_index: int = 0  #: tells the noise of several samples of one prompt apart
    priority: int = 0  #: the lowest goes first, if the scheduler looks at it
    block_hashes: tuple[tuple[bytes, ...], ...] | None = field(
        default=None, repr=False
    )  #: of whole blocks, by KV group


def _policy(value: str) -> SchedulingPolicy:
    try:
        return SchedulingPolicy(value)
    except ValueError:
        raise ConfigError("scheduling_policy", value, f"must be one of {', '.join(SchedulingPolicy)}") from None


@frozen
class Finished:
    """A request that ended, and why; its row and blocks are given back."""

    request_id: str
    reason: FinishReason = FinishReason.STOP


@frozen
class Resumed:
    """A preempted request that runs again; its blocks come with the step's `new_blocks`."""

    request_id: str
    num_computed_tokens: int = 0  #: found in the prefix cache


@frozen(eq=False)
class Schedule:
    """One step, as columns over its `B` scheduled requests, in the order of the batch.

    Applied in this order: finished, preempted, resumed, new, then the scheduled tokens; `forward` copies blocks before
    it writes any. A new or resumed request stands in `request_ids` too.
    """

    finished: tuple[Finished, ...] = ()
    preempted: tuple[str, ...] = ()
    resumed: tuple[Resumed, ...] = ()
    new: tuple[NewRequest, ...] = ()
    request_ids: tuple[str, ...] = ()  #: [B]
    num_scheduled_tokens: I32 = EMPTY  #: [B], at least 1 each
    new_blocks: tuple[Ragged, ...] = ()  #: one a KV group, each over the `B` requests; () is none at all
    copies: tuple[I32, ...] = ()  #: one a KV group, [n, 2]: blocks, and those that become copies of them; () is none


class SchedulingPolicy(enum.StrEnum):
    """Who goes first, and gives way last."""

    FCFS = "fcfs"  #: who came first
    PRIORITY = "priority"  #: the lowest `NewRequest.priority`; of equals who came first
    DECODE_FIRST = "decode-first"  #: whose prompt is complete; of the others who came first


@frozen
class SchedLimits:
    """How much a step may hold, and who goes first."""

    max_num_seqs: int = field(default=256, metadata=about("most requests in a step"))
    max_num_batched_tokens: int = field(default=2048, metadata=about("most tokens in a step"))
    long_prefill_token_threshold: int = field(
        default=0, metadata=about("most tokens of one request in a step; 0 is no limit")
    )
    max_long_partial_prefills: int = field(
        default=0, metadata=about("most requests in a step that have more tokens than that left; 0 is no limit")
    )
    scheduling_policy: SchedulingPolicy = field(
        default=SchedulingPolicy.FCFS, converter=_policy, metadata=about("who goes first, and gives way last")
    )

    def __attrs_post_init__(self) -> None:
        leasts = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
        for name in (*leasts, "long_prefill_token_threshold", "max_long_partial_prefills"):
            if getattr(self, name) < leasts.get(name, 0):
                raise ConfigError(name, getattr(self, name), f"must be at least {leasts.get(name, 0)}")


@frozen(eq=False)
class SchedState:
    """What a scheduler knows beside the rows: who waits, who runs in which order, and the free blocks."""

    limits: SchedLimits
    pools: tuple[BlockPool, ...]  #: one a KV group
    waiting: tuple[NewRequest, ...] = ()  #: in order of arrival
    running: tuple[str, ...] = ()  #: in order of admission
    preempted: tuple[str, ...] = ()  #: in order of admission; goes before `waiting`
    ending: tuple[Finished, ...] = ()  #: admitted requests to be finished by the next schedule
    copies: tuple[I32, ...] = ()  #: one a KV group, [n, 2]: what the next schedule asks to copy; () is none
    weights_version: int = 0  #: what is computed from now on is computed with these weights
    uncached: frozenset[str] = frozenset()  #: running requests whose KV is of other weights too: nobody may find it

    def filled_from(self, group: int, block: int) -> int:
        """Where what is to be in a block lies by now: in its source, if it is still to be copied."""
        pending: list[list[int]] = self.copies[group].tolist() if self.copies else []
        return next((source for source, copy in pending if copy == block), block)

    @classmethod
    def empty(cls, plan: Plan, limits: SchedLimits) -> SchedState:
        return cls(
            limits,
            tuple(BlockPool.full(each.num_blocks, plan.prefix_caching, each.recurrent) for each in plan.groups),
        )

    def __repr__(self) -> str:
        counts = f"{len(self.running)} running, {len(self.preempted)} preempted, {len(self.waiting)} waiting"
        return f"SchedState({counts}, {self.pools})"
