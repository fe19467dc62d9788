"""Positions on several axes, clipped items and mixed embeddings, against loops and against the values of peers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fstep.ops.positions import Clip, Grid, clip_items, embedding_rows, mrope_positions, xdrope_positions
from fstep.state import Ragged

FACTORS = st.sampled_from((1.0, 2.0, 0.5, 1.5))


@st.composite
def prompts(draw, length_of):
    """Items with text between them: the merge size, the items and the length of the prompt."""
    merge = draw(st.integers(1, 2))
    items, at = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 3))):
        shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)))
        items.append(Grid(at, (shape[0], shape[1] * merge, shape[2] * merge), draw(FACTORS)))
        at += length_of(*shape) + draw(st.integers(0, 3))
    return merge, items, at + draw(st.integers(0, 2))


@given(prompts(lambda frames, rows, columns: frames * rows * columns))
def test_mrope_token_by_token(prompt):
    merge, items, num_tokens = prompt
    starts = {item.offset: item for item in items}
    naive = []
    while len(naive) < num_tokens:
        base = max((max(each) for each in naive), default=-1) + 1
        item = starts.get(len(naive))
        if item is None:
            naive.append((base, base, base))
            continue
        frames, rows, columns = item.merged(merge)
        for frame in range(frames):
            for row in range(rows):
                naive += [(base + int(frame * item.t_factor), base + row, base + column) for column in range(columns)]
    made = mrope_positions(num_tokens, items, merge)
    assert made.prompt.T.tolist() == [list(each) for each in naive]
    assert made.delta + num_tokens == max((max(each) for each in naive), default=-1) + 1


@given(prompts(lambda _, rows, columns: rows * (columns + 1)), st.integers(3, 5))
def test_xdrope_token_by_token(prompt, num_axes):
    merge, items, num_tokens = prompt
    naive = [[index] * num_axes for index in range(num_tokens)]
    for number, item in enumerate(items):
        _, rows, columns = item.merged(merge)
        at = item.offset
        for row in range(rows):
            for column in range(columns + 1):
                naive[at][-3:] = [column, row, number]
                at += 1
    made = xdrope_positions(num_tokens, items, merge, num_axes)
    assert made.prompt.T.tolist() == naive
    assert made.delta == 0


@given(
    prompts(lambda frames, rows, columns: frames * rows * columns), st.lists(st.integers(1, 7), min_size=1, max_size=9)
)
def test_chunks_of_any_size_are_the_whole(prompt, counts):
    merge, items, num_tokens = prompt
    made = mrope_positions(num_tokens, items, merge)
    starts = np.cumsum([0, *counts])
    parts = [made.chunk(start, count) for start, count in zip(starts.tolist(), counts, strict=False)]
    whole = np.concatenate(parts, axis=1)
    assert whole.shape == (3, sum(counts))
    assert whole[:, :num_tokens].tolist() == made.prompt[:, : sum(counts)].tolist()
    later = [index + made.delta for index in range(num_tokens, sum(counts))]
    assert whole[:, num_tokens:].tolist() == [later] * 3


def test_positions_as_peers_have_them():
    made = mrope_positions(12, [Grid(1, (1, 4, 6)), Grid(8, (1, 2, 4))], 2)
    assert made.prompt.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 5, 7, 8],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 5, 7, 8],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert made.delta == -3
    video = mrope_positions(10, [Grid(1, (2, 4, 4), 2.0)], 2)
    assert (video.prompt[0].tolist(), video.delta) == ([0, 1, 1, 1, 1, 3, 3, 3, 3, 4], -5)
    assert video.chunk(9, 3).tolist() == [[4, 5, 6]] * 3


@pytest.mark.parametrize(
    "items", [[Grid(9, (1, 2, 2))], [Grid(2, (1, 1, 3)), Grid(4, (1, 1, 1))], [Grid(-1, (1, 1, 1))]]
)
def test_items_that_do_not_fit_are_refused(items):
    for make in (mrope_positions, xdrope_positions):
        with pytest.raises(ValueError, match="does not lie in tokens"):
            make(10, items, 1)
    with pytest.raises(ValueError, match="XD-RoPE of 2 axes"):
        xdrope_positions(1, (), 1, 2)


@given(st.integers(0, 8), st.integers(0, 8), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=3))
def test_clips_token_by_token(computed, count, items):
    for (offset, length), clip in zip(items, clip_items(computed, count, items), strict=True):
        pairs = [
            (at - offset, at - computed) for at in range(computed, computed + count) if offset <= at < offset + length
        ]
        if not pairs:
            assert clip is None
            continue
        assert list(zip(range(*clip.feature_range), range(*clip.token_range), strict=True)) == pairs


def test_clips_as_a_peer_has_them():
    assert clip_items(10, 5, [(2, 4), (12, 8)]) == (None, Clip((0, 3), (2, 5)))
    assert clip_items(3, 2, [(2, 6)]) == (Clip((1, 3), (0, 2)),)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(-1, 4), max_size=6), st.integers(0, 20), st.integers(0, 7), st.integers(0, 4)),
        max_size=4,
    )
)
def test_embeddings_token_by_token(some):
    columns = list(zip(*some, strict=True)) or [()] * 4
    naive = [
        first + rows[at] if at < len(rows) and rows[at] >= 0 else -1
        for rows, first, computed, count in some
        for at in range(computed, computed + count)
    ]
    lists, *others = columns
    others = [np.array(column, np.int32) for column in others]
    assert embedding_rows(Ragged.of(lists), *others).tolist() == naive
