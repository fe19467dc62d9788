"""Host arrays as values: read-only NumPy, int32 unless said otherwise, and ragged lists of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Intp = NDArray[np.intp]

_A = TypeVar("_A", bound=NDArray[Any])


def frozen_array(array: _A) -> _A:
    """`array` itself, made read-only; for arrays that nobody else can write to."""
    array.setflags(write=False)
    return array


def i32(values: Iterable[int] | NDArray[Any]) -> I32:
    """A read-only int32 copy of `values`."""
    return frozen_array(np.fromiter(values, np.int32))


def ragged_arange(starts: NDArray[Any], counts: NDArray[Any]) -> Intp:
    """`starts[0], starts[0]+1, …` (`counts[0]` of them), then those of `starts[1]`, …: `[sum(counts)]`."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.intp) + np.repeat(starts - (ends - counts), counts)


EMPTY = i32(())


@frozen(eq=False)
class Ragged:
    """`B` lists of integers as one flat array: list `b` is `values[offsets[b]:offsets[b + 1]]`."""

    values: I32  #: [N]
    offsets: I32  #: [B + 1], starts at 0, never falls
    counts: I32 = field(init=False)  #: [B]

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "counts", frozen_array(self.offsets[1:] - self.offsets[:-1]))

    @classmethod
    def of(cls, lists: Iterable[Sequence[int] | NDArray[Any]]) -> Ragged:
        parts = [np.asarray(part, np.int32) for part in lists]
        offsets = np.zeros(len(parts) + 1, np.int32)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        values = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return cls(frozen_array(values), frozen_array(offsets))

    def __len__(self) -> int:
        return len(self.counts)

    def __add__(self, other: Ragged) -> Ragged:
        """The lists of one, then those of the other."""
        values = np.concatenate((self.values, other.values))
        offsets = np.concatenate((self.offsets, other.offsets[1:] + self.offsets[-1]))
        return Ragged(frozen_array(values), frozen_array(offsets))

    def __getitem__(self, b: int) -> I32:
        return self.values[self.offsets[b] : self.offsets[b + 1]]
