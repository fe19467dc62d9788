"""Planning of KV groups: which layers share blocks, how large these are, how many a request needs and may reuse.

Everything follows from one number a kind: how many tokens at the front of a request the next token can't see any
more (`skipped_tokens`). Blocks that hold no others are free, and a prefix hit needs no others than those behind them.
The division of layers into groups and the equal pages are vLLM's (its hybrid KV cache manager).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import ArrayLike, NDArray

from fstep.state import (
    DTYPE_BYTES,
    I32,
    Bool,
    ChunkedLocal,
    CrossAttention,
    EncoderOnly,
    FullAttention,
    KVKind,
    SlidingWindow,
    StateSpace,
    frozen_array,
)


def skipped_tokens(kind: KVKind, num_computed_tokens: ArrayLike) -> NDArray[np.int64]:
    """How many leading tokens the next one, at position `num_computed_tokens`, does not need: int64, the same shape.

    A state stands for all tokens before it, so it needs the last one alone.
    """
    computed = np.asarray(num_computed_tokens, np.int64)
    match kind:
        case SlidingWindow(window):
            return np.maximum(computed - window + 1, 0)
        case ChunkedLocal(chunk):
            return computed // chunk * chunk
        case StateSpace():
            return np.maximum(computed - 1, 0)
        case EncoderOnly():
            return computed.copy()
        case FullAttention() | CrossAttention():
            return np.zeros_like(computed)


def skipped_blocks(kind: KVKind, block_size: int, num_computed_tokens: ArrayLike) -> NDArray[np.int64]:
    """How many leading blocks hold only tokens that are not needed: int64, the shape of `num_computed_tokens`."""
    return skipped_tokens(kind, num_computed_tokens) // block_size


def blocks_needed(kind: KVKind, block_size: int, num_tokens: int, num_computed_tokens: int = 0) -> int:
    """Blocks that a request holds for a step that takes it from `num_computed_tokens` to `num_tokens` tokens.

    The blocks that the step's first token doesn't need are given back. A state has one slot, whatever it stands for; an
    encoder alone keeps nothing.
    """
    match kind:
        case EncoderOnly():
            return 0
        case CrossAttention(max_encoder_len):
            return -(-max_encoder_len // block_size)
        case StateSpace():
            return min(num_tokens, 1)
        case _:
            return -(-num_tokens // block_size) - int(skipped_blocks(kind, block_size, num_computed_tokens))


def max_blocks_per_request(kind: KVKind, block_size: int, max_model_len: int, max_num_batched_tokens: int = 0) -> int:
    """The most blocks that one request can hold at a time, with at most `max_num_batched_tokens` tokens a step."""
    whole = blocks_needed(kind, block_size, max_model_len)
    match kind:
        case SlidingWindow(window):
            return min(whole, -(-(window - 1 + max_num_batched_tokens) // block_size) + 1)
        case ChunkedLocal(chunk):
            cut = 1 if chunk % block_size else 0  # a chunk may begin inside a block
            return min(whole, -(-(chunk - 1 + max_num_batched_tokens) // block_size) + cut)
        case _:
            return whole


def page_size_bytes(block_size: int, num_kv_heads: int, head_size: int, dtype: str) -> int:
    """Bytes of a page, which is one block of one layer: K and V. Raises `KeyError` for an unknown dtype."""
    return 2 * block_size * num_kv_heads * head_size * DTYPE_BYTES[dtype]


def num_blocks_in(available_bytes: int, page_size_bytes: int, num_layers: int) -> int:
    """How many blocks, a page in each of `num_layers` layers, fit into `available_bytes`."""
    return available_bytes // (page_size_bytes * num_layers)


@frozen
class Page:
    """The block of a layer, in tokens, and the bytes that it takes, which may be more than its keys and values."""

    block_size: int
    size_bytes: int


def unify_pages(pages: Sequence[Page]) -> tuple[Page, ...]:
    """The pages of some layers, all as large as the largest, so that all layers draw on one pool.

    A smaller page gets a longer block if it divides the largest; otherwise it is padded.
    """
    largest = max((page.size_bytes for page in pages), default=0)
    return tuple(_unified(page, largest) for page in pages)


def _unified(page: Page, largest: int) -> Page:
    times, rest = divmod(largest, page.size_bytes)
    return Page(page.block_size if rest else page.block_size * times, largest)


def group_layers(layers: Sequence[KVKind]) -> tuple[tuple[KVKind, tuple[int, ...]], ...]:
    """The layers in KV groups of one kind each, all with about as many layers: the kind and the layers of each group.

    A group has as many layers as the rarest kind, or as the most frequent one if that has less than 1.5 times as many.
    A kind that has more is dealt to several groups in turn.
    """
    by_kind: dict[KVKind, list[int]] = {}
    for layer, kind in enumerate(layers):
        by_kind.setdefault(kind, []).append(layer)
    sizes = [len(each) for each in by_kind.values()]
    least, most = min(sizes, default=0), max(sizes, default=0)
    size = most if 2 * most < 3 * least else least
    return tuple(
        (kind, tuple(each[first :: -(-len(each) // size)]))
        for kind, each in by_kind.items()
        for first in range(-(-len(each) // size))
    )


def servable(kind: KVKind, block_size: int, cached: ArrayLike) -> Bool:
    """Whether a request could go on after its first `n` blocks, for `n` from 0 to `N`: `[N + 1]`.

    `cached` `[N]` says which of its blocks are in the cache. Those that the next token doesn't need need not be. The
    keys of cross attention belong to the encoder's input, so no tokens stand for them: only 0 is servable.
    """
    there = np.asarray(cached, np.bool_)
    ends = np.arange(len(there) + 1)
    if isinstance(kind, CrossAttention):
        return frozen_array(ends == 0)
    before = np.concatenate(([0], np.cumsum(there)))
    first = skipped_blocks(kind, block_size, ends * block_size)
    return frozen_array(before[ends] - before[first] == ends - first)


def longest_hit(kind: KVKind, block_size: int, cached: ArrayLike) -> int:
    """The most leading blocks after which a request can go on."""
    return int(np.nonzero(servable(kind, block_size, cached))[0][-1])


def used_blocks(kind: KVKind, block_size: int, hit_blocks: int) -> range:
    """The blocks of a hit that the next token needs; the table has the null block in place of those before them."""
    return range(int(skipped_blocks(kind, block_size, hit_blocks * block_size)), hit_blocks)


def hybrid_hit(
    groups: Sequence[tuple[KVKind, int]], cached: Sequence[ArrayLike], num_tokens: int, drop_last_block: bool = False
) -> int:
    """The most leading tokens of a request after which every group can go on; the last of `num_tokens` is none of them.

    `groups` are kinds and block sizes, `cached` says for each which of the request's blocks are in the cache. The hit
    is whole blocks of every group. With `drop_last_block` the last of these is computed again, for a drafter that
    wants its hidden states.
    """
    unit = math.lcm(*(block_size for _, block_size in groups))
    good = np.ones(max(num_tokens - 1, 0) // unit + 1, np.bool_)
    for (kind, block_size), each in zip(groups, cached, strict=True):
        fits = servable(kind, block_size, each)[:: unit // block_size][: len(good)]
        good = good[: len(fits)] & fits
    if drop_last_block:
        good = good[1:] & good[:-1]
    ends = np.nonzero(good)[0]
    return int(ends[-1]) * unit if len(ends) else 0


def common_prefix_blocks(block_tables: Iterable[ArrayLike]) -> int:
    """How many leading blocks all requests of a step share: what cascade attention computes once for all."""
    tables = [np.asarray(table) for table in block_tables]
    shortest = min((len(table) for table in tables), default=0)
    if shortest == 0:
        return 0
    return shared_columns(np.stack([table[:shortest] for table in tables]))


def shared_columns(block_table: NDArray[Any]) -> int:
    """How many leading columns of a table `[B, W]`, B at least 1, hold one value each."""
    return int(np.append((block_table == block_table[0]).all(axis=0), False).argmin())


def kernel_block_size(block_size: int, supported: Iterable[int]) -> int:
    """The longest block that a kernel supports and that divides the cache's. Raises `ValueError` if there is none."""
    sizes = sorted(supported)
    fitting = [size for size in sizes if block_size % size == 0]
    if not fitting:
        raise ValueError(f"none of the kernel's block sizes {sizes} divides the cache's, {block_size}")
    return fitting[-1]


def kernel_blocks(block_table: NDArray[Any], block_size: int, kernel_block_size: int) -> I32:
    """A block table in the kernel's shorter blocks: `[B, W * (block_size // kernel_block_size)]`.

    Block `b` is the blocks `b * times` to `(b + 1) * times - 1`, so slots stay as they are.
    """
    times = block_size // kernel_block_size
    parts = block_table[:, :, None] * np.int32(times) + np.arange(times, dtype=np.int32)
    return frozen_array(parts.reshape(len(block_table), block_table.shape[1] * times))
