"""The block pool against lists and dictionaries, each version of it looked at again later."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fstep.state import BlockPool, i32


class Naive:
    """The rules written out, in copies."""

    def __init__(self, num_blocks, caching):
        self.free = list(range(1, num_blocks))
        self.ref_counts = [0] * num_blocks
        self.hashes = {}
        self.caching = caching

    def copy(self):
        made = Naive(0, self.caching)
        made.free, made.ref_counts, made.hashes = list(self.free), list(self.ref_counts), dict(self.hashes)
        return made

    def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.ref_counts[block] = 1
            self.hashes.pop(block, None)
        return taken

    def share(self, blocks):
        for block in blocks:
            self.ref_counts[block] += 1
            if block in self.free:
                self.free.remove(block)

    def give(self, blocks, forget=False):
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if forget:
                    self.hashes.pop(block, None)
                known = block in self.hashes or not self.caching
                self.free.insert(len(self.free) if known else 0, block)


def same(pool, naive):
    assert pool.free.tolist() == naive.free
    assert pool.num_free == len(naive.free)
    assert pool.ref_counts.tolist() == naive.ref_counts
    assert pool.hashes == naive.hashes
    for block, block_hash in naive.hashes.items():
        assert naive.hashes[pool.find(block_hash)] == block_hash
        assert pool.hash_of(block) == block_hash


@settings(max_examples=150)
@given(st.integers(1, 9), st.booleans(), st.data())
def test_every_version_stays_what_it_was(num_blocks, caching, data):
    versions = [(BlockPool.full(num_blocks, caching), Naive(num_blocks, caching), ())]
    for _ in range(data.draw(st.integers(0, 40))):
        pool, naive, held = versions[data.draw(st.sampled_from((-1, -1, -1, -1)) | st.integers(-len(versions), -1))]
        naive = naive.copy()
        verb = data.draw(st.sampled_from(("take", "give", "give two", "share", "cache", "forget")))
        if verb == "take":
            count = data.draw(st.integers(0, pool.num_free))
            taken, pool = pool.take(count)
            assert taken.tolist() == naive.take(count)
            held += (taken.tolist(),)
        elif verb == "share" and naive.hashes:
            known = data.draw(st.lists(st.sampled_from(sorted(naive.hashes)), unique=True))
            pool = pool.share(known)
            naive.share(known)
            held += (known,)
        elif verb == "cache" and caching and held:
            blocks = data.draw(st.sampled_from(held))
            hashes = [bytes([data.draw(st.integers(0, 3))]) for _ in blocks]
            pool = pool.cache(blocks, hashes)
            naive.hashes = {**dict(zip(blocks, hashes, strict=True)), **naive.hashes}
        elif verb.startswith("give") and len(held) > (verb == "give two"):
            gone = [held[n] for n in range(2 if verb == "give two" else 1)]
            forget = data.draw(st.booleans())
            pool = pool.give(*map(i32, gone), forget=forget)
            for blocks in gone:
                naive.give(blocks, forget)
            held = held[len(gone) :]
        elif verb == "forget":
            if any(naive.ref_counts):
                with pytest.raises(ValueError, match="are held"):
                    pool.forgotten()
                continue
            pool = pool.forgotten()
            naive.hashes = {}
        versions.append((pool, naive, held))
    for pool, naive, _ in data.draw(st.permutations(versions)):
        same(pool, naive)


def test_an_old_version_goes_on_by_itself():
    first = BlockPool.full(6)
    taken, second = first.take(3)
    again, other = first.take(2)
    assert (taken.tolist(), again.tolist()) == ([1, 2, 3], [1, 2])
    assert (second.free.tolist(), other.free.tolist(), first.free.tolist()) == ([4, 5], [3, 4, 5], [1, 2, 3, 4, 5])


def test_nothing_is_kept_of_versions_that_nobody_holds():
    pool = BlockPool.full(100)
    for _ in range(300):
        taken, pool = pool.take(50)
        pool = pool.cache(taken.tolist()[:9], [bytes([n]) for n in range(9)]).give(taken)
    books = pool._version.opened()
    assert books.undo == []
    assert len(books.queue) == 300
    assert len(books.blocks_of) == 9


def test_a_deferred_pool_knows_a_block_from_the_next_step_on():
    taken, pool = BlockPool.full(4, deferred=True).take(2)
    pool = pool.cache(taken.tolist(), [b"a", b"b"])
    assert pool.find(b"a") is None
    assert pool.settled().find(b"a") == 1
    assert pool.settled().settled().find(b"b") == 2


@pytest.mark.parametrize("blocks", [[1, 1], [0], [9], [3], [1, 2, 3]])
def test_what_isnt_held_cant_be_given_back(blocks):
    taken, pool = BlockPool.full(9).take(2)
    with pytest.raises(ValueError, match="each must be held as often"):
        pool.give(i32(blocks))
    assert pool.give(taken).num_free == 8


def test_more_than_is_free_cant_be_taken():
    with pytest.raises(ValueError, match=r"9 blocks asked of BlockPool\(8 of 8 free, 0 cached\)"):
        BlockPool.full(9).take(9)


def test_arrays_that_come_out_are_read_only():
    taken, pool = BlockPool.full(5).take(2)
    for array in (taken, pool.free, pool.ref_counts, pool.ref_counts_of([1])):
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(array)[0] = 9
