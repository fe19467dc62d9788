"""Faults of padding and of captured shapes."""

import pytest

from fstep import ops
from fstep.ops._pad import descriptor_for
from fstep.state import BatchDescriptor, Plan
from fstep.testing import RollingModel
from tests.cases.conftest import Small
from tests.ops.conftest import Batch, new


def test_c095_a_smaller_batch_after_a_larger_one():
    """Nothing is staged between steps: the tail of the second step is made for it alone."""
    batch = Batch(capture=(BatchDescriptor(8, 8),))
    names = "abcdefgh"
    batch.prepare(dict.fromkeys(names, 1), {n: [b] for b, n in enumerate(names, 1)}, new=[new(n, 1) for n in names])
    ops.build_meta(ops.pad(batch.state))
    batch.commit([50] * 8)
    batch.prepare(dict.fromkeys("abc", 1), {})
    meta = ops.build_meta(ops.pad(batch.state)).step.meta.groups[0]
    assert meta.seq_lens.tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    assert meta.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert meta.slot_mapping.tolist() == [5, 9, 13, -1, -1, -1, -1, -1]
    assert meta.block_table.tolist() == [[1], [2], [3], [0], [0], [0], [0], [0]]


@pytest.mark.parametrize("lengths", [(4, 4), (10,), (1,), (5,), (4, 1, 9)], ids=str)
@pytest.mark.parametrize("chunk", [0, 4])
def test_c146_a_prompt_that_looks_like_a_decode(lengths, chunk):
    """No shape is taken for uniform decodes, and a recurrent model gets its state from every prompt."""
    capture = tuple(BatchDescriptor(size, size) for size in (1, 2, 4, 8))
    small = Small(model=RollingModel, capture=capture, limits={"long_prefill_token_threshold": chunk})
    for n, length in enumerate(lengths):
        small.add(str(n), range(length), max_tokens=5)
    small.run()
    assert all(small.tokens[name] == small.alone(name) for name in small.requests)


@pytest.mark.parametrize("reqs", [lambda size: size, lambda size: max(size // 2, 1)], ids=["one each", "two each"])
def test_c147_what_is_captured_is_found(reqs):
    capture = tuple(BatchDescriptor(size, reqs(size)) for size in (1, 2, 4, 8, 16))
    plan = Plan(10, 64, (), capture=capture)
    assert tuple(descriptor_for(plan, each.num_tokens, each.num_reqs) for each in capture) == capture
