"""`build_meta`: per KV group and attention group, against loops over requests."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from fstep import ops
from fstep.state import (
    AttentionGroup,
    BatchDescriptor,
    BatchState,
    ConfigError,
    FullAttention,
    KVGroup,
    NewRequest,
    Plan,
    Ragged,
    Sampled,
    Schedule,
    SlidingWindow,
    Tail,
    i32,
)
from tests.ops.conftest import GREEDY

MAX_MODEL_LEN = 20
GROUPS = (
    KVGroup(100, 4, attention=(AttentionGroup(kernel_block_size=2), AttentionGroup(tail=Tail.CONTINUE))),
    KVGroup(100, 2, kind=SlidingWindow(3)),
)
CAPTURE = tuple(BatchDescriptor(size, size) for size in (4, 16, 64))


@st.composite
def second_steps(draw, groups=GROUPS):
    """A state before `build_meta`, in the second chunk of a few prompts whose blocks may begin alike."""
    some = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(0, 6)), max_size=4))
    capture = CAPTURE if draw(st.booleans()) else ()
    state = BatchState.empty(Plan(100, MAX_MODEL_LEN, groups, capture=capture))
    names = tuple(f"r{b}" for b in range(len(some)))
    blocks = tuple(
        Ragged.of(
            [
                [10 * (b + 1) + n if n >= shared else n + 1 for n in range(-(-(first + second) // group.block_size))]
                for b, (first, second, shared) in enumerate(some)
            ]
        )
        for group in groups
    )
    new = tuple(
        NewRequest(name, [7] * (first + second), GREEDY) for name, (first, second, _) in zip(names, some, strict=True)
    )
    nothing = tuple(Ragged.of([[]] * len(names)) for _ in groups)
    state = ops.prepare(
        state, Schedule(new=new, request_ids=names, num_scheduled_tokens=i32(n for n, *_ in some), new_blocks=blocks)
    )
    got = Sampled(np.full((len(some), 1), -1, np.int32), i32([0] * len(some)), i32([0] * len(some)))
    state, _ = ops.commit(state, got)
    todo = Schedule(request_ids=names, num_scheduled_tokens=i32(n for _, n, _ in some), new_blocks=nothing)
    return ops.pad(ops.prepare(state, todo))


@given(second_steps())
def test_each_group_has_its_own_table(state):
    inputs, padding = state.step.inputs, state.step.padding
    meta = ops.build_meta(state).step.meta
    longest = int(inputs.seq_lens.max(initial=0))
    for index, (each, group, blocks) in enumerate(zip(meta.groups, GROUPS, state.rows.blocks, strict=True)):
        assert each.slot_mapping is padding.slot_mapping[index]
        assert (each.num_reqs, each.num_tokens) == (len(inputs.rows), len(inputs.token_ids))
        assert each.max_seq_len == longest
        assert each.max_query_len == inputs.num_scheduled_tokens.max(initial=0)
        needed = -(-longest // group.block_size)
        assert each.block_table.shape[1] in [1 << n for n in range(8) if needed <= 1 << n < 2 * max(needed, 1)]
        assert len(each.block_table) == padding.descriptor.num_reqs
        for b, table in enumerate(each.block_table.tolist()):
            held = blocks[inputs.rows[b]].tolist() if b < each.num_reqs else []
            assert table == (held + [0] * len(table))[: len(table)]


@given(second_steps())
def test_the_common_prefix_is_computed_and_the_same_for_all(state):
    inputs, table = state.step.inputs, state.rows.blocks[0]
    meta = ops.build_meta(state).step.meta
    held = [table[row].tolist() for row in inputs.rows]
    computed = state.rows.num_computed_tokens[inputs.rows].tolist()
    naive = 0
    while held and all(4 * (naive + 1) <= n for n in computed) and len({blocks[naive] for blocks in held}) == 1:
        naive += 1
    assert meta.groups[0].common_prefix_len == 4 * naive
    assert meta.groups[1].common_prefix_len == 0


@given(second_steps())
def test_attention_groups_differ_where_they_ask_for_it(state):
    meta = ops.build_meta(state).step.meta
    (halves, continued), (window,) = meta.attention
    whole = meta.groups[0]
    assert window is meta.groups[1]
    for b, blocks in enumerate(whole.block_table.tolist()):
        assert halves.block_table[b].tolist() == [part for block in blocks for part in (2 * block, 2 * block + 1)]
    assert halves.query_start_loc is whole.query_start_loc
    assert continued.block_table is whole.block_table
    same = evolve(state, plan=evolve(state.plan, tail=Tail.CONTINUE))
    assert continued.query_start_loc.tolist() == ops.pad(same).step.padding.query_start_loc.tolist()


@given(second_steps())
def test_unpadded_is_what_there_is_without_capture_sizes(state):
    bare = ops.build_meta(ops.pad(evolve(state, plan=evolve(state.plan, capture=())))).step.meta
    for padded, expected in zip(ops.build_meta(state).step.meta.groups, bare.groups, strict=True):
        found = ops.unpadded(padded)
        for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))
        assert found.num_reqs == len(found.seq_lens) == len(found.block_table)


@given(second_steps())
def test_what_is_captured_is_the_worst_of_its_shape_and_writes_nothing(state):
    real, worst = (ops.build_meta(state, capture=each).step.meta for each in (False, True))
    for ours, theirs in zip(worst.groups, real.groups, strict=True):
        assert (ours.num_reqs, ours.num_tokens) == (len(theirs.seq_lens), len(theirs.slot_mapping))
        assert (ours.seq_lens == MAX_MODEL_LEN).all()
        assert (ours.seq_lens >= theirs.seq_lens).all()
        assert (ours.slot_mapping == -1).all()
        assert not ours.block_table.any()
        assert ours.block_table.shape[1] >= theirs.block_table.shape[1]
        assert ours.slot_mapping.shape == theirs.slot_mapping.shape
        assert ours.max_query_len >= theirs.max_query_len
    assert worst.attention[0][0].block_table.shape[1] == 2 * worst.groups[0].block_table.shape[1]


def test_a_kernel_block_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="kernel_block_size=3: must divide the 4 tokens of the group's blocks"):
        KVGroup(8, 4, attention=(AttentionGroup(kernel_block_size=3),))
    with pytest.raises(ConfigError, match="kernel_block_size=0: must be at least 1"):
        AttentionGroup(kernel_block_size=0)
    assert KVGroup(8, 4, kind=FullAttention()) == KVGroup(8, 4)


@pytest.mark.parametrize("served", [((0,),), ((0, 1), (1,)), ((0,), (2,))])
def test_attention_groups_serve_each_layer_once(served):
    with pytest.raises(ConfigError, match=r"must be the group's \(0, 1\), once each"):
        KVGroup(8, 4, (0, 1), attention=tuple(AttentionGroup(layers) for layers in served))
    assert len(KVGroup(8, 4, (0, 1), attention=(AttentionGroup((1,)), AttentionGroup((0,)))).attention) == 2
