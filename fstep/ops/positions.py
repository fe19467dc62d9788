"""Positions that are more than a token's index, and where a token's embedding comes from when it isn't its id.

M-RoPE (Qwen2-VL, arXiv:2409.12191) gives a token of an image three positions: frame, row, column. XD-RoPE
(HunYuan-VL) keeps the index beside them. Both are worked out once, for a prompt; tokens behind it have their index plus
a number that stays the same, the delta.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import ArrayLike, NDArray

from fstep.state import I32, Ragged, frozen_array, ragged_arange


@frozen
class Grid:
    """An image or a video in a prompt: `grid_thw` frames, rows and columns of patches."""

    offset: int  #: of its first token in the prompt
    grid_thw: tuple[int, int, int]
    t_factor: float = 1.0  #: positions from one frame to the next

    def merged(self, merge: int) -> tuple[int, int, int]:
        """Frames, and rows and columns of tokens: a token stands for `merge` by `merge` patches."""
        frames, rows, columns = self.grid_thw
        return frames, rows // merge, columns // merge


@frozen(eq=False)
class RopePositions:
    """The positions of a prompt of `P` tokens on `A` axes."""

    prompt: I32  #: [A, P]
    delta: int = 0  #: position of a later token, less its index

    def chunk(self, start: int, count: int) -> I32:
        """The positions of tokens `start` to `start + count - 1` of the request: `[A, count]`."""
        inside = self.prompt[:, start : start + count]
        later = np.arange(max(start, self.prompt.shape[1]), start + count, dtype=np.int32) + np.int32(self.delta)
        return frozen_array(np.concatenate((inside, np.broadcast_to(later, (len(self.prompt), len(later)))), axis=1))


def mrope_positions(num_tokens: int, items: Sequence[Grid], spatial_merge_size: int) -> RopePositions:
    """M-RoPE of a prompt: the axes are frame, row and column, which are all the same for text.

    Text goes on from the largest position before it, plus 1; so does an item, on each axis. Raises `ValueError` for
    items that are out of order, overlap, or reach past the prompt.
    """
    prompt = np.empty((3, num_tokens), np.int32)
    at = base = 0
    for item in items:
        shape = item.merged(spatial_merge_size)
        end = _end_of(item.offset, int(np.prod(shape)), at, num_tokens)
        prompt[:, at : item.offset] = base + np.arange(item.offset - at)
        base += item.offset - at
        frames, rows, columns = np.indices(shape).reshape(3, -1)
        prompt[:, item.offset : end] = base + np.stack((np.floor(frames * item.t_factor), rows, columns))
        base = int(prompt[:, item.offset : end].max(initial=base - 1)) + 1
        at = end
    prompt[:, at:] = base + np.arange(num_tokens - at)
    return RopePositions(frozen_array(prompt), base - at)


def xdrope_positions(
    num_tokens: int, items: Sequence[Grid], spatial_merge_size: int, num_axes: int = 4
) -> RopePositions:
    """XD-RoPE of a prompt: the last three axes are column, row and the number of the image, those before the index.

    A row of an image has one token more than columns, which ends it. Text has its index on all axes. Raises
    `ValueError` for fewer than three axes, and for items that are out of order, overlap, or reach past the prompt.
    """
    if num_axes < 3:
        raise ValueError(f"XD-RoPE of {num_axes} axes: it has at least 3")
    prompt = np.tile(np.arange(num_tokens, dtype=np.int32), (num_axes, 1))
    at = 0
    for number, item in enumerate(items):
        _, height, width = item.merged(spatial_merge_size)
        rows, columns = np.indices((height, width + 1)).reshape(2, -1)
        at = _end_of(item.offset, len(rows), at, num_tokens)
        prompt[-3:, item.offset : at] = np.stack((columns, rows, np.full_like(rows, number)))
    return RopePositions(frozen_array(prompt))


def _end_of(offset: int, length: int, least: int, most: int) -> int:
    """Where an item of a prompt ends."""
    if not least <= offset <= offset + length <= most:
        raise ValueError(f"an item of {length} tokens at {offset} does not lie in tokens {least} to {most - 1}")
    return offset + length


@frozen
class Clip:
    """The part of an item that a chunk covers, as half-open ranges."""

    feature_range: tuple[int, int]  #: of the item's features
    token_range: tuple[int, int]  #: of the scheduled tokens, where they go


def clip_items(
    num_computed_tokens: int, num_scheduled_tokens: int, items: Sequence[tuple[int, int]]
) -> tuple[Clip | None, ...]:
    """What of each item, of an offset in the prompt and a length, lies in the scheduled tokens; None for nothing."""
    return tuple(_clip(num_computed_tokens, num_scheduled_tokens, *item) for item in items)


def _clip(computed: int, count: int, offset: int, length: int) -> Clip | None:
    start, stop = max(computed, offset), min(computed + count, offset + length)
    if start >= stop:
        return None
    return Clip((start - offset, stop - offset), (start - computed, stop - computed))


def embedding_rows(
    prompt_rows: Ragged, first_rows: ArrayLike, num_computed_tokens: ArrayLike, num_scheduled_tokens: ArrayLike
) -> I32:
    """Where each scheduled token of a batch takes its embedding from: `[T]`, a row of the batch's table, or -1: its id.

    `prompt_rows` has for each of `B` requests the row of its own embeddings that each prompt token takes, or -1 for
    one that has an id; it is empty for a request without embeddings, and a token past its end has an id. A request's
    embeddings begin at row `first_rows[b]` of the table.
    """
    counts = np.asarray(num_scheduled_tokens)
    of = np.repeat(np.arange(len(counts)), counts)
    at = ragged_arange(np.asarray(num_computed_tokens), counts)
    rows = np.full(len(of), -1, np.int32)
    known = np.nonzero(at < prompt_rows.counts[of])[0]
    own = _values(prompt_rows, of[known], at[known])
    rows[known] = np.where(own < 0, -1, own + np.asarray(first_rows, np.int32)[of[known]])
    return frozen_array(rows)


def _values(lists: Ragged, of: NDArray[np.intp], at: NDArray[np.intp]) -> I32:
    """Item `at[i]` of list `of[i]`, for all i."""
    return lists.values[lists.offsets[of] + at]
