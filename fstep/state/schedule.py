"""What a step is asked to do, and the scheduler's own state."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Final, cast

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from fstep.state.arrays import EMPTY, I32, Intp, Ragged, frozen_array, i32
from fstep.state.errors import ConfigError, RequestError
from fstep.state.logs import Log
from fstep.state.plan import Plan, about
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


@frozen
class Finished:
    """A request that ended, and why; its row and blocks are given back."""

    request_id: str
    reason: FinishReason = FinishReason.STOP


@frozen
class Resumed:
    """A preempted request that runs again; its blocks come with the step's `new_blocks`."""

    request_id: str


@frozen(eq=False)
class Schedule:
    """One step, as columns over its `B` scheduled requests, in the order of the batch.

    Applied in this order: finished, preempted, resumed, new, then the scheduled tokens. A new or resumed request
    stands in `request_ids` too.
    """

    finished: tuple[Finished, ...] = ()
    preempted: tuple[str, ...] = ()
    resumed: tuple[Resumed, ...] = ()
    new: tuple[NewRequest, ...] = ()
    request_ids: tuple[str, ...] = ()  #: [B]
    num_scheduled_tokens: I32 = EMPTY  #: [B], at least 1 each
    new_blocks: tuple[Ragged, ...] = ()  #: one a KV group, each over the `B` requests; () is none at all


@frozen
class SchedLimits:
    """How much a step may hold."""

    max_num_seqs: int = field(default=256, metadata=about("most requests in a step"))
    max_num_batched_tokens: int = field(default=2048, metadata=about("most tokens in a step"))
    long_prefill_token_threshold: int = field(
        default=0, metadata=about("most tokens of one request in a step; 0 is no limit")
    )

    def __attrs_post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("long_prefill_token_threshold", 0)):
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"must be at least {least}")


@frozen(eq=False)
class BlockPool:
    """The free blocks of one KV group, as a first-in, first-out queue.

    A value: `take` and `give` return the next pool. The queue is one row of an append-only log from which the first
    `head` items are gone, so both cost what they move; `give` lays a log of twice the pool's size anew.
    """

    queue: Log
    head: int
    num_blocks: int  #: with the null block

    @classmethod
    def full(cls, num_blocks: int) -> BlockPool:
        """A pool whose blocks 1 to `num_blocks - 1` are all free."""
        return cls(_queue(np.arange(1, num_blocks)), 0, num_blocks)

    def __repr__(self) -> str:
        return f"BlockPool({self.num_free} of {self.num_blocks - 1} free)"

    @property
    def num_free(self) -> int:
        return int(self.queue.length[0]) - self.head

    @property
    def free(self) -> I32:
        """The free blocks in the order in which they will be taken: `[num_free]`."""
        return self.queue[0][self.head :]

    def take(self, count: int) -> tuple[I32, BlockPool]:
        """The next `count` free blocks; there must be as many."""
        taken = frozen_array(self.free[:count].copy())
        return taken, BlockPool(self.queue, self.head + count, self.num_blocks)

    def give(self, blocks: I32) -> BlockPool:
        """A pool in which `blocks` are free again.

        Raises `ValueError` if they can't all have been taken: the null block, one past the end, one twice, or more
        than are missing.
        """
        if len(blocks) == 0:
            return self
        inside = int(blocks.min()) >= 1 and int(blocks.max()) < self.num_blocks
        if not inside or len(blocks) + self.num_free >= self.num_blocks or _repeats(blocks):
            raise ValueError(f"blocks {blocks.tolist()} given back to {self!r}: each must be one that was taken, once")
        if self.head >= self.num_blocks:
            return BlockPool(_queue(np.concatenate((self.free, blocks))), 0, self.num_blocks)
        rows, counts = np.zeros(1, np.intp), np.array([len(blocks)])
        return BlockPool(self.queue.append(rows, blocks, counts), self.head, self.num_blocks)


def _queue(blocks: Intp | I32) -> Log:
    return Log.empty(1).append(np.zeros(1, np.intp), blocks, np.array([len(blocks)]))


def _repeats(blocks: I32) -> bool:
    return len(set(blocks.tolist())) < len(blocks)


@frozen(eq=False)
class SchedState:
    """What a scheduler knows beside the rows: who waits, who runs in which order, and the free blocks."""

    limits: SchedLimits
    pools: tuple[BlockPool, ...]  #: one a KV group
    waiting: tuple[NewRequest, ...] = ()  #: in order of arrival
    running: tuple[str, ...] = ()  #: in order of admission
    preempted: tuple[str, ...] = ()  #: in order of admission; goes before `waiting`
    ending: tuple[Finished, ...] = ()  #: admitted requests to be finished by the next schedule

    @classmethod
    def empty(cls, plan: Plan, limits: SchedLimits) -> SchedState:
        return cls(limits, tuple(BlockPool.full(group.num_blocks) for group in plan.groups))

    def __repr__(self) -> str:
        counts = f"{len(self.running)} running, {len(self.preempted)} preempted, {len(self.waiting)} waiting"
        return f"SchedState({counts}, {self.pools})"
