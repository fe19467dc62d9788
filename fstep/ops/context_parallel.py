"""Context parallelism: whose tokens are whose.

For decode (DCP) the keys and values of one request are dealt to the ranks: token `p` lies on rank
`p // interleave % world`. For prefill (PCP) the queries are: a prompt is cut into twice as many parts as there are
ranks, and each takes one from the front and one from the back, so that all have as much causal attention to do.
Both as in vLLM.
"""

from __future__ import annotations

import numpy as np
from attrs import field, frozen
from numpy.typing import ArrayLike, NDArray

from fstep.state import I32, ConfigError, frozen_array


@frozen
class ContextRank:
    """One of the ranks that share the tokens of each request. Raises `ConfigError` for a rank that there isn't."""

    rank: int = 0
    world: int = 1
    interleave: int = field(default=1)  #: tokens in a row that one rank keeps

    def __attrs_post_init__(self) -> None:
        for name in ("world", "interleave"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if not 0 <= self.rank < self.world:
            raise ConfigError("rank", self.rank, f"must lie in 0 to {self.world - 1}")


ALONE = ContextRank()


def slot_mapping(
    block_table: ArrayLike,
    rows: ArrayLike,
    query_start_loc: ArrayLike,
    positions: ArrayLike,
    block_size: int,
    num_tokens_padded: int,
    context: ContextRank = ALONE,
) -> I32:
    """Where each token's KV goes, block * block_size + offset: `[num_tokens_padded]`.

    Request `b` has row `rows[b]` of `block_table` `[R, W]`, or -1 if it is a dummy. A block of the table holds
    `block_size` tokens on each rank. -1 is a token of another rank, of a dummy, or of the padding. Raises
    `ValueError` if a block isn't whole runs of `context.interleave` tokens.
    """
    if context.world > 1 and block_size % context.interleave:
        raise ValueError(f"blocks of {block_size} tokens are not whole runs of {context.interleave}")
    owners = np.repeat(np.asarray(rows, np.int64), np.diff(np.asarray(query_start_loc)))
    at = np.asarray(positions, np.int64)
    index, inside = np.divmod(at, block_size * context.world)
    ours = (at // context.interleave % context.world == context.rank) & (owners >= 0)
    slots = np.full(num_tokens_padded, -1, np.int32)
    blocks = np.asarray(block_table)[owners[ours], index[ours]]
    slots[np.nonzero(ours)[0]] = blocks * block_size + _local(inside[ours], context)
    return frozen_array(slots)


def _local(positions: NDArray[np.int64], context: ContextRank) -> NDArray[np.int64]:
    """The place of each token among those of its rank."""
    turn, offset = np.divmod(positions, context.interleave)
    return turn // context.world * context.interleave + offset


def local_seq_lens(seq_lens: ArrayLike, world: int, interleave: int = 1) -> I32:
    """How many tokens of each request each rank keeps: `[B, world]`."""
    lengths = np.asarray(seq_lens, np.int64)[:, None]
    rounds, rest = np.divmod(lengths, world * interleave)
    own = np.clip(rest - np.arange(world) * interleave, 0, interleave)
    return frozen_array((rounds * interleave + own).astype(np.int32))


def head_tail_split(num_tokens: int, world: int) -> tuple[tuple[tuple[int, int] | None, tuple[int, int] | None], ...]:
    """The head and the tail of a prompt that each rank computes, as half-open ranges; None if there is nothing left."""
    size = -(-num_tokens // (2 * world))
    parts = [_part(index * size, min((index + 1) * size, num_tokens)) for index in range(2 * world)]
    return tuple((parts[rank], parts[2 * world - 1 - rank]) for rank in range(world))


def _part(start: int, stop: int) -> tuple[int, int] | None:
    return (start, stop) if start < stop else None
