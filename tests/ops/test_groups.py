"""Planning of KV groups, against loops over single tokens and against the values of peers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fstep.ops import groups
from fstep.state import (
    ChunkedLocal,
    ConfigError,
    CrossAttention,
    EncoderOnly,
    FullAttention,
    KVGroup,
    SlidingWindow,
    StateSpace,
)

SIZES = st.integers(1, 5)
PAGED = (
    st.just(FullAttention()) | st.builds(SlidingWindow, st.integers(1, 9)) | st.builds(ChunkedLocal, st.integers(1, 9))
)
PREFIXES = PAGED | st.just(StateSpace()) | st.just(EncoderOnly())
KINDS = PREFIXES | st.builds(CrossAttention, st.integers(1, 9))
CACHED = st.lists(st.booleans(), max_size=9)


def needs(kind, position, earlier):
    """Whether the token at `position` reads what was kept of an earlier one: the definition of each kind."""
    match kind:
        case FullAttention():
            return True
        case SlidingWindow(window):
            return position - earlier < window
        case ChunkedLocal(chunk):
            return position // chunk == earlier // chunk
        case StateSpace():
            return earlier == position - 1
        case EncoderOnly():
            return False


def live_blocks(kind, block_size, position):
    """The blocks of the tokens before `position` of which it needs one."""
    return sorted({earlier // block_size for earlier in range(position) if needs(kind, position, earlier)})


@given(PREFIXES, SIZES, st.integers(0, 30))
def test_skipped_are_the_tokens_before_the_first_that_is_needed(kind, block_size, computed):
    first = next((earlier for earlier in range(computed) if needs(kind, computed, earlier)), computed)
    assert groups.skipped_tokens(kind, computed) == first
    assert groups.skipped_blocks(kind, block_size, [computed]).tolist() == [first // block_size]


@given(PAGED, SIZES, st.integers(0, 30), st.integers(1, 8))
def test_a_step_needs_the_blocks_of_its_tokens_and_of_those_that_its_first_one_sees(kind, block_size, computed, count):
    held = {token // block_size for token in range(computed, computed + count)}
    held |= set(live_blocks(kind, block_size, computed))
    assert groups.blocks_needed(kind, block_size, computed + count, computed) == len(held)


@given(PAGED, SIZES, st.integers(1, 40), st.integers(1, 8))
def test_no_step_needs_more_than_the_most_and_full_attention_as_much(kind, block_size, longest, batch):
    most = groups.max_blocks_per_request(kind, block_size, longest, batch)
    needed = [
        groups.blocks_needed(kind, block_size, min(computed + batch, longest), computed) for computed in range(longest)
    ]
    assert max(needed) <= most <= -(-longest // block_size)
    if isinstance(kind, FullAttention):
        assert max(needed) == most


def test_blocks_of_kinds_that_do_not_grow_with_the_request():
    assert groups.blocks_needed(EncoderOnly(), 4, 30) == 0
    assert groups.blocks_needed(CrossAttention(9), 4, 1) == 3
    assert [groups.blocks_needed(StateSpace(), 4, n) for n in (0, 1, 30)] == [0, 1, 1]
    assert [
        groups.max_blocks_per_request(kind, 4, 30) for kind in (EncoderOnly(), CrossAttention(9), StateSpace())
    ] == [
        0,
        3,
        1,
    ]


@given(PREFIXES, SIZES, CACHED)
def test_a_hit_has_all_that_the_next_token_needs(kind, block_size, cached):
    naive = [
        all(cached[block] for block in live_blocks(kind, block_size, ends * block_size))
        for ends in range(len(cached) + 1)
    ]
    assert groups.servable(kind, block_size, cached).tolist() == naive
    hit = groups.longest_hit(kind, block_size, cached)
    assert hit == max(ends for ends, good in enumerate(naive) if good)
    assert list(groups.used_blocks(kind, block_size, hit)) == live_blocks(kind, block_size, hit * block_size)


@given(
    st.data(), st.lists(st.tuples(PREFIXES, st.sampled_from((1, 2, 3, 4))), min_size=1, max_size=3), st.integers(1, 30)
)
def test_a_hybrid_hit_is_one_of_every_group(data, some, num_tokens):
    flags = [st.lists(st.booleans(), min_size=num_tokens // size, max_size=num_tokens // size) for _, size in some]
    cached = [data.draw(each) for each in flags]

    def serves(length):
        return all(
            length % size == 0 and all(there[block] for block in live_blocks(kind, size, length))
            for (kind, size), there in zip(some, cached, strict=True)
        )

    lengths = [length for length in range(num_tokens) if serves(length)]
    assert groups.hybrid_hit(some, cached, num_tokens) == max(lengths)
    unit = np.lcm.reduce([size for _, size in some])
    kept = [length - unit for length in lengths if length - unit in lengths]
    assert groups.hybrid_hit(some, cached, num_tokens, drop_last_block=True) == max(kept, default=0)


def test_hits_as_a_peer_has_them():
    window, chunk = SlidingWindow(4), ChunkedLocal(4)
    assert groups.longest_hit(window, 2, [1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1]) == 8
    assert list(groups.used_blocks(window, 2, 8)) == [6, 7]
    assert groups.longest_hit(chunk, 2, [0, 0, 0, 0, 0, 0, 0, 0, 1]) == 9
    assert list(groups.used_blocks(chunk, 2, 9)) == [8]
    eagle = [(FullAttention(), 4), (SlidingWindow(12), 4)]
    assert groups.hybrid_hit(eagle, [[1, 1, 1, 1, 1, 0], [1] * 6], 27, drop_last_block=True) == 16
    apart = [(FullAttention(), 4), (SlidingWindow(8), 4)]
    assert groups.hybrid_hit(apart, [[1, 1, 0], [0, 1, 1]], 15) == 0


def test_cross_attention_is_never_hit_by_tokens():
    assert groups.longest_hit(CrossAttention(4), 2, [1, 1]) == 0
    assert groups.hybrid_hit([(FullAttention(), 2), (CrossAttention(4), 2)], [[1, 1], [1, 1]], 9) == 0


@given(st.lists(KINDS, max_size=14))
def test_each_layer_is_in_one_group_of_its_kind_and_groups_are_even(layers):
    made = groups.group_layers(layers)
    assert sorted(layer for _, each in made for layer in each) == list(range(len(layers)))
    assert all(layers[layer] == kind for kind, each in made for layer in each)
    counts = {kind: layers.count(kind) for kind in layers}
    if not layers:
        return
    least, most = min(counts.values()), max(counts.values())
    size = most if most < 1.5 * least else least
    assert max(len(each) for _, each in made) <= size
    for kind, count in counts.items():
        lengths = [len(each) for other, each in made if other == kind]
        assert len(lengths) == -(-count // size)
        assert max(lengths) - min(lengths) <= 1


def test_groups_as_a_peer_has_them():
    full, window = FullAttention(), SlidingWindow(8)
    one_to_two = groups.group_layers([full, window, window, full, window, window])
    assert one_to_two == ((full, (0, 3)), (window, (1, 4)), (window, (2, 5)))
    assert groups.group_layers([full, full, full, window, window]) == (
        (full, (0, 2)),
        (full, (1,)),
        (window, (3, 4)),
    )


@given(st.lists(st.builds(groups.Page, SIZES, st.integers(1, 12)), max_size=5))
def test_pages_become_equal_and_no_block_shorter(pages):
    unified = groups.unify_pages(pages)
    largest = max((page.size_bytes for page in pages), default=0)
    for before, after in zip(pages, unified, strict=True):
        assert after.size_bytes == largest
        fits = largest % before.size_bytes == 0
        # where blocks were made longer, the bytes of a token stay as they were
        per_token = before.size_bytes * after.block_size == after.size_bytes * before.block_size
        assert per_token if fits else after.block_size == before.block_size


def test_page_plans_as_a_peer_has_them():
    assert groups.page_size_bytes(16, 32, 128, "float16") == 262144
    assert groups.page_size_bytes(32, 8, 128, "fp8") == 65536
    assert groups.num_blocks_in(8 << 30, 262144, 32) == 1024
    assert groups.num_blocks_in(100, 8192, 2) == 0
    assert groups.max_blocks_per_request(SlidingWindow(1024), 16, 16384, 1024) == 129
    assert groups.max_blocks_per_request(SlidingWindow(6), 4, 100, 4) == 4
    assert groups.unify_pages([groups.Page(16, 65536), groups.Page(16, 8192), groups.Page(16, 32768)]) == (
        groups.Page(16, 65536),
        groups.Page(128, 65536),
        groups.Page(32, 65536),
    )


@given(st.lists(st.lists(st.integers(1, 3), max_size=6), max_size=4))
def test_the_common_prefix_is_what_all_tables_begin_with(tables):
    naive = 0
    while tables and all(len(table) > naive for table in tables) and len({table[naive] for table in tables}) == 1:
        naive += 1
    assert groups.common_prefix_blocks(tables) == naive


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=4))
def test_a_token_has_the_same_slot_in_kernel_blocks(times, kernel, tables):
    table = np.array(tables, np.int32).reshape(-1, 3)
    block_size = times * kernel
    parts = groups.kernel_blocks(table, block_size, kernel)
    assert parts.shape == (len(table), 3 * times)
    for row in range(len(table)):
        for position in range(3 * block_size):
            slot = table[row, position // block_size] * block_size + position % block_size
            assert slot == parts[row, position // kernel] * kernel + position % kernel


def test_the_longest_kernel_block_that_divides():
    assert groups.kernel_block_size(48, (64, 16, 8)) == 16
    with pytest.raises(ValueError, match=r"none of the kernel's block sizes \[16, 64\] divides the cache's, 24"):
        groups.kernel_block_size(24, (64, 16))


@pytest.mark.parametrize("kind", [SlidingWindow, ChunkedLocal, CrossAttention])
def test_a_kind_of_no_tokens_is_refused(kind):
    with pytest.raises(ConfigError, match="=0: must be at least 1"):
        kind(0)


def test_a_group_is_of_full_attention_unless_it_says_otherwise():
    assert KVGroup(4, 2).kind == FullAttention()
    assert len({KVGroup(4, 2), KVGroup(4, 2, kind=SlidingWindow(3))}) == 2
