"""Every token on one rank, at a place of its own; work dealt evenly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fstep.ops.context_parallel import ContextRank, head_tail_split, local_seq_lens, slot_mapping
from fstep.state import ConfigError


def place(position, block_size, world, interleave):
    """The rank of a token, the entry of its block table and the offset in the block: tokens dealt out one by one."""
    kept = [0] * world
    for earlier in range(position + 1):
        rank = earlier // interleave % world
        kept[rank] += 1
    return rank, (kept[rank] - 1) // block_size, (kept[rank] - 1) % block_size


@st.composite
def batches(draw):
    world, interleave = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    block_size = interleave * draw(st.integers(1, 3))
    requests = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5), st.booleans()), max_size=4))
    return world, interleave, block_size, requests


@given(batches(), st.integers(0, 3))
def test_each_token_has_one_slot_on_one_rank(batch, padding):
    world, interleave, block_size, requests = batch
    table = 1 + np.arange(len(requests) * 12, dtype=np.int32).reshape(-1, 12)
    rows = [-1 if dummy else len(requests) - 1 - b for b, (_, _, dummy) in enumerate(requests)]
    positions = [p for computed, count, _ in requests for p in range(computed, computed + count)]
    starts = np.cumsum([0, *(count for _, count, _ in requests)])
    owners = [row for row, (_, count, _) in zip(rows, requests, strict=True) for _ in range(count)]
    size = len(positions) + padding
    for rank in range(world):
        slots = slot_mapping(
            table, rows, starts, positions, block_size, size, ContextRank(rank, world, interleave)
        ).tolist()
        for row, position, slot in zip(owners, positions, slots, strict=False):
            owner, entry, offset = place(position, block_size, world, interleave)
            assert slot == (-1 if row < 0 or owner != rank else table[row, entry] * block_size + offset)
        assert slots[len(positions) :] == [-1] * padding


def test_slots_as_a_peer_has_them():
    table = [[3, 1], [2, 0], [5, 0]]
    assert slot_mapping(table, [2, 0], [0, 1, 3], [15, 16, 17], 16, 4).tolist() == [95, 16, 17, -1]
    sixth = slot_mapping([[0, 1]], [0], [0, 16], range(16), 128, 16, ContextRank(5, 8))
    assert np.nonzero(sixth >= 0)[0].tolist() == [5, 13]
    assert sixth[[5, 13]].tolist() == [0, 1]


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 4), st.integers(1, 5))
def test_local_lengths_count_the_tokens_of_each_rank(seq_lens, world, interleave):
    naive = [
        [sum(position // interleave % world == rank for position in range(length)) for rank in range(world)]
        for length in seq_lens
    ]
    assert local_seq_lens(seq_lens, world, interleave).tolist() == naive


@given(st.integers(0, 60), st.integers(1, 5))
def test_heads_and_tails_are_the_prompt(num_tokens, world):
    ranks = head_tail_split(num_tokens, world)
    assert len(ranks) == world
    parts = sorted(part for rank in ranks for part in rank if part)
    assert [token for part in parts for token in range(*part)] == list(range(num_tokens))
    if num_tokens % (2 * world) == 0:
        work = {sum(position + 1 for part in rank if part for position in range(*part)) for rank in ranks}
        assert len(work) == 1


def test_heads_and_tails_as_a_peer_has_them():
    assert head_tail_split(3, 2) == (((0, 1), None), ((1, 2), (2, 3)))
    assert head_tail_split(100, 4)[0] == ((0, 13), (91, 100))


@pytest.mark.parametrize("wrong", [(1, 1), (-1, 2), (0, 0), (0, 2, 0)])
def test_a_rank_that_there_is_not_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"rank|world|interleave"):
        ContextRank(*wrong)


def test_a_block_that_is_not_whole_runs_is_refused():
    with pytest.raises(ValueError, match="blocks of 4 tokens are not whole runs of 3"):
        slot_mapping([[0]], [0], [0, 1], [0], 4, 1, ContextRank(0, 2, 3))
