"""The keys of the prefix cache, and what is found by them."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fstep.ops import prefix
from fstep.state import BlockPool, CacheKey, Item, KVGroup, NewRequest, Plan, i32

PARENT = bytes.fromhex("9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0")


def test_a_chain_as_other_engines_compute_it():
    """vLLM's test of `hash_block_tokens` with sha256_cbor."""
    first = prefix.block_hash(PARENT, [0, 1, 2])
    assert first.hex() == "de53cd63287368d9f8dccd26856a766f5b9ac89ada1ee1f4be519c879cc7b6e3"
    second = prefix.block_hash(first, [3, 4, 5])
    assert second.hex() == "80b5eceedc1d2a533ed2ccc00db48f88e07c10290d3369f9573c0bd1b0a81a55"
    salted = prefix.block_hash(PARENT, [0, 1, 2], ["hash1"])
    assert salted.hex() == "c06a417cec5ccfee5d5284c312e8d66ddc365b80b57618d2eecd877599cb2afa"


@pytest.mark.parametrize(
    ("number", "encoded"),
    [
        (0, "00"), (23, "17"), (24, "1818"), (255, "18ff"), (256, "190100"), (65535, "19ffff"), (65536, "1a00010000"),
        (2**32 - 1, "1affffffff"), (2**32, "1b0000000100000000"), (-1, "20"), (-25, "3818"),
    ],
)  # fmt: skip
def test_integers_in_cbor(number, encoded):
    """RFC 8949, appendix A, and the borders between the sizes."""
    whole = b"\x83\x58\x20" + PARENT + b"\x80\x81" + bytes.fromhex(encoded)
    assert prefix.block_hash(PARENT, [], [number]) == hashlib.sha256(whole).digest()
    if number >= 0:
        whole = b"\x83\x58\x20" + PARENT + b"\x81" + bytes.fromhex(encoded) + b"\xf6"
        assert prefix.block_hash(PARENT, [number]) == hashlib.sha256(whole).digest()


@pytest.mark.parametrize(
    ("start", "stop", "key", "version", "expected"),
    [
        (0, 4, CacheKey(), 0, ()),
        (0, 4, CacheKey("s", "ad", 2), 7, (("lora", "ad", 2), ("salt", "s"), ("weights", 7))),
        (4, 8, CacheKey("s", "ad"), 0, (("lora", "ad"),)),
        (16, 32, CacheKey(items=(Item("h", 8, 40), Item("g", 32, 1))), 0, (("image", "h", -8),)),
        (0, 4, CacheKey(items=(Item("h", 0, 4), Item("g", 3, 9))), 0, (("image", "h", 0), ("image", "g", 3))),
        (4, 8, CacheKey(items=(Item("h", 0, 4),)), 0, ()),
    ],
)
def test_what_beside_the_ids_tells_blocks_apart(start, stop, key, version, expected):
    assert prefix.extra_keys(start, stop, key, version) == expected


def chain(ids, key=None, version=0, size=2):
    return list(prefix.hashes_of(i32(ids), size, key or CacheKey(), version))


KEYS = st.builds(
    CacheKey,
    salt=st.sampled_from((None, "S", "T")),
    lora_name=st.sampled_from((None, "S", "T")),
    lora_generation=st.integers(0, 1),
    items=st.just(()) | st.just((Item("S", 1, 1),)),
)


@given(st.lists(st.integers(0, 1), min_size=4, max_size=4), KEYS, st.integers(0, 1), st.data())
def test_equal_hashes_mean_equal_prefixes_in_everything(ids, key, version, data):
    other = (
        data.draw(st.lists(st.integers(0, 1), min_size=4, max_size=4)),
        data.draw(KEYS),
        data.draw(st.integers(0, 1)),
    )
    for n, (a, b) in enumerate(zip(chain(ids, key, version), chain(*other), strict=True)):
        unnamed = [each if each.lora_name else CacheKey(each.salt, items=each.items) for each in (key, other[1])]
        assert (a == b) == ((ids[: 2 * n + 2], unnamed[0], version) == (other[0][: 2 * n + 2], unnamed[1], other[2]))
    later = list(prefix.hashes_of(i32(ids), 2, key, version, 1, chain(ids, key, version)[0]))
    assert later == chain(ids, key, version)[1:]


@pytest.mark.parametrize(
    ("cached", "ids", "size", "hit"),
    [
        (range(8), range(8), 4, 4),  # the last token is computed, so a block is
        (range(8), range(9), 4, 8),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 9, 8], 4, 4),
        (range(8), [0], 1, 0),
        (range(3), range(3), 4, 0),
        ([1, 2, 3, 4], [9, 2, 3, 4, 5], 2, 0),
    ],
)
def test_how_much_is_found(cached, ids, size, hit):
    group = KVGroup(20, size)
    blocks, pool = BlockPool.full(20).take(len(list(cached)) // size)
    pool = pool.cache(blocks.tolist(), chain(cached, size=size))
    assert prefix.hit_length([pool], [group], [chain(ids, size=size)], len(list(ids))) == hit


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 12))
def test_a_hit_is_whole_blocks_of_every_group(first, second, size, other, num_tokens):
    ids, groups = range(num_tokens), (KVGroup(20, size), KVGroup(20, other))
    hashes = [chain(ids, size=group.block_size) for group in groups]
    counts = [min(first, len(hashes[0])), min(second, len(hashes[1]))]
    pools = []
    for count, each in zip(counts, hashes, strict=True):
        blocks, pool = BlockPool.full(20).take(count)
        pools.append(pool.cache(blocks.tolist(), each[:count]))
    fitting = [
        n for n in range(num_tokens) if n % size == n % other == 0 and n <= min(counts[0] * size, counts[1] * other)
    ]
    assert prefix.hit_length(pools, groups, hashes, num_tokens) == max(fitting)


def test_a_request_carries_its_hashes_until_the_weights_change():
    plan = Plan(9, 16, (KVGroup(9, 2), KVGroup(9, 3)))
    request = NewRequest("a", [1, 2, 3, 4, 5], block_hashes=((b"x",), ()))
    assert prefix.hashed(request, plan, 3) == ((b"x",), ())
    bare = NewRequest("a", [1, 2, 3, 4, 5])
    assert prefix.hashed(bare, plan, 3) == (
        tuple(chain([1, 2, 3, 4], version=3)),
        tuple(chain([1, 2, 3], version=3, size=3)),
    )
    assert prefix.hashed(bare, Plan(9, 16, plan.groups, prefix_caching=False), 3) == ((), ())
