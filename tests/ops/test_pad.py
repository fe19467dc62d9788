"""`pad` and `build_meta`: the batch at a captured size."""

import pytest

from fstep import ops
from fstep.ops._pad import descriptor_for
from fstep.state import BatchDescriptor, BatchState, KVGroup, PhaseError, Plan, Tail
from tests.ops.conftest import Batch, new

SIZES = tuple(BatchDescriptor(size, size) for size in (1, 2, 4, 8))


@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "padded"), [(1, 1, 1), (3, 3, 4), (3, 1, 4), (8, 8, 8), (9, 2, None), (0, 0, None)]
)
def test_the_smallest_captured_shape_that_holds_the_batch(num_tokens, num_reqs, padded):
    plan = Plan(100, 64, (KVGroup(8, 4),), capture=SIZES)
    expected = BatchDescriptor(padded, padded) if padded else BatchDescriptor(num_tokens, num_reqs)
    assert descriptor_for(plan, num_tokens, num_reqs) == expected


@pytest.mark.parametrize(
    ("tail", "query_start_loc"), [(Tail.REPEAT, [0, 1, 2, 5, 5]), (Tail.CONTINUE, [0, 1, 2, 5, 8])]
)
def test_tails(tail, query_start_loc):
    batch = Batch(capture=(BatchDescriptor(8, 4),), tail=tail)
    batch.prepare({"a": 1, "b": 1, "c": 3}, {"a": [4], "b": [5], "c": [6]}, new=(new("a", 1), new("b", 1), new("c", 3)))
    step = ops.build_meta(ops.pad(batch.state)).step
    assert step.padding.query_start_loc.tolist() == query_start_loc
    assert step.padding.seq_lens.tolist() == [1, 1, 3, 0]
    assert step.padding.slot_mapping[0].tolist() == [16, 20, 24, 25, 26, -1, -1, -1]
    meta = step.meta.groups[0]
    assert meta.block_table.tolist() == [[4], [5], [6], [0]]
    assert (meta.num_reqs, meta.num_tokens, meta.max_query_len, meta.max_seq_len) == (3, 5, 3, 3)


def test_the_table_is_as_wide_as_the_widest_row_rounded_up():
    batch = Batch()
    batch.prepare({"a": 9, "b": 1}, {"a": [4, 5, 6], "b": [7]}, new=(new("a", 9), new("b", 1)))
    assert ops.build_meta(ops.pad(batch.state)).step.meta.groups[0].block_table.tolist() == [[4, 5, 6, 0], [7, 0, 0, 0]]


@pytest.mark.parametrize(("phase", "needs"), [("pad", "prepare"), ("build_meta", "prepare")])
def test_a_phase_too_early_names_both(phase, needs):
    state = BatchState.empty(Plan(100, 64, (KVGroup(8, 4),)))
    with pytest.raises(PhaseError, match=rf"^{phase}\(\) needs what {needs}\(\)"):
        getattr(ops, phase)(state)


def test_build_meta_needs_pad(batch):
    batch.prepare({"a": 1}, {"a": [1]}, new=(new("a", 1),))
    with pytest.raises(PhaseError, match=r"^build_meta\(\) needs what pad\(\)"):
        ops.build_meta(batch.state)
