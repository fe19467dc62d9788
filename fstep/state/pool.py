"""The blocks of one KV group as a value: how many hold each, which are free, and what the cached ones hold.

A pool is asked and changed in every step, so it can't be copied. Its books are written in place, by the newest version
alone: each change leaves behind, in the version before it, what has to be undone to see that one again (Baker, "Shallow
binding makes functional arrays fast", 1991). An old version that is read or changed gets books of its own, once. Old
versions point to newer ones and never the other way, so what nobody can see any more is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from fstep.state.arrays import I32, frozen_array

_HEAD, _TAIL, _FREE = 0, 1, 2  # in `marks`: the ends of the queue, and how many blocks stand in it
_GONE = -1  # a place in the queue whose block has been taken out of the middle

_Undo: TypeAlias = list[tuple[Any, Any, Any]]  # (array or dict, where, what stood there; None in a dict: nothing)


class _Books:
    """The mutable truth behind one version; every write notes how to undo it."""

    __slots__ = ("blocks_of", "hash_of", "marks", "place", "queue", "ref_counts", "undo")

    def __init__(self, num_blocks: int) -> None:
        self.ref_counts: I32 = np.zeros(num_blocks, np.int32)  # how many requests hold a block
        self.queue: I32 = np.full(3 * num_blocks, _GONE, np.int32)  # the free blocks between two marks, with gaps
        self.place: I32 = np.full(num_blocks, _GONE, np.int32)  # of a free block in the queue
        self.marks: NDArray[np.int64] = np.array([num_blocks, num_blocks, 0], np.int64)
        self.hash_of: dict[int, bytes] = {}
        self.blocks_of: dict[bytes, tuple[int, ...]] = {}  # the longest cached first
        self.undo: _Undo = []
        self.append(np.arange(1, num_blocks, dtype=np.int32))
        self.undo = []

    def copy(self) -> _Books:
        made = _Books.__new__(_Books)
        for name in ("ref_counts", "queue", "place", "marks", "hash_of", "blocks_of"):
            setattr(made, name, getattr(self, name).copy())
        made.undo = []
        return made

    def revert(self, undo: _Undo) -> None:
        for target, where, old in reversed(undo):
            mine = getattr(self, target)
            if old is None:
                del mine[where]
            else:
                mine[where] = old

    def put(self, target: str, where: Any, values: Any) -> None:
        """Writes to a column."""
        column: NDArray[Any] = getattr(self, target)
        self.undo.append((target, where, column[where].copy()))
        column[where] = values

    def enter(self, target: str, key: Any, value: Any) -> None:
        """Writes to a map; None deletes."""
        entries: dict[Any, Any] = getattr(self, target)
        self.undo.append((target, key, entries.get(key)))
        if value is None:
            del entries[key]
        else:
            entries[key] = value

    def append(self, blocks: I32) -> None:
        """Free blocks at the tail of the queue."""
        if self.marks[_TAIL] + len(blocks) > len(self.queue):
            self._center()
        head, tail, free = self.marks.tolist()
        self._lay(blocks, tail)
        self.put("marks", slice(None), (head, tail + len(blocks), free + len(blocks)))

    def prepend(self, blocks: I32) -> None:
        """Free blocks at the head of the queue, the first of them first."""
        if self.marks[_HEAD] < len(blocks):
            self._center()
        head, tail, free = self.marks.tolist()
        self._lay(blocks, head - len(blocks))
        self.put("marks", slice(None), (head - len(blocks), tail, free + len(blocks)))

    def pop(self, count: int) -> I32:
        """The first free blocks, out of the queue; there must be as many."""
        head, tail, free = self.marks.tolist()
        stop = head + count
        while (missing := count - int(np.count_nonzero(self.queue[head:stop] != _GONE))) > 0:
            stop += missing
        blocks = self.queue[head:stop]
        blocks = blocks[blocks != _GONE]
        self.put("place", blocks, _GONE)
        self.put("marks", slice(None), (stop, tail, free - count))
        return blocks

    def pull(self, blocks: I32) -> None:
        """Some free blocks out of the queue, wherever they stand."""
        self.put("queue", self.place[blocks], _GONE)
        self.put("place", blocks, _GONE)
        self.put("marks", _FREE, self.marks[_FREE] - len(blocks))

    def free(self) -> I32:
        waiting = self.queue[self.marks[_HEAD] : self.marks[_TAIL]]
        return waiting[waiting != _GONE]

    def _lay(self, blocks: I32, start: int) -> None:
        self.put("queue", slice(start, start + len(blocks)), blocks)
        self.put("place", blocks, np.arange(start, start + len(blocks), dtype=np.int32))

    def _center(self) -> None:
        """The queue without its gaps, in the middle of its room; at most once for each block that came or went."""
        blocks = self.free()
        start = (len(self.queue) - len(blocks)) // 2
        self.put("queue", slice(None), _GONE)
        self._lay(blocks, start)
        self.put("marks", slice(None), (start, start + len(blocks), len(blocks)))

    def unhash(self, block: int) -> None:
        """Forgets what a block holds, if it is known."""
        block_hash = self.hash_of.get(block)
        if block_hash is not None:
            others = tuple(each for each in self.blocks_of[block_hash] if each != block)
            self.enter("hash_of", block, None)
            self.enter("blocks_of", block_hash, others or None)


class _Version:
    """Either the books, or what to undo on the way back from the next version."""

    __slots__ = ("books", "newer", "undo")

    def __init__(self, books: _Books) -> None:
        self.books: _Books | None = books
        self.newer: _Version | None = None
        self.undo: _Undo = []

    def opened(self) -> _Books:
        """The books as of this version; a copy that is its own from now on, if there is a newer one."""
        if self.books is not None:
            return self.books
        steps: list[_Undo] = []
        at = self
        while at.books is None:
            steps.append(at.undo)
            assert at.newer is not None
            at = at.newer
        books = at.books.copy()
        for undo in reversed(steps):
            books.revert(undo)
        self.books, self.newer, self.undo = books, None, []
        return books

    def close(self) -> _Version:
        """The next version, which has the books as they were written by now."""
        books = self.books
        assert books is not None
        newer = _Version(books)
        self.books, self.newer, self.undo = None, newer, books.undo
        books.undo = []
        return newer


@frozen(eq=False, repr=False)
class BlockPool:
    """The blocks of one KV group. A value: every change returns the next pool, and costs O(blocks that it names).

    A block is held by one request or more, or it is free. A full one may be cached, known by the hash of what it holds
    (see `ops.prefix`): then it can be shared, and it stays known while it is free, until somebody else takes it. Free
    blocks are taken from the head of a queue. Those that come back go to its tail, so that what was used last is
    forgotten last; in a pool that caches, those that aren't known go to its head. (vLLM's rules.)
    """

    num_blocks: int  #: with the null block 0, which nobody gets
    num_free: int
    caching: bool  #: whether anything is ever known
    deferred: bool  #: whether a block is known only from the next step on
    _version: _Version
    _filling: tuple[tuple[Sequence[int], Sequence[bytes]], ...] = ()

    @classmethod
    def full(cls, num_blocks: int, caching: bool = True, deferred: bool = False) -> BlockPool:
        """A pool whose blocks 1 to `num_blocks - 1` are all free, and unknown."""
        return cls(num_blocks, num_blocks - 1, caching, deferred, _Version(_Books(num_blocks)))

    def __repr__(self) -> str:
        return f"BlockPool({self.num_free} of {self.num_blocks - 1} free, {len(self._version.opened().hash_of)} cached)"

    @property
    def free(self) -> I32:
        """The free blocks in the order in which they will be taken: `[num_free]`."""
        return frozen_array(self._version.opened().free())

    @property
    def ref_counts(self) -> I32:
        """How many requests hold each block: `[num_blocks]`, a copy."""
        return frozen_array(self._version.opened().ref_counts.copy())

    @property
    def hashes(self) -> Mapping[int, bytes]:
        """The cached blocks and their hashes, a copy."""
        return dict(self._version.opened().hash_of)

    def ref_counts_of(self, blocks: I32 | Sequence[int]) -> I32:
        """How many requests hold each of some blocks: `[len(blocks)]`."""
        return frozen_array(self._version.opened().ref_counts[np.asarray(blocks, np.intp)])

    def hash_of(self, block: int) -> bytes | None:
        """The hash of what a block holds, if it is cached."""
        return self._version.opened().hash_of.get(block)

    def find(self, block_hash: bytes) -> int | None:
        """A block that holds what hashes to `block_hash`: of several the one that has been cached longest."""
        found = self._version.opened().blocks_of.get(block_hash)
        return found[0] if found else None

    def take(self, count: int) -> tuple[I32, BlockPool]:
        """The next `count` free blocks, held once now; what they held is forgotten. There must be as many."""
        if not 0 <= count <= self.num_free:
            raise ValueError(f"{count} blocks asked of {self!r}")
        if count == 0:
            return _NO_BLOCKS, self
        books = self._version.opened()
        blocks = frozen_array(books.pop(count))
        books.put("ref_counts", blocks, 1)
        if books.hash_of:
            for block in blocks.tolist():
                books.unhash(block)
        return blocks, self._next()

    def share(self, blocks: Sequence[int]) -> BlockPool:
        """Each of some blocks, held or cached, held once more; a free one is free no longer."""
        if not blocks:
            return self
        books, at = self._version.opened(), np.array(blocks, np.int32)
        held = books.ref_counts[at]
        books.put("ref_counts", at, held + 1)
        books.pull(at[held == 0])
        return self._next()

    def give(self, *lists: I32, forget: bool = False) -> BlockPool:
        """Each block held once less; a list is what one request held, in order. Those that nobody holds are free.

        The last block of a list becomes free first, so that a prefix outlives what follows it. With `forget` the freed
        blocks can't be found any more. Raises `ValueError` if a block isn't held as often.
        """
        blocks = np.concatenate((_NO_BLOCKS, *(each[::-1] for each in lists)))
        if len(blocks) == 0:
            return self
        self._check_held(blocks)
        books = self._version.opened()
        each, counts = np.unique(blocks, return_counts=True)
        books.put("ref_counts", each, books.ref_counts[each] - counts.astype(np.int32))
        idle = _last_of_each(blocks)
        idle = idle[books.ref_counts[idle] == 0]
        if forget:
            for block in idle.tolist():
                books.unhash(block)
        if self.caching:
            known = np.fromiter(map(books.hash_of.__contains__, idle.tolist()), np.bool_, len(idle))
            books.prepend(idle[~known][::-1])
            idle = idle[known]
        books.append(idle)
        return self._next()

    def cache(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> BlockPool:
        """Makes held blocks known by the hashes of what they hold; one that is known already keeps its hash.

        In a deferred pool they are known after `settled`.
        """
        if self.deferred:
            return evolve(self, filling=(*self._filling, (blocks, hashes)))
        return self._cached(blocks, hashes)

    def settled(self) -> BlockPool:
        """The pool at the beginning of the next step."""
        pool = self
        for blocks, hashes in self._filling:
            pool = pool._cached(blocks, hashes)
        return evolve(pool, filling=()) if self._filling else self

    def _cached(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> BlockPool:
        books = self._version.opened()
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block not in books.hash_of:
                books.enter("hash_of", block, block_hash)
                books.enter("blocks_of", block_hash, (*books.blocks_of.get(block_hash, ()), block))
        return self._next()

    def forgotten(self) -> BlockPool:
        """A pool that knows nothing; the free blocks keep their order. Raises `ValueError` while a block is held."""
        if self.num_free < self.num_blocks - 1:
            raise ValueError(
                f"{self!r} can't forget what its blocks hold: {self.num_blocks - 1 - self.num_free} are held"
            )
        books = self._version.opened()
        for block in tuple(books.hash_of):
            books.unhash(block)
        return self._next()

    def _next(self) -> BlockPool:
        """The pool as its books were written."""
        version = self._version.close()
        assert version.books is not None
        return evolve(self, num_free=int(version.books.marks[_FREE]), version=version)

    def _check_held(self, blocks: I32) -> None:
        inside = int(blocks.min()) >= 1 and int(blocks.max()) < self.num_blocks
        if not inside or (np.bincount(blocks) > self._version.opened().ref_counts[: int(blocks.max()) + 1]).any():
            raise ValueError(f"blocks {blocks.tolist()} given back to {self!r}: each must be held as often")


_NO_BLOCKS = frozen_array(np.zeros(0, np.int32))


def _last_of_each(blocks: I32) -> I32:
    """Each block once, in the order of their last places."""
    _, from_behind = np.unique(blocks[::-1], return_index=True)
    return blocks[np.sort(len(blocks) - 1 - from_behind)]
