"""Which keys a query sees, and chunked-local attention as a batch of ordinary requests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen
from numpy.typing import ArrayLike, NDArray

from fstep.ops.groups import skipped_tokens
from fstep.state import (
    I32,
    CrossAttention,
    EncoderOnly,
    KVKind,
    frozen_array,
    ragged_arange,
)


def visible_keys(
    kind: KVKind, query_positions: ArrayLike, seq_len: int, image_ranges: Iterable[tuple[int, int]] = ()
) -> I32:
    """The keys that each query sees, as a half-open range: `[Q, 2]`.

    `seq_len` is the number of keys. A token of an image sees the image to its end (`image_ranges`, half-open, apart
    from one another), as in Gemma 3; text is causal.
    """
    positions = np.asarray(query_positions, np.int64)
    if isinstance(kind, EncoderOnly | CrossAttention):
        starts, stops = np.zeros_like(positions), np.full_like(positions, seq_len)
    else:
        starts, stops = skipped_tokens(kind, positions), positions + 1
        for first, end in image_ranges:
            stops = np.where((positions >= first) & (positions < end), end, stops)
    return frozen_array(np.stack((starts, stops), axis=-1).astype(np.int32))


@frozen(eq=False)
class VirtualBatch:
    """`N` requests, one for each attention chunk that a request's queries lie in."""

    requests: I32  #: [N], the request that each is a part of
    query_lens: I32  #: [N]
    seq_lens: I32  #: [N], keys of the chunk
    block_table: I32  #: [N, ceil(chunk / block_size)]; past its keys a request has a block that is masked by its length


def chunked_local_batch(
    query_lens: ArrayLike, seq_lens: ArrayLike, chunk: int, block_size: int, block_table: NDArray[np.int32]
) -> VirtualBatch:
    """Chunked-local attention of a batch `[B]` as causal attention of another, which any kernel can do.

    Each request is cut at the multiples of `chunk` tokens; a part sees the keys of its own chunk alone. As in vLLM
    (Llama 4). Raises `ValueError` unless a chunk is whole blocks, since a part could begin inside a block otherwise.
    """
    if chunk % block_size:
        raise ValueError(f"attention chunks of {chunk} tokens are not whole blocks of {block_size}")
    ends = np.asarray(seq_lens, np.int64)
    starts = ends - np.asarray(query_lens, np.int64)
    first = starts // chunk
    counts = np.where(ends > starts, -(-ends // chunk) - first, 0)
    of, at = np.repeat(np.arange(len(ends)), counts), ragged_arange(first, counts) * chunk
    stop = np.minimum(at + chunk, ends[of])
    columns = at[:, None] // block_size + np.arange(chunk // block_size)
    columns = np.minimum(columns, block_table.shape[1] - 1)
    return VirtualBatch(
        requests=frozen_array(of.astype(np.int32)),
        query_lens=frozen_array((stop - np.maximum(at, starts[of])).astype(np.int32)),
        seq_lens=frozen_array((stop - at).astype(np.int32)),
        block_table=frozen_array(block_table[of[:, None], columns]),
    )
