"""The requests of an engine, one a row, as columns. The only part of a state that counts for equality."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np
from attrs import frozen

from fstep.state.arrays import I8, I32, I64, Intp, frozen_array
from fstep.state.digest import digest
from fstep.state.keys import CacheKey
from fstep.state.logs import Log
from fstep.state.sampling import SamplingRows


class FinishReason(enum.StrEnum):
    STOP = "stop"  #: an EOS or stop token, or a stop string
    LENGTH = "length"  #: `max_tokens` or `max_model_len`
    ABORT = "abort"
    ERROR = "error"


class RowPhase(enum.IntEnum):
    FREE = 0  #: no request
    RUNNING = 1  #: may be scheduled
    PREEMPTED = 2  #: holds no blocks; `Schedule.resumed` brings it back
    STOPPED = 3  #: ended by a stop token; this and those below hold their blocks until `Schedule.finished` names them
    FULL = 4  #: ended by its length
    FAILED = 5

    @property
    def finish_reason(self) -> FinishReason | None:
        return _REASONS.get(self)


_REASONS: Final = MappingProxyType(
    {
        RowPhase.STOPPED: FinishReason.STOP,
        RowPhase.FULL: FinishReason.LENGTH,
        RowPhase.FAILED: FinishReason.ERROR,
    }
)


class RequestIds(tuple[str | None, ...]):
    """The request of each row (None: free), with the way back."""

    @cached_property
    def row_of(self) -> Mapping[str, int]:
        return {name: row for row, name in enumerate(self) if name is not None}

    def rows(self, names: tuple[str, ...]) -> Intp:
        """The rows of some requests: `[len(names)]`. Raises `KeyError` for one that has none.

        The last answer is kept: a running batch asks for the same tuple step after step.
        """
        last = self.__dict__.get("_last")
        if last is None or last[0] is not names:
            at = np.fromiter(map(self.row_of.__getitem__, names), np.intp, len(names))
            last = self.__dict__["_last"] = (names, frozen_array(at))
        return last[1]


@frozen(eq=False, repr=False)
class Rows:
    """All requests. A request keeps its row from its admission to its end; a freed row gets a new `generation`."""

    request_ids: RequestIds  #: [R]
    generation: I32  #: [R], how many requests the row has had
    phase: I8  #: [R], `RowPhase`
    tokens: Log  #: prompt and output, as far as the host knows them
    blocks: tuple[Log, ...]  #: one a KV group
    prompt_len: I32  #: [R]
    prefill_len: I32  #: [R], prompt and what was produced before the last preemption
    num_tokens: I32  #: [R], prompt and output; past `tokens.length` by what is in flight
    num_computed_tokens: I32  #: [R], tokens whose KV is in the cache
    sampling: SamplingRows
    cache_keys: tuple[CacheKey, ...]  #: [R]
    family: I64  #: [R], the same for requests that were forked from one another
    num_samples: I32  #: [R], sample indices that the family has used
    priority: I32  #: [R]
    weights: (
        Log  #: pairs: an output token's position, and the weights version that it and those after it were drawn with
    )

    @classmethod
    def empty(cls, rows: int, groups: int) -> Rows:
        zeros = frozen_array(np.zeros(rows, np.int32))
        return cls(
            request_ids=RequestIds((None,) * rows),
            generation=zeros,
            phase=frozen_array(np.zeros(rows, np.int8)),
            tokens=Log.empty(rows),
            blocks=tuple(Log.empty(rows) for _ in range(groups)),
            prompt_len=zeros,
            prefill_len=zeros,
            num_tokens=zeros,
            num_computed_tokens=zeros,
            sampling=SamplingRows.empty(rows),
            cache_keys=(CacheKey(),) * rows,
            family=frozen_array(np.zeros(rows, np.int64)),
            num_samples=zeros,
            priority=zeros,
            weights=Log.empty(rows),
        )

    def __len__(self) -> int:
        return len(self.request_ids)

    def __repr__(self) -> str:
        counts = np.bincount(self.phase, minlength=len(RowPhase)).tolist()
        return f"Rows({counts[1]} running, {counts[2]} preempted, {sum(counts[3:])} finished, {counts[0]} free)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and digest(self) == digest(other)

    def __hash__(self) -> int:
        return hash(self.request_ids)

    def live(self) -> Intp:
        """The rows that hold a request."""
        return np.nonzero(self.phase)[0]

    def weights_versions(self, row: int) -> I32:
        """The weights version that each output token of a row was drawn with."""
        changes = self.weights[row].reshape(-1, 2)
        versions = np.zeros(self.num_tokens[row] - self.prompt_len[row], np.int32)
        for position, version in changes.tolist():
            versions[max(position - int(self.prompt_len[row]), 0) :] = version
        return frozen_array(versions)

    def output(self, row: int) -> I32:
        """The tokens that a row has produced."""
        return self.tokens[row][self.prompt_len[row] :]
