"""Append-only logs of integers, one a row, shared by every state that can see them.

A `Log` is a value: which arena row each state row reads, and how far. The `Arena` behind it grows and is written
to, but only past the end of what anybody sees, so no log that was ever handed out changes. An append compares, for
all rows at once, how far the arena row is written with how far this log sees: equal, and the new items go in
place; not equal (another line of states has appended there, or the row has a new request), and the row moves to
an arena row of its own first.

Arena rows that no living log names are found by a sweep when the arena is full (weak references to the row maps, so
a state that is dropped costs nothing). The arena's memory is asked for zeroed and touched only where something is
written. One writer thread.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from fstep.state.arrays import I32, Intp, frozen_array, ragged_arange

_NOWHERE = 0  # an arena row that is never written: rows without items point to it


class RowMap:
    """Which arena row each state row reads; shared by the logs of all steps in which no row moved."""

    __slots__ = ("__weakref__", "rows")

    def __init__(self, rows: Intp) -> None:
        self.rows = frozen_array(rows)


class Arena:
    """The memory behind logs: `data [rows, width]`, of which row `r` is written up to `written[r]` and 0 behind."""

    __slots__ = ("_free", "_maps", "data", "written")

    def __init__(self, rows: int = 16, width: int = 16) -> None:
        self.data: I32 = np.zeros((rows, width), np.int32)
        self.written: Intp = np.zeros(rows, np.intp)
        self.written[_NOWHERE] = -1
        self._free: list[int] = list(range(rows - 1, _NOWHERE, -1))
        self._maps: weakref.WeakSet[RowMap] = weakref.WeakSet()

    def map(self, rows: Intp) -> RowMap:
        made = RowMap(rows)
        self._maps.add(made)
        return made

    def take(self, count: int) -> Intp:
        """`count` unwritten arena rows; the caller puts them into a map before the next `take`."""
        if len(self._free) < count:
            self._sweep(count)
        taken = np.array([self._free.pop() for _ in range(count)], np.intp)
        self.data[taken, : int(self.written[taken].max(initial=0))] = 0
        self.written[taken] = 0
        return taken

    def reserve(self, width: int) -> None:
        if width > self.data.shape[1]:
            self._resize(len(self.written), max(width, 2 * self.data.shape[1]))

    def _sweep(self, count: int) -> None:
        rows = len(self.written)
        used = np.zeros(rows, np.bool_)
        used[_NOWHERE] = True
        for row_map in self._maps:
            used[row_map.rows] = True
        alive = int(used.sum())
        if rows - alive < max(count, rows // 2):
            self._resize(max(2 * rows, 2 * (alive + count)), self.data.shape[1])
            used = np.append(used, np.zeros(len(self.written) - rows, np.bool_))
        self._free = [int(row) for row in np.nonzero(~used)[0][::-1]]

    def _resize(self, rows: int, width: int) -> None:
        data, written = np.zeros((rows, width), np.int32), np.zeros(rows, np.intp)
        written[: len(self.written)] = self.written
        for row in np.nonzero(self.written > 0)[0]:
            data[row, : written[row]] = self.data[row, : written[row]]
        self.data, self.written = data, written


@frozen(eq=False, repr=False)
class Log:
    """`R` append-only lists of int32; row `r` holds `length[r]` items."""

    arena: Arena
    map: RowMap
    length: I32  #: [R]

    @classmethod
    def empty(cls, rows: int) -> Log:
        arena = Arena(rows=max(16, 2 * rows + 1))
        return cls(arena, arena.map(np.zeros(rows, np.intp)), frozen_array(np.zeros(rows, np.int32)))

    def __len__(self) -> int:
        return len(self.length)

    def __repr__(self) -> str:
        return f"Log({len(self)} rows, {int(self.length.sum())} items)"

    def __getitem__(self, row: int) -> I32:
        """The items of one row, a read-only view: `[length[row]]`."""
        return frozen_array(self.arena.data[self.map.rows[row], : self.length[row]])

    def gather(self, rows: NDArray[Any], columns: NDArray[Any]) -> I32:
        """Item `columns[i]` of row `rows[i]`, for all i; every column must lie below its row's length: `[n]`."""
        return self.arena.data[self.map.rows[rows], columns]

    def table(self, rows: NDArray[Any], width: int) -> I32:
        """The first `width` items of each row, 0 where it has fewer: `[len(rows), width]`."""
        self.arena.reserve(width)
        at, length = self.map.rows[rows], self.length[rows]
        table: I32 = self.arena.data[at, :width]
        if (self.arena.written[at] > length).any():  # past its end an arena row is zero, past ours it need not be
            table *= np.arange(width, dtype=np.int32) < length[:, None]
        return frozen_array(table)

    def append(self, rows: NDArray[Any], values: NDArray[Any], counts: NDArray[Any] | None = None) -> Log:
        """A log in which row `rows[i]` has `counts[i]` more items (one each if None), taken from `values` in order.

        No row may stand twice in `rows`.
        """
        start = self.length[rows]
        log = self._apart(rows[self.arena.written[self.map.rows[rows]] != start])
        arena, at = log.arena, log.map.rows[rows]
        end = start + (1 if counts is None else counts)
        if len(end):
            arena.reserve(int(end.max()))
        if counts is None:
            arena.data[at, start] = values
        else:
            arena.data[np.repeat(at, counts), ragged_arange(start, counts)] = values
        arena.written[at] = end
        length = self.length.copy()
        length[rows] = end
        return Log(arena, log.map, frozen_array(length))

    def cleared(self, rows: NDArray[Any]) -> Log:
        """A log in which `rows` are empty."""
        length = self.length.copy()
        length[rows] = 0
        return Log(self.arena, self.map, frozen_array(length))

    def grown(self, rows: int) -> Log:
        """A log of `rows` rows, the new ones empty."""
        more = rows - len(self)
        maps = np.append(self.map.rows, np.zeros(more, np.intp))
        length = np.append(self.length, np.zeros(more, np.int32))
        return Log(self.arena, self.arena.map(maps), frozen_array(length))

    def _apart(self, rows: NDArray[Any]) -> Log:
        """The same log, with `rows` on arena rows that nobody else has written to."""
        if len(rows) == 0:
            return self
        arena, fresh = self.arena, self.arena.take(len(rows))
        for old, new, length in zip(self.map.rows[rows], fresh, self.length[rows], strict=True):
            arena.data[new, :length] = arena.data[old, :length]
            arena.written[new] = length
        maps = self.map.rows.copy()
        maps[rows] = fresh
        return Log(arena, arena.map(maps), self.length)
