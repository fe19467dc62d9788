"""Which keys a query sees, key by key, and chunked-local attention as another batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fstep.ops.visibility import chunked_local_batch, visible_keys
from fstep.state import ChunkedLocal, CrossAttention, EncoderOnly, FullAttention, SlidingWindow


def sees(kind, query, key, images):
    match kind:
        case SlidingWindow(window):
            near = query - key < window
        case ChunkedLocal(chunk):
            near = key // chunk >= query // chunk
        case _:
            near = True
    together = any(first <= query < end and key < end for first, end in images)
    return near and (key <= query or together)


@given(
    st.just(FullAttention()) | st.builds(SlidingWindow, st.integers(1, 6)) | st.builds(ChunkedLocal, st.integers(1, 6)),
    st.lists(st.integers(0, 11), max_size=5),
    st.lists(st.integers(0, 12), max_size=4, unique=True),
)
def test_a_query_sees_the_keys_of_its_range_and_no_other(kind, queries, borders):
    borders = sorted(borders)
    images = list(zip(borders[::2], borders[1::2], strict=False))
    ranges = visible_keys(kind, queries, 12, images).tolist()
    for query, (start, stop) in zip(queries, ranges, strict=True):
        assert list(range(start, stop)) == [key for key in range(12) if sees(kind, query, key, images)]


@pytest.mark.parametrize("kind", [EncoderOnly(), CrossAttention(9)])
def test_an_encoder_is_seen_whole(kind):
    assert visible_keys(kind, [0, 2], 4).tolist() == [[0, 4], [0, 4]]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_parts_see_what_chunked_local_attention_sees(some, block_size, blocks_in_chunk):
    """Each query is in one part, and its causal keys there are cells of the keys that it sees."""
    chunk = block_size * blocks_in_chunk
    query_lens, seq_lens = [count for count, _ in some], [count + computed for count, computed in some]
    width = -(-max(seq_lens, default=0) // block_size) or 1
    table = np.arange(1, 1 + len(some) * width, dtype=np.int32).reshape(len(some), width)
    parts = chunked_local_batch(query_lens, seq_lens, chunk, block_size, table)
    assert parts.block_table.shape == (len(parts.requests), blocks_in_chunk)

    def cell(blocks, key):
        return int(blocks[key // block_size]) * block_size + key % block_size

    seen = []
    for part in range(len(parts.requests)):
        length, count = int(parts.seq_lens[part]), int(parts.query_lens[part])
        for query in range(length - count, length):
            cells = [cell(parts.block_table[part], key) for key in range(query + 1)]
            seen.append((int(parts.requests[part]), cells))
    expected = [
        (request, [cell(table[request], key) for key in range(position // chunk * chunk, position + 1)])
        for request, (count, computed) in enumerate(some)
        for position in range(computed, computed + count)
    ]
    assert seen == expected


def test_parts_as_a_peer_has_them():
    table = np.arange(27, dtype=np.int32).reshape(3, 9)
    parts = chunked_local_batch([4, 10, 5], [6, 17, 9], 4, 2, table)
    assert parts.query_lens.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert parts.seq_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert parts.block_table[-3:].tolist() == [[17, 17], [20, 21], [22, 23]]


def test_a_chunk_that_is_not_whole_blocks_is_refused():
    with pytest.raises(ValueError, match="attention chunks of 6 tokens are not whole blocks of 4"):
        chunked_local_batch([1], [1], 6, 4, np.zeros((1, 1), np.int32))
